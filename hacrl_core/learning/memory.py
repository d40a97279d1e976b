"""How much memory an agent's stages will take, from its config alone.

``make bench-memory`` compares the estimate with what they do take.

With N parameters, L layers, hidden size H, query width Q (heads × head size), key width K, MLP width I, vocabulary V, b
bytes per sampling weight:

    generate  b·N + batch·(prompt + max_tokens)·2·L·K·b·1.5 (slots grow with room to spare)
              + 3·batch·V·4 (logits and their sums)
    score     4·N + tokens·4·(4·H + 2·Q + 3·I) (one layer at a time) + logits of a chunk
    update    4·N + 12·trainable (gradient and AdamW's moments) + activations + logits of a chunk
              activations = tokens·L·4·(6·H + 5·Q + 4·I), with gradient checkpointing tokens·4·(L·H + 6·H + 5·Q + 4·I)

The gradient cosine adds nothing: it passes every gradient through the one buffer and keeps norms only.

``tokens`` is the fullest microbatch that token_budget and the longest sequence allow. A process has its own size on
top.
"""

from dataclasses import dataclass

from hacrl_core.config.generation import GenerateConfig, VllmEngineConfig
from hacrl_core.config.training import LoraConfig, ScoreConfig, UpdateConfig
from hacrl_core.learning.shape import Shape

PROCESS_BYTES = 600 << 20  # Python, torch and transformers on the CPU; a CUDA context is of this size, too
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 4}  # adopted checkpoints are float32, which "auto" takes
_CHUNK_TOKENS, _CHUNK_ELEMENTS = 256, 1 << 23  # as in the fused loss


@dataclass(frozen=True)
class Estimate:
    """Bytes of each stage, the process's own size included."""

    generate: int
    score: int
    update: int

    @property
    def highest(self) -> int:
        """The largest of the three peaks."""
        return max(self.generate, self.score, self.update)


def estimate(
    shape: Shape, generate: GenerateConfig, score: ScoreConfig, update: UpdateConfig, prompt_tokens: int
) -> Estimate:
    """For prompts of up to ``prompt_tokens``; responses count with their limit."""
    length = min(prompt_tokens + generate.max_tokens, shape.context)
    logits = _chunk_bytes(shape, generate.max_tokens, update.max_logits_mb)
    body = 6 * shape.hidden + 5 * shape.query + 4 * shape.mlp
    layers = shape.layers * (shape.hidden if update.gradient_checkpointing else body)
    saved = layers + (body if update.gradient_checkpointing else 0)
    wide = 4 * shape.hidden + 2 * shape.query + 3 * shape.mlp
    half = 2 if update.autocast == "bf16" else 4
    return Estimate(
        generate=PROCESS_BYTES + _sampling_bytes(shape, generate, length),
        score=PROCESS_BYTES + 4 * shape.parameters + _tokens(score.token_budget, length) * wide * half + logits,
        update=PROCESS_BYTES
        + 4 * shape.parameters
        + 12 * trainable(shape, update.lora)
        + _tokens(update.token_budget, length) * saved * half
        + logits,
    )


def trainable(shape: Shape, lora: LoraConfig | None) -> int:
    """All parameters, or those of the adapters (on every linear layer: an upper bound where only some are named)."""
    if lora is None:
        return shape.parameters
    return sum(lora.rank * (inputs + outputs) for inputs, outputs in shape.linear)


def _sampling_bytes(shape: Shape, generate: GenerateConfig, length: int) -> int:
    engine = generate.engine
    size = _BYTES[engine.dtype]
    if isinstance(engine, VllmEngineConfig):
        # On a GPU vLLM takes its share whatever the model needs; this is what it needs at least, on each GPU.
        slots = engine.max_sequences * (engine.max_length or length)
        whole = size * shape.parameters + slots * 2 * shape.layers * shape.key * size
        return whole // engine.tensor_parallel_size
    slots = generate.batch_size * (-(-length // 16) * 16)
    cache = slots * 2 * shape.layers * shape.key * size
    return size * shape.parameters + cache * 3 // 2 + 3 * generate.batch_size * shape.vocabulary * 4


def _tokens(budget: int, length: int) -> int:
    """A microbatch holds whole sequences: as many of the longest as fit, and at least one."""
    return max(length, budget // length * length)


def _chunk_bytes(shape: Shape, response: int, max_logits_mb: int) -> int:
    together = max(_CHUNK_TOKENS, _CHUNK_ELEMENTS // shape.vocabulary)
    alone = min(response, max_logits_mb * (1 << 20) // (4 * shape.vocabulary))
    return 4 * shape.vocabulary * max(together, alone)

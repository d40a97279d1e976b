"""How much memory an agent's stages will take, from its config alone.

``make bench-memory`` compares the estimate with what they do take, mode by mode. It needs no torch.

With N parameters (B of them in the layers, E in embeddings and head), L layers, hidden size H, query width Q (heads ×
head size), key width K, MLP width I, vocabulary V, R ranks, b bytes per sampling weight:

    generate  built-in  b·N + batch·(prompt + max_tokens)·2·L·K·b·2.5 (slots grow with half as much to spare, while the
                        old ones are still there) + 3·batch·V·4 (logits and their sums)
              vLLM      (b·N + one sequence of full length in the KV cache) / width + its own buffers; a larger cache
                        takes what memory_share leaves and never more
    score     4·N + hidden states + one layer at a time or the logits of a chunk, whichever is more (ranks: both)
    update    4·N + 12·trainable (gradient and AdamW's moments) + activations + hidden states and logits of a chunk
              + 4·V·H without LoRA: the embedding's gradient of a microbatch, before it is added to the whole one
    bf16      one process: + 2·B, autocast's copies of the weights, which live as long as the graph; one layer's in
              score and with gradient checkpointing, none with LoRA
    ranks     weights, gradient and moments / R. The higher of two moments, on each rank: at the loss, the gathered
              group of embeddings and head (float32), the head's gradient, two gathered layers, one layer's gradient and
              its copy for the others, beside the activations; at the end of the backward pass (score: while the group
              is gathered), that group three times (score: twice) and no activations
    offload   slices, gradient and moments are in the host's memory

Activations of a token and layer, in bytes: float32 4·(6·H + 5·Q + 4·I). Under bf16 the residual stream and what the
norms keep stay float32, so it is 20·H + 10·Q + 8·I. With gradient checkpointing every layer keeps its float32 input,
4·H, and one layer the rest.

The gradient cosine adds nothing: it passes every gradient through the one buffer and keeps norms only. ``tokens`` is
the fullest microbatch that token_budget and the longest sequence allow.
"""

from dataclasses import dataclass, replace

from hacrl_core.config.generation import GenerateConfig, VllmEngineConfig
from hacrl_core.config.training import LoraConfig, ScoreConfig, UpdateConfig
from hacrl_core.learning.shape import Shape

PROCESS_BYTES = 600 << 20  # Python, torch and transformers on the CPU; a CUDA context is of this size, too
# vLLM beside its weights and cache: activations of a full batch, CUDA graphs, its sampler's buffers. Not measured here.
ENGINE_BYTES = 3 << 30
# What a sleeping vLLM keeps on a GPU: its CUDA context, graphs and communication buffers. Not measured here.
ASLEEP_BYTES = 2 << 30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 4}  # adopted checkpoints are float32, which "auto" takes
# As in the fused loss: rows on the CPU and on a GPU, and elements of small vocabularies.
_CHUNK_TOKENS, _CHUNK_TOKENS_GPU, _CHUNK_ELEMENTS = 256, 2048, 8 << 20


@dataclass(frozen=True)
class Estimate:
    """Bytes of each stage on the busiest device, the process's own size included."""

    generate: int
    score: int
    update: int

    @property
    def highest(self) -> int:
        """The largest of the three peaks."""
        return max(self.generate, self.score, self.update)


def estimate(
    shape: Shape,
    generate: GenerateConfig,
    score: ScoreConfig,
    update: UpdateConfig,
    prompt_tokens: int,
    *,
    on_gpu: bool = False,
) -> Estimate:
    """Return the peaks of stages that have a process to themselves; see `beside` for what else stays loaded.

    For prompts of up to ``prompt_tokens``; responses count with their limit.
    """
    length = _longest(shape, generate, prompt_tokens)
    logits = _logit_bytes(shape, generate.max_tokens, update.max_logits_mb, on_gpu=on_gpu)
    scored, updated = _tokens(score.token_budget, length), _tokens(update.token_budget, length)
    half = update.autocast == "bf16"
    # Hidden states of a microbatch: what the body returns, those of responses in float32, and their gradient.
    layer = scored * _one_layer(shape, half=half)
    # A forward pass has freed its layers when the logits come. On ranks the sum is nearer to what was measured.
    scoring = scored * 8 * shape.hidden + (max(layer, logits) if update.ranks == 1 else layer + logits)
    training = updated * (_activations(shape, update) + 12 * shape.hidden) + logits
    return Estimate(
        generate=PROCESS_BYTES + _sampling_bytes(shape, generate, length, on_gpu=on_gpu),
        score=PROCESS_BYTES + _held_for_scoring(shape, update, scoring),
        update=PROCESS_BYTES + _held_for_training(shape, update, training),
    )


def beside(
    shape: Shape, generate: GenerateConfig, update: UpdateConfig, *, has_reference: bool, total: int = 0
) -> Estimate:
    """Return what else is on a device during each stage: a kept engine, a first version, a warm learner.

    ``total`` is the memory of the GPU that engine and learner share; 0 means that the agent runs on the CPU.
    """
    engine = generate.engine
    whole = 4 * shape.parameters // update.ranks
    stays = cache = 0
    if isinstance(engine, VllmEngineConfig):
        share = int(engine.memory_share * total)
        # On a GPU it fills its share, whatever the model needs.
        needs = _sampling_bytes(shape, generate, _longest(shape, generate, 0), on_gpu=True)
        cache = max(0, share - needs) if total else 0
        stays = {True: share, False: 0, "sleep": ASLEEP_BYTES}[engine.keep] if total else 0
    elif engine.keep:
        stays = _BYTES[engine.dtype] * shape.parameters
    # The first version stays beside the newest one on the CPU and on several ranks; one GPU keeps it if it has room.
    first = whole if has_reference and (not total or update.ranks > 1) and update.offload == "none" else 0
    warm = 0 if update.offload != "none" else whole
    return Estimate(generate=cache + warm + first, score=stays + first, update=stays + first)


def together(alone: Estimate, other: Estimate) -> Estimate:
    """Add up two estimates stage by stage."""
    return replace(
        alone,
        generate=alone.generate + other.generate,
        score=alone.score + other.score,
        update=alone.update + other.update,
    )


def trainable(shape: Shape, lora: LoraConfig | None) -> int:
    """All parameters, or those of the adapters (on every linear layer: an upper bound where only some are named)."""
    if lora is None:
        return shape.parameters
    return sum(lora.rank * (inputs + outputs) for inputs, outputs in shape.linear)


def host_bytes(shape: Shape, update: UpdateConfig) -> int:
    """Return what all ranks together keep in the host's memory because it is offloaded."""
    if update.offload == "none":
        return 0
    return 4 * shape.parameters + 12 * trainable(shape, update.lora)


def on_one_host(each: Estimate, shape: Shape, update: UpdateConfig) -> Estimate:
    """Return what all ranks together take where they share one memory: those that run on the CPU.

    While rank 0 samples, the others wait with their slices.
    """
    others, away = update.ranks - 1, host_bytes(shape, update)
    waiting = PROCESS_BYTES + (0 if away else 4 * shape.parameters // update.ranks)
    return Estimate(
        generate=each.generate + others * waiting + (4 * shape.parameters if away else 0),
        score=each.score * update.ranks + (4 * shape.parameters if away else 0),
        update=each.update * update.ranks + away,
    )


# -- the learner -------------------------------------------------------------------------------------------------------


def _held_for_scoring(shape: Shape, update: UpdateConfig, working: int) -> int:
    """Return the peak of a forward pass on one device: weights and what it works with, ``working`` bytes."""
    half = update.autocast == "bf16"
    if update.ranks == 1:
        return 4 * shape.parameters + working + (2 * _layer(shape) if half else 0)
    kept = 0 if update.offload != "none" else 4 * shape.parameters // update.ranks
    root, layers = 4 * shape.embeddings, 2 * _layer(shape) * (2 if half else 4)
    return kept + max(root + layers + working, 2 * root)


def _held_for_training(shape: Shape, update: UpdateConfig, working: int) -> int:
    """Return the peak of an update on one device: weights, gradient, moments, what is gathered, and ``working``."""
    half, trained = update.autocast == "bf16", trainable(shape, update.lora)
    whole = 4 * shape.parameters + 12 * trained
    if update.ranks == 1:
        copies = 2 * (_layer(shape) if update.gradient_checkpointing else shape.body) if half else 0
        return whole + working + (0 if update.lora else 4 * shape.head + copies)
    kept = 0 if update.offload != "none" else whole // update.ranks
    root, layers = 4 * shape.embeddings, 2 * _layer(shape) * (2 if half else 4)
    if update.lora:
        return kept + max(root + layers + working, 2 * root)
    gradients = 4 * shape.head + 2 * 4 * _layer(shape)
    return kept + max(root + layers + gradients + working, 3 * root)


def _layer(shape: Shape) -> int:
    return shape.body // shape.layers


def _one_layer(shape: Shape, *, half: bool) -> int:
    """Return the bytes of a token inside one layer of a forward pass."""
    if half:
        return 16 * shape.hidden + 4 * shape.query + 6 * shape.mlp
    # Beside the residual stream and its norm: three outputs of the MLP, or what the rotation of queries and keys needs.
    return 4 * (2 * shape.hidden + max(3 * shape.mlp, 4 * (shape.query + shape.key)))


def _activations(shape: Shape, update: UpdateConfig) -> int:
    """Return the bytes of a token that the backward pass needs."""
    layer = 4 * (6 * shape.hidden + 5 * shape.query + 4 * shape.mlp)
    if update.autocast == "bf16":
        layer = 20 * shape.hidden + 10 * shape.query + 8 * shape.mlp
    if update.lora is not None:
        layer = _adapted_layer(shape, update.lora, layer, half=update.autocast == "bf16")
    if update.gradient_checkpointing:
        return shape.layers * 4 * shape.hidden + layer
    return shape.layers * layer


def _adapted_layer(shape: Shape, lora: LoraConfig, layer: int, *, half: bool) -> int:
    """Return the bytes of a token in a layer with adapters.

    In bf16 each linear layer keeps a bfloat16 copy of its input, and the merged weight is computed again. In float32
    one more output of every linear layer stays: found by measuring.
    """
    if half:
        return 26 * shape.hidden + 10 * shape.query + 8 * shape.mlp
    outputs = 2 * shape.hidden + shape.query + 2 * shape.key + 2 * shape.mlp
    return layer + 4 * (outputs + 7 * lora.rank)


# -- sampling ----------------------------------------------------------------------------------------------------------


def _sampling_bytes(shape: Shape, generate: GenerateConfig, length: int, *, on_gpu: bool) -> int:
    engine = generate.engine
    size = _BYTES[engine.dtype]
    slot = 2 * shape.layers * shape.key * size
    if isinstance(engine, VllmEngineConfig):
        whole = size * shape.parameters + (engine.max_length or length) * slot
        return whole // engine.tensor_parallel_size + (ENGINE_BYTES if on_gpu else 0)
    slots = generate.batch_size * (-(-length // 16) * 16)
    return size * shape.parameters + slots * slot * 5 // 2 + 3 * generate.batch_size * shape.vocabulary * 4


def _longest(shape: Shape, generate: GenerateConfig, prompt_tokens: int) -> int:
    return min(prompt_tokens + generate.max_tokens, shape.context)


def _tokens(budget: int, length: int) -> int:
    """A microbatch holds whole sequences: as many of the longest as fit, and at least one."""
    return max(length, budget // length * length)


def _logit_bytes(shape: Shape, response: int, max_logits_mb: int, *, on_gpu: bool) -> int:
    rows = max(_CHUNK_TOKENS_GPU if on_gpu else _CHUNK_TOKENS, _CHUNK_ELEMENTS // shape.vocabulary)
    alone = min(response, max_logits_mb * (1 << 20) // (4 * shape.vocabulary))
    return 4 * shape.vocabulary * max(rows, alone)

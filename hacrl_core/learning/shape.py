"""The shape of a model: what of its architecture decides memory and time. Needs no torch.

`shape_of` counts it on a transformers config, `dense` computes it for a Llama- or Qwen-style decoder, and `KNOWN` has
the architectures of the paper's models, so that a campaign can be planned where neither model nor network is at hand.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What of a model's architecture decides its memory and its time."""

    parameters: int
    layers: int
    hidden: int
    query: int  # heads × head size
    key: int  # key heads × head size
    mlp: int
    vocabulary: int
    context: int
    # Inputs and outputs of every linear layer but the head: what LoRA attaches to.
    linear: tuple[tuple[int, int], ...] = ()
    tied: bool = True  # the head is the embedding

    @property
    def head(self) -> int:
        """The parameters of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def embeddings(self) -> int:
        """The parameters of the embedding and, where it is a matrix of its own, the head."""
        return self.head if self.tied else 2 * self.head

    @property
    def body(self) -> int:
        """The parameters of everything else: the layers."""
        return self.parameters - self.embeddings


def dense(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocabulary: int,
    tied: bool,
    context: int,
    head_size: int | None = None,
    normed_heads: bool = False,
) -> Shape:
    """Return the shape of a decoder with gated MLPs and no biases; ``normed_heads``: queries and keys have norms."""
    size = head_size or hidden // heads
    query, key = heads * size, kv_heads * size
    attention = ((hidden, query), (hidden, key), (hidden, key), (query, hidden))
    linear = (*attention, (hidden, mlp), (hidden, mlp), (mlp, hidden))
    layer = sum(inputs * outputs for inputs, outputs in linear) + 2 * hidden + (2 * size if normed_heads else 0)
    return Shape(
        parameters=vocabulary * hidden * (1 if tied else 2) + layers * layer + hidden,
        layers=layers,
        hidden=hidden,
        query=query,
        key=key,
        mlp=mlp,
        vocabulary=vocabulary,
        context=context,
        linear=linear * layers,
        tied=tied,
    )


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, *, tied: bool, context: int) -> Shape:
    return dense(
        hidden=hidden, layers=layers, heads=heads, kv_heads=8, mlp=mlp, vocabulary=151936, tied=tied, context=context,
        head_size=128, normed_heads=True,
    )  # fmt: skip


def _llama(hidden: int, layers: int, heads: int) -> Shape:
    return dense(
        hidden=hidden, layers=layers, heads=heads, kv_heads=8, mlp=8192, vocabulary=128256, tied=True, context=131072
    )


# The architectures that these checkpoints publish in their config.json.
KNOWN: dict[str, Shape] = {
    "Qwen/Qwen3-1.7B-Base": _qwen3(2048, 28, 16, 6144, tied=True, context=32768),
    "Qwen/Qwen3-4B-Base": _qwen3(2560, 36, 32, 9728, tied=True, context=32768),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True, context=40960),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen3(2560, 36, 32, 9728, tied=True, context=262144),
    "Qwen/Qwen3-8B-Base": _qwen3(4096, 36, 32, 12288, tied=False, context=32768),
    "meta-llama/Llama-3.2-1B-Instruct": _llama(2048, 16, 32),
    "meta-llama/Llama-3.2-3B-Instruct": _llama(3072, 28, 24),
}


def shape_of(config: Any, *, trust_remote_code: bool = False) -> Shape:
    """Return the shape of a transformers config, counted on a model that is built without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    head = model.get_output_embeddings()
    linear = tuple(
        (m.in_features, m.out_features) for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head
    )
    return Shape(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        query=heads * head_dim,
        key=int(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        mlp=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        vocabulary=int(text.vocab_size),
        context=int(getattr(text, "max_position_embeddings", 0) or 1 << 30),
        linear=linear,
        tied=head is not None and head.weight is model.get_input_embeddings().weight,
    )

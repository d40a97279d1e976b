"""Shared prefixes: what the sequences of a microbatch have in common runs through the model once.

In a causal model a token's states depend on its prefix only. So the tokens of a microbatch are nodes of a tree, and all
that works token by token (projections, norms, feed-forward layers) sees every node once. Attention alone needs whole
sequences: the nodes' queries, keys and values are laid out as rows, attended to as ever, and each node takes its result
from one of the rows it stands in.

The model's own code runs; only its attention function is replaced, through the interface that ``transformers`` has for
it. Whether a model bears that is proved on its own forward, once per model. Small Llama-style models and short rows run
through `hacrl_core.learning.lean` instead.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hacrl_core.learning.fused.head import hidden_states
from hacrl_core.learning.lean import depends_on_prefixes, lean_states, runs_lean
from hacrl_core.learning.sequences import Microbatch, Tree, prefix_tree

_NAME = "hacrl_shared_prefixes"
_TOLERANCE = 1e-5  # relative to the largest hidden state, float32


def response_states(model: PreTrainedModel, batch: Microbatch) -> Tensor:
    """Last hidden states [R, H] of the positions that predict a response token."""
    if runs_lean(model, batch):
        return lean_states(model, batch)
    device = next(model.parameters()).device
    positions_R = torch.from_numpy(batch.positions_R).to(device, non_blocking=True)
    if batch.tree is None:
        input_ids_BT = torch.from_numpy(batch.input_ids_BT).to(device, non_blocking=True)
        return hidden_states(model, input_ids_BT).flatten(0, 1)[positions_R]
    nodes_NH = _node_states(model, batch.tree)
    return _rows(nodes_NH, torch.from_numpy(batch.tree.place_BT).flatten()[positions_R])


def attention_of(model: PreTrainedModel, batch: Microbatch) -> AbstractContextManager[None]:
    """Around a backward pass that runs layers again: they must meet the attention function of the forward pass."""
    return nullcontext() if batch.tree is None else _attention_over_prefixes(model)


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether the model's states may be computed once per prefix.

    Not on CUDA, where nobody has measured it, nor below float32.
    """
    if model not in _proved:
        _proved[model] = depends_on_prefixes(model) and _probe(model)
    return _proved[model]


_proved: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


@torch.no_grad()
def _probe(model: PreTrainedModel) -> bool:
    """Four rows with common prefixes of different lengths against the model's own forward."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(24) * 7919 + 3) % vocabulary
    rows = [ids[:9], torch.cat([ids[:5], ids[9:14]]), torch.cat([ids[:5], ids[9:12], ids[14:16]]), ids[16:24]]
    padded_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths_B = torch.tensor([len(row) for row in rows])
    real_BT = torch.arange(padded_BT.shape[1]) < lengths_B[:, None]
    tree = prefix_tree(padded_BT.numpy(), lengths_B.numpy())
    expected = hidden_states(model, padded_BT)[real_BT]
    try:
        found = _node_states(model, tree)[torch.from_numpy(tree.place_BT)][real_BT]
    except (
        TypeError,
        ValueError,
        RuntimeError,
        KeyError,
    ):  # its forward knows no such argument, or wants its own attention
        return False
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _node_states(model: PreTrainedModel, tree: Tree) -> Tensor:
    with _attention_over_prefixes(model):
        output = model.base_model(
            input_ids=torch.from_numpy(tree.tokens_N)[None],
            position_ids=torch.from_numpy(tree.depth_N)[None],
            use_cache=False,
            place_BT=torch.from_numpy(tree.place_BT),
            cell_N=torch.from_numpy(tree.cell_N),
        )
    nodes_NH: Tensor = output.last_hidden_state[0]
    return nodes_NH


@contextmanager
def _attention_over_prefixes(model: PreTrainedModel) -> Iterator[None]:
    usual = model.config._attn_implementation
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = usual


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    place_BT: Tensor,
    cell_N: Tensor,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Map nodes [1, heads, N, channels] to rows, attend causally there, and map back to [1, N, heads, channels]."""

    def laid_out(states: Tensor) -> Tensor:
        _, heads, nodes, channels = states.shape
        rows_BTC = _rows(states[0].transpose(0, 1).reshape(nodes, heads * channels), place_BT)
        return rows_BTC.view(*place_BT.shape, heads, channels).transpose(1, 2)

    # Padding stands behind a row's tokens, where no token looks.
    mixed_BTHC, _ = sdpa_attention_forward(module, laid_out(query), laid_out(key), laid_out(value), None, **settings)
    batch, length, heads, channels = mixed_BTHC.shape
    mixed_NC = _rows(mixed_BTHC.reshape(batch * length, heads * channels), cell_N)
    return mixed_NC.view(1, -1, heads, channels), None


def _rows(table: Tensor, places: Tensor) -> Tensor:
    """``table[places]``; as an embedding, whose backward adds rows up several times faster than that of indexing."""
    return F.embedding(places, table)


AttentionInterface.register(_NAME, _attention)

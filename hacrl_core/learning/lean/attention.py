"""Attention over the nodes of a microbatch's prefix tree, for short rows.

torch's attention kernel takes rows one by one and keeps no scores, which is slow for short rows. Here a prompt asks
once for all its responses, responses ask in blocks of tokens, and a block of queries meets the keys up to its end only.
Responses stand in the order of their lengths, so the rows of a later block are the first of an earlier one. Scores are
kept for the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hacrl_core.learning.sequences import Ints, Microbatch, Tree, prefix_tree

Bools = npt.NDArray[np.bool_]
_BLOCK = 32  # tokens of a response that ask together


@dataclass(frozen=True)
class Block:
    """Queries of equally many nodes in each of some rows. Axes: B rows, K key heads, U queries' heads of each, C, T."""

    queries: slice  # in the order B, K, U, C
    rows: int  # the first rows of its keys
    length: int  # the first tokens of its keys
    bias: Tensor  # [B, 1, 1, C, T]: minus infinity where a query must not look


@dataclass(frozen=True)
class Rows:
    """Rows of keys and of values, in the order B, K, T, and the blocks of queries that look at them."""

    keys: slice
    values: slice
    length: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Cells:
    """Where nodes stand while they attend. Places count rows of [N · (heads + 2 · key heads), channels]."""

    sides: tuple[Rows, Rows]  # of prompts and of responses
    key_heads: int
    places: Tensor  # of all queries, then of keys and values
    queries: int  # how many of them are queries
    answers: Tensor  # [N · heads]: the query that answers for a node and head
    asked: Tensor  # its inverse: a row of [N · heads], or N · heads for a query that nobody reads
    homes: Tensor  # for every row of the projections one of its places
    others: tuple[Tensor, Tensor]  # its further places, and the rows


class _Layout:
    """Collects places, and which of them are not padding."""

    def __init__(self, heads: int, key_heads: int) -> None:
        self.head_KU = np.arange(heads).reshape(key_heads, -1)
        self.key_K = heads + np.arange(key_heads)
        self.wide = heads + 2 * key_heads
        self.places: list[Ints] = []
        self.real: list[Bools] = []
        self.size = 0

    def add(self, nodes_BT: Ints, real_BT: Bools, heads: Ints) -> slice:
        """Append the given heads (of shape K or K, U) of nodes, in the order B, heads, T."""
        shape = (len(nodes_BT), *(1,) * heads.ndim, nodes_BT.shape[1])
        places = nodes_BT.reshape(shape) * self.wide + heads[..., None]
        self.places.append(places.reshape(-1))
        self.real.append(np.broadcast_to(real_BT.reshape(shape), places.shape).reshape(-1))
        start, self.size = self.size, self.size + places.size
        return slice(start, self.size)

    def block(self, nodes_BC: Ints, real_BC: Bools, depth_BC: Ints, length: int) -> Block:
        """Append queries; a node sees the keys up to its own depth."""
        queries = self.add(nodes_BC, real_BC, self.head_KU)
        later_BCT = torch.from_numpy(np.arange(length) > depth_BC[:, :, None])
        bias = torch.zeros(later_BCT.shape).masked_fill_(later_BCT, float("-inf"))
        return Block(queries, len(nodes_BC), length, bias[:, None, None])


def tree_of(batch: Microbatch) -> Tree:
    """Return the microbatch's tree, also where the padded rows are hardly larger: nodes have no padding."""
    if batch.tree is not None:
        return batch.tree
    last_B = batch.positions_R[np.cumsum(batch.lengths) - 1]
    return prefix_tree(batch.input_ids_BT, last_B % batch.input_ids_BT.shape[1] + 1)


def cells_of(batch: Microbatch, tree: Tree, heads: int, key_heads: int) -> Cells:
    """Lay a microbatch's nodes out for attention."""
    place_BT, layout = tree.place_BT, _Layout(heads, key_heads)
    lengths_B = np.array(batch.lengths)
    prompt_B = batch.positions_R[np.cumsum(lengths_B) - lengths_B] % place_BT.shape[1] + 1
    _, first_G = np.unique(place_BT[np.arange(len(place_BT)), prompt_B - 1], return_index=True)
    prompts, of_prompts = _stretch(place_BT, first_G, np.zeros_like(first_G), prompt_B[first_G])
    length = prompts.shape[1]
    asking = layout.block(prompts, of_prompts, np.broadcast_to(np.arange(length), prompts.shape), length)
    order_B = np.argsort(-lengths_B, kind="stable")
    used_B, prompt_B = lengths_B[order_B] - 1, prompt_B[order_B]  # a response's last token is not fed
    blocks = []
    for start in range(0, int(used_B[0]), _BLOCK):
        rows = int((used_B > start).sum())
        width_B = np.minimum(used_B[:rows] - start, _BLOCK)
        nodes_BC, real_BC = _stretch(place_BT, order_B[:rows], prompt_B[:rows] + start, width_B)
        depth_BC = prompt_B[:rows, None] + start + np.arange(nodes_BC.shape[1])
        blocks.append(layout.block(nodes_BC, real_BC, depth_BC, int((prompt_B[:rows] + start + width_B).max())))
    queries = layout.size
    whole, of_whole = _stretch(place_BT, order_B, np.zeros_like(order_B), prompt_B + used_B)
    sides = tuple(
        Rows(layout.add(n, r, layout.key_K), layout.add(n, r, layout.key_K + key_heads), n.shape[1], tuple(b))
        for n, r, b in ((prompts, of_prompts, [asking]), (whole, of_whole, blocks))
    )
    return _joined(layout, (sides[0], sides[1]), queries, len(tree.tokens_N))


def _stretch(place_BT: Ints, rows: Ints, start: Ints, length: Ints) -> tuple[Ints, Bools]:
    """Return the nodes of a stretch of each row, padded with node 0, and which of them are real."""
    columns = np.arange(int(length.max()))
    real = columns < length[:, None]
    return np.where(real, place_BT[rows[:, None], np.where(real, start[:, None] + columns, 0)], 0), real


def _joined(layout: _Layout, sides: tuple[Rows, Rows], queries: int, nodes: int) -> Cells:
    places, heads = np.concatenate(layout.places), layout.head_KU.size
    real = np.flatnonzero(np.concatenate(layout.real))
    homes = np.empty(nodes * layout.wide, dtype=np.int64)
    homes[places[real]] = real  # of several the last
    answers = homes.reshape(nodes, layout.wide)[:, :heads].reshape(-1)
    asked = np.full(queries, nodes * heads)
    asked[answers] = np.arange(nodes * heads)
    others = real[(homes[places[real]] != real) & (real >= queries)]
    return Cells(
        sides=sides,
        key_heads=len(layout.key_K),
        places=torch.from_numpy(places),
        queries=queries,
        answers=torch.from_numpy(answers),
        asked=torch.from_numpy(asked),
        homes=torch.from_numpy(homes),
        others=(torch.from_numpy(others), torch.from_numpy(places[others])),
    )


def attend(joined: Tensor, turn: Tensor, cells: Cells, scale: float) -> Tensor:
    """From queries, keys and values [N, heads + 2·key heads, channels] to what each node reads: [N, heads · channels].

    ``turn`` are complex numbers by which neighbouring channels are turned first, those of values by 1.
    """
    read: Tensor = _Attention.apply(joined, turn, cells, scale)  # type: ignore[no-untyped-call]
    return read


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, turn: Tensor, cells: Cells, scale: float) -> Tensor:
        channels = joined.shape[-1]
        picked = _turned(joined, turn).view(-1, channels).index_select(0, cells.places)
        found, kept = picked.new_empty(cells.queries, channels), []
        for rows, block in _blocks(cells):
            asks, keys, values = _parts(picked, rows, block, cells.key_heads)
            scores = torch.bmm(asks, keys.mT)
            by_row = scores.view(block.rows, cells.key_heads, -1, block.bias.shape[-2], block.length)
            torch.add(block.bias, by_row, alpha=scale, out=by_row)
            shares = scores.softmax(-1)
            torch.bmm(shares, values, out=found[block.queries].view_as(asks))
            kept.append(shares)
        ctx.save_for_backward(picked, turn, *kept)
        ctx.cells, ctx.scale = cells, scale
        return found.index_select(0, cells.answers).view(len(joined), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        cells: Cells = ctx.cells
        picked, turn, *kept = ctx.saved_tensors
        channels = picked.shape[1]
        padded = torch.cat([slope.reshape(-1, channels), slope.new_zeros(1, channels)])
        read = padded.index_select(0, cells.asked)
        slopes = torch.zeros_like(picked)
        for (rows, block), shares in zip(_blocks(cells), kept, strict=True):
            asks, keys, values = _parts(picked, rows, block, cells.key_heads)
            d_asks, d_keys, d_values = _parts(slopes, rows, block, cells.key_heads)
            heard = read[block.queries].view_as(asks)
            d_values += torch.bmm(shares.mT, heard)
            d_scores = torch.ops.aten._softmax_backward_data(torch.bmm(heard, values.mT), shares, -1, shares.dtype)
            d_scores.mul_(ctx.scale)
            torch.bmm(d_scores, keys, out=d_asks)
            d_keys += torch.bmm(d_scores.mT, asks)
        found = slopes.index_select(0, cells.homes)
        places, repeated = cells.others
        found.index_add_(0, repeated, slopes.index_select(0, places))
        return _turned(found.view(len(turn), -1, channels), turn.conj()), None, None, None


def _blocks(cells: Cells) -> Iterator[tuple[Rows, Block]]:
    return ((rows, block) for rows in cells.sides for block in rows.blocks)


def _parts(picked: Tensor, rows: Rows, block: Block, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's queries and the keys and values that it looks at, each [B · K, places, channels]."""
    batch, channels = block.rows * key_heads, picked.shape[1]
    asks = picked[block.queries].view(batch, -1, channels)
    keys, values = (
        picked[part].view(-1, rows.length, channels)[:batch, : block.length] for part in (rows.keys, rows.values)
    )
    return asks, keys, values


def _turned(joined: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(joined.view(*joined.shape[:2], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)

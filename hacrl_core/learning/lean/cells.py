"""Where the nodes of a microbatch's prefix tree stand in the rows over which attention runs.

Every node asks once. A row of attention has up to C queries, which are new nodes of one sequence, and the T keys of
that whole sequence. A sequence with more new nodes than C has several rows: mostly the first of a prompt's responses,
to which the prompt's nodes belong.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hacrl_core.learning.sequences import Ints, Microbatch, Tree, prefix_tree

_ROW = 16  # what a row of attention costs beside its queries, in queries: its keys are copied and added up


@dataclass(frozen=True)
class Cells:
    """Places of nodes in the rows of attention, for one number of heads. Axes: W rows, C queries, T keys, D channels.

    Numbers of ``queries`` and ``keys`` are rows of the projections seen as [nodes · heads, D].
    """

    rows: int
    width: int  # C
    length: int  # T
    queries: Tensor  # [W · heads · C], in the order [W, key head, group, C]
    keys: Tensor  # [W · key heads · T], in the order [W, key head, T]
    answers: Tensor  # [N · heads]: the query of each node and head
    nodes_WT: Tensor  # [W · T]: the node of each key
    bias: Tensor  # [W · key heads, group · C, T]: minus infinity where a query must not look


def tree_of(batch: Microbatch) -> Tree:
    """Return the microbatch's tree, also where the padded rows are hardly larger: nodes have no padding."""
    if batch.tree is not None:
        return batch.tree
    last_B = batch.positions_R[np.cumsum(batch.lengths) - 1]
    return prefix_tree(batch.input_ids_BT, last_B % batch.input_ids_BT.shape[1] + 1)


def cells_of(tree: Tree, heads: int, key_heads: int) -> Cells:
    """Lay the nodes of a tree out for attention."""
    length = tree.place_BT.shape[1]
    row_N = tree.cell_N // length  # the sequence in which a node is new; ascending
    new_B = np.bincount(row_N, minlength=len(tree.place_BT))
    width = _best_width(new_B[new_B > 0])
    first_B = np.cumsum(new_B) - new_B
    pieces_B = -(-new_B // width)
    row_W = np.repeat(np.arange(len(new_B)), pieces_B)
    begin_W = first_B[row_W] + width * (np.arange(len(row_W)) - np.repeat(np.cumsum(pieces_B) - pieces_B, pieces_B))
    place_WC = begin_W[:, None] + np.arange(width)
    asked_WC = place_WC < (first_B + new_B)[row_W][:, None]
    place_WC = np.where(asked_WC, place_WC, 0)
    groups = heads // key_heads
    head_KG = np.arange(heads).reshape(key_heads, groups)
    queries_WKGC = place_WC[:, None, None] * heads + head_KG[:, :, None]
    nodes_WT = tree.place_BT[row_W]
    keys_WKT = nodes_WT[:, None] * key_heads + np.arange(key_heads)[:, None]
    order_WKGC = np.arange(queries_WKGC.size).reshape(queries_WKGC.shape)
    answers_NKG = np.moveaxis(order_WKGC, 3, 1)[asked_WC]
    depth_WC = tree.depth_N[place_WC]
    hidden_WCT = np.arange(length) > depth_WC[:, :, None]
    bias_WCT = torch.zeros(hidden_WCT.shape).masked_fill_(torch.from_numpy(hidden_WCT), float("-inf"))
    bias = bias_WCT[:, None, None].expand(-1, key_heads, groups, -1, -1)
    return Cells(
        rows=len(row_W),
        width=width,
        length=length,
        queries=_flat(queries_WKGC),
        keys=_flat(keys_WKT),
        answers=_flat(answers_NKG),
        nodes_WT=_flat(nodes_WT),
        bias=bias.reshape(len(row_W) * key_heads, groups * width, length),
    )


def _best_width(new_B: Ints) -> int:
    """Return the number of queries per row with which the rows cost least."""
    tried = np.unique(new_B)
    costs = [int((-(-new_B // width)).sum()) * (int(width) + _ROW) for width in tried]
    return int(tried[int(np.argmin(costs))])


def _flat(places: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(places).reshape(-1))

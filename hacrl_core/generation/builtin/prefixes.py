"""Prompts that several live rows continue: their keys and values are held, and read at every step, once for a group.

A group has places for ``MEMBERS`` rows. At a step the queries of its rows are multiplied with the prompt's keys in one
matrix product instead of one product per row, which on a CPU takes a fraction of the time. A row that shares its prompt
with nobody has a place in a group without a prefix; its prompt is in its own slot.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hacrl_core.generation.builtin.decoder import Prefill
from hacrl_core.generation.builtin.weights import DecoderWeights

MEMBERS = 8
SHORTEST = 8  # tokens of a prompt; reading fewer once for each row costs less than bringing the rows together


@dataclass(frozen=True)
class Sharing:
    """How the live rows read their prefixes; rows are those of [batch, head]."""

    cache: Tensor  # [layer, key or value, group, head, position, channel]
    gather: Tensor  # the row of each place, [group, key head, member, query head]
    back: Tensor  # the place of each row
    mask: Tensor  # [row, position]


class Prefixes:
    """The shared prompts of the live rows, and each row's place in their groups."""

    def __init__(self, w: DecoderWeights) -> None:
        self._w = w
        self._device, self._dtype = w.embedding_VH.device, w.embedding_VH.dtype
        self._lengths_G = np.zeros(0, dtype=np.int64)
        self._group_B = np.zeros(0, dtype=np.int64)
        self._member_B = np.zeros(0, dtype=np.int64)
        self._cache = self._room(0, 0)
        self._sharing: Sharing | None = None
        self._places: tuple[Tensor | None, Tensor, Tensor] | None = None

    def _room(self, groups: int, length: int) -> Tensor:
        w = self._w
        shape = (w.layers, 2, groups, w.kv_heads, length, w.head_dim)
        # Zeros, not whatever was in memory: masked positions weigh nothing, but nothing times NaN is NaN.
        return torch.zeros(shape, device=self._device, dtype=self._dtype)

    def lengths(self) -> np.ndarray:
        """How many positions of each live row are in its group's prefix."""
        lengths_B: np.ndarray = self._lengths_G[self._group_B]
        return lengths_B

    def admit(self, prefill: Prefill, rows: Sequence[int]) -> None:
        """Give the next rows their places; prompts of several rows become prefixes."""
        counts = Counter(rows)
        shared = {row: n for row, n in counts.items() if n > 1 and prefill.lengths[row] >= SHORTEST}
        if self._device.type != "cpu":
            shared = {}
        groups: list[int | None] = []  # the prompt of each new group
        open_places: dict[int | None, tuple[int, int]] = {}
        start, places = len(self._lengths_G), []
        for row in rows:
            prompt = row if row in shared else None
            group, member = open_places.get(prompt, (0, MEMBERS))
            if member == MEMBERS:
                group, member = start + len(groups), 0
                groups.append(prompt)
            open_places[prompt] = (group, member + 1)
            places.append((group, member))
        found = np.array(places, dtype=np.int64).reshape(-1, 2)
        lengths = np.array([0 if prompt is None else prefill.lengths[prompt] for prompt in groups], dtype=np.int64)
        self._group_B = np.concatenate([self._group_B, found[:, 0]])
        self._member_B = np.concatenate([self._member_B, found[:, 1]])
        self._lengths_G = np.concatenate([self._lengths_G, lengths])
        self._write(prefill, start, groups)
        self._sharing = self._places = None

    def _write(self, prefill: Prefill, start: int, groups: Sequence[int | None]) -> None:
        have, length = self._cache.shape[2], self._cache.shape[4]
        needed, longest = len(self._lengths_G), int(self._lengths_G.max(initial=0))
        if longest > length or needed > have:
            old = self._cache
            self._cache = self._room(have if needed <= have else needed + have // 2, max(longest, length))
            self._cache[:, :, :have, :, :length] = old
        written = [(start + i, prompt) for i, prompt in enumerate(groups) if prompt is not None]
        if written:
            to, prompts = (torch.tensor(column, device=self._device) for column in zip(*written, strict=True))
            width = min(prefill.cache.shape[4], self._cache.shape[4])
            self._cache[:, :, :, :, :width].index_copy_(
                2, to, prefill.cache[:, :, :, :, :width].index_select(2, prompts)
            )

    def keep(self, rows: np.ndarray) -> None:
        """Make these the live rows; groups that nobody is in any more make room for others."""
        self._group_B, self._member_B = self._group_B[rows], self._member_B[rows]
        used = np.unique(self._group_B)
        if len(used) < len(self._lengths_G):
            new_G = np.zeros(len(self._lengths_G), dtype=np.int64)
            new_G[used] = used
            holes = np.setdiff1d(np.arange(len(used)), used)
            movers = used[len(used) - len(holes) :]
            new_G[movers] = holes
            for to, at in zip(holes.tolist(), movers.tolist(), strict=True):
                self._cache[:, :, to] = self._cache[:, :, at]
            self._lengths_G[holes] = self._lengths_G[movers]
            self._lengths_G = self._lengths_G[: len(used)]
            self._group_B = new_G[self._group_B]
        self._sharing = self._places = None

    def places(self, batch: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the prefixes, None if there are none, the group of each row and how many of its positions count.

        Rows of the batch beyond the live ones are padding and read nothing.
        """
        if self._places is None or len(self._places[1]) != batch:
            padding = (0, batch - len(self._group_B))
            groups_B, shared_B = (torch.from_numpy(np.pad(rows, padding)) for rows in (self._group_B, self.lengths()))
            self._places = (self._cache if self._lengths_G.any() else None, groups_B, shared_B)
        return self._places

    def sharing(self, batch: int) -> Sharing | None:
        """How the rows of a batch, of which the last may be padding, read their prefixes; None if there are none."""
        if not self._lengths_G.any():
            return None
        if self._sharing is None or len(self._sharing.back) != batch * self._w.heads:
            self._sharing = self._arranged(batch)
        return self._sharing

    def _arranged(self, batch: int) -> Sharing:
        w = self._w
        live, groups, length = len(self._group_B), len(self._lengths_G), self._cache.shape[4]
        queries = w.heads // w.kv_heads
        kv_N, query_N = np.divmod(np.arange(w.heads), queries)
        place_BN = (
            (self._group_B[:, None] * w.kv_heads + kv_N) * MEMBERS + self._member_B[:, None]
        ) * queries + query_N
        gather = np.zeros(groups * w.kv_heads * MEMBERS * queries, dtype=np.int64)
        gather[place_BN.ravel()] = np.arange(live * w.heads)
        back = np.zeros(batch * w.heads, dtype=np.int64)
        back[: live * w.heads] = place_BN.ravel()
        written_BT = np.arange(length) < np.pad(self.lengths(), (0, batch - live))[:, None]
        mask_BT = np.where(written_BT, np.float32(0), np.float32(-math.inf))
        mask = torch.from_numpy(mask_BT.repeat(w.heads, axis=0)).to(self._device, self._dtype)
        return Sharing(
            self._cache[:, :, :groups],
            torch.from_numpy(gather).to(self._device),
            torch.from_numpy(back).to(self._device),
            mask,
        )

"""Continuous batching: finished rows leave, waiting requests take their place, a prompt is read once for its group."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hacrl_core.generation.builtin.decoder import Decoder, Prefill
from hacrl_core.generation.builtin.sampling import Draw, draw, stream_keys, uniforms
from hacrl_core.generation.protocols import GenerationRequest, ProgressCallback, SamplingParams
from hacrl_core.generation.stop_strings import StopStrings

PREFILL_TOKENS = 4096  # most padded prompt tokens in one forward, which bounds its memory
PROGRESS_SECONDS = 0.1
AloneLogits = Callable[[Sequence[int]], Tensor]  # token ids of one sequence to the logits_1V that follow it


@dataclass(frozen=True)
class Sampled:
    """What was written for one request."""

    token_ids: list[int]
    policy_logprobs: list[float]
    sampling_logprobs: list[float]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class StopRule:
    """What ends a response: an end token, or a stop string."""

    token_ids: tuple[int, ...]
    strings: StopStrings


class Scheduler:
    """One call of ``generate``. Live rows are numbered as in the decoder; what they wrote is kept by slot."""

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        stop: StopRule,
        *,
        batch_size: int,
        device: torch.device,
        logits_alone: AloneLogits | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self._decoder = decoder
        self._requests = requests
        self._params = params
        self._stop = stop
        self._device = device
        self._alone = logits_alone
        self._on_progress = on_progress
        self._capacity = min(batch_size, len(requests))
        self._results: list[Sampled | None] = [None] * len(requests)
        self._queue = _grouped_by_prompt(requests)
        self._uses = Counter(r.prompt_token_ids for r in requests)  # samples of a prompt still waiting
        self._unread = deque(self._uses)  # prompts in the order of the queue
        self._prefills: dict[tuple[int, ...], tuple[Prefill, int]] = {}
        self._keys_N = stream_keys(np.array([r.seed % 2**64 for r in requests], dtype=np.uint64))
        self._is_stop_V: np.ndarray | None = None
        shape = (self._capacity, params.max_tokens)
        self._tokens_ST = np.zeros(shape, dtype=np.int64)
        self._policy_ST = np.zeros(shape)
        self._sampling_ST = np.zeros(shape)
        self._request_B = np.zeros(0, dtype=np.int64)
        self._slot_B = np.zeros(0, dtype=np.int64)
        self._count_B = np.zeros(0, dtype=np.int64)
        self._free_slots = deque(range(self._capacity))
        self._done = self._written = 0
        self._reported = time.monotonic()

    def run(self) -> list[Sampled]:
        """Sample until every request is answered; return the answers in the order of the requests."""
        logits_BV: Tensor | None = None
        while self._queue or len(self._request_B):
            logits_BV = self._admit(logits_BV)
            tokens_B = self._sample(logits_BV)
            alive = self._retire(tokens_B)
            logits_BV = (
                self._decoder.step(tokens_B if alive is None else tokens_B[alive]) if self._request_B.size else None
            )
            self._report()
        self._report(last=True)
        return [result for result in self._results if result is not None]

    def _admit(self, logits_BV: Tensor | None) -> Tensor:
        """Fill free rows from the queue, several at a time so that a prefill is worth its while."""
        live = len(self._request_B)
        free = self._capacity - live
        worth = min(len(self._queue), max(1, self._capacity // 8))
        if logits_BV is not None and (not self._queue or free < worth or not self._decoder.joinable):
            return logits_BV
        batch = [self._queue.popleft() for _ in range(min(free, len(self._queue)))]
        self._read_prompts([self._requests[i].prompt_token_ids for i in batch])
        parts = [] if logits_BV is None else [logits_BV]
        start = 0
        while start < len(batch):  # runs of requests whose prompts were read together
            prefill = self._prefill_of(batch[start])[0]
            end = start
            while end < len(batch) and self._prefill_of(batch[end])[0] is prefill:
                end += 1
            rows = [self._prefill_of(i)[1] for i in batch[start:end]]
            self._decoder.admit(prefill, rows)
            parts.append(prefill.logits_PV[rows])
            start = end
        self._open_rows(batch)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _prefill_of(self, request: int) -> tuple[Prefill, int]:
        return self._prefills[self._requests[request].prompt_token_ids]

    def _read_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Read ahead in the order of the queue: one large forward costs less than several small ones."""
        while any(p not in self._prefills for p in prompts):
            chunk = [self._unread.popleft()]
            width = len(chunk[0])
            while self._unread and (len(chunk) + 1) * max(width, len(self._unread[0])) <= PREFILL_TOKENS:
                chunk.append(self._unread.popleft())
                width = max(width, len(chunk[-1]))
            prefill = self._decoder.prefill(chunk)
            self._prefills.update({prompt: (prefill, row) for row, prompt in enumerate(chunk)})

    def _open_rows(self, batch: Sequence[int]) -> None:
        for i in batch:
            prompt = self._requests[i].prompt_token_ids
            self._uses[prompt] -= 1
            if not self._uses[prompt]:
                del self._prefills[prompt]
        slots = [self._free_slots.popleft() for _ in batch]
        self._request_B = np.concatenate([self._request_B, np.array(batch, dtype=np.int64)])
        self._slot_B = np.concatenate([self._slot_B, np.array(slots, dtype=np.int64)])
        self._count_B = np.concatenate([self._count_B, np.zeros(len(batch), dtype=np.int64)])

    def _sample(self, logits_BV: Tensor) -> Tensor:
        uniforms_B = torch.from_numpy(uniforms(self._keys_N[self._request_B], self._count_B)).to(self._device)
        drawn = draw(logits_BV, uniforms_B, self._params)
        if self._alone is not None and bool(drawn.ambiguous_B.any()):
            drawn = self._settle(drawn, uniforms_B)
        at = (self._slot_B, self._count_B)
        self._tokens_ST[at] = drawn.tokens_B.cpu().numpy()
        self._policy_ST[at] = drawn.policy_logprobs_B.cpu().numpy()
        self._sampling_ST[at] = drawn.sampling_logprobs_B.cpu().numpy()
        self._count_B += 1
        self._written += len(self._count_B)
        if self._is_stop_V is None:
            self._is_stop_V = np.isin(np.arange(logits_BV.shape[1]), self._stop.token_ids)
        return drawn.tokens_B

    def _settle(self, drawn: Draw, uniforms_B: Tensor) -> Draw:
        """Decide draws that rounding could tip on the logits of the sequence alone, the same in any batch."""
        assert self._alone is not None
        tokens_B = drawn.tokens_B.clone()
        policy_B, sampling_B = drawn.policy_logprobs_B.clone(), drawn.sampling_logprobs_B.clone()
        for row in drawn.ambiguous_B.nonzero()[:, 0].tolist():
            written = self._tokens_ST[self._slot_B[row], : self._count_B[row]].tolist()
            logits_1V = self._alone([*self._requests[self._request_B[row]].prompt_token_ids, *written])
            again = draw(logits_1V, uniforms_B[row : row + 1], self._params)
            tokens_B[row] = again.tokens_B[0]
            policy_B[row], sampling_B[row] = again.policy_logprobs_B[0], again.sampling_logprobs_B[0]
        return Draw(tokens_B, policy_B, sampling_B, drawn.ambiguous_B)

    def _retire(self, tokens_B: Tensor) -> Tensor | None:
        """Record and drop finished rows; None when none finished, else the rows that live on in their new order."""
        assert self._is_stop_V is not None
        last_B = self._tokens_ST[self._slot_B, self._count_B - 1]
        stopped_B = self._is_stop_V[last_B]
        if self._stop.strings:
            for row in np.flatnonzero(~stopped_B).tolist():
                written = self._tokens_ST[self._slot_B[row], : self._count_B[row]]
                stopped_B[row] = self._stop.strings.completed(written.tolist())
        finished_B = stopped_B | (self._count_B == self._params.max_tokens)
        if not finished_B.any():
            return None
        for row in np.flatnonzero(finished_B).tolist():
            self._close_row(row, "stop" if stopped_B[row] else "length")
        rows = _fill_holes(finished_B)
        self._request_B = self._request_B[rows]
        self._slot_B = self._slot_B[rows]
        self._count_B = self._count_B[rows]
        self._decoder.keep(rows.tolist())
        return torch.from_numpy(rows).to(tokens_B.device)

    def _close_row(self, row: int, reason: Literal["stop", "length"]) -> None:
        slot, count = int(self._slot_B[row]), int(self._count_B[row])
        self._results[self._request_B[row]] = Sampled(
            self._tokens_ST[slot, :count].tolist(),
            self._policy_ST[slot, :count].tolist(),
            self._sampling_ST[slot, :count].tolist(),
            reason,
        )
        self._free_slots.append(slot)
        self._done += 1

    def _report(self, last: bool = False) -> None:
        if self._on_progress is None:
            return
        now = time.monotonic()
        if last or now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            self._on_progress(self._done, self._written)


def _grouped_by_prompt(requests: Sequence[GenerationRequest]) -> deque[int]:
    """Requests of one prompt next to each other, prompts in order of appearance: a group is admitted together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(request.prompt_token_ids, []).append(i)
    return deque(i for group in groups.values() for i in group)


def _fill_holes(finished_B: np.ndarray) -> np.ndarray:
    """Survivors, the last ones moved into the holes: as few rows as possible change place."""
    alive = np.flatnonzero(~finished_B)
    rows = np.arange(len(alive))
    holes = np.flatnonzero(finished_B[: len(alive)])
    rows[holes] = alive[len(alive) - len(holes) :]
    return rows

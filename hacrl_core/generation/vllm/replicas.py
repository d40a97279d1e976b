"""Several engines with the same weights behind one queue of prompts.

A replica takes the next prompt, with all its samples, whenever it has room, so there is no fixed split and only one
tail. What a dead replica had not finished goes back into the queue; what it had finished is kept.
"""

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm.backend import OnResponse, OnTokens, Response, WorkerBackend
from hacrl_core.generation.vllm.process import WorkerDied
from hacrl_core.generation.vllm.proof import Expected

logger = logging.getLogger(__name__)

# A replica holds at most this part of an even share at a time. The rest is taken by whoever is done first.
HELD_SHARE = 0.75

T = TypeVar("T")


@dataclass
class PromptQueue:
    """Requests in groups of one prompt; hands groups out and takes back what was not finished."""

    requests: Sequence[GenerationRequest]
    _waiting: deque[list[GenerationRequest]] = field(default_factory=deque)
    _left: int = 0
    _broken: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        groups: dict[tuple[int, ...], list[GenerationRequest]] = {}
        for request in self.requests:
            groups.setdefault(request.prompt_token_ids, []).append(request)
        self._waiting.extend(groups.values())
        self._left = len(self.requests)

    def take(self, room: int, *, idle: bool) -> list[GenerationRequest]:
        """Return the samples of as many prompts as fit; to an idle taker those of one prompt at least."""
        with self._changed:
            taken: list[GenerationRequest] = []
            while self._waiting and not self._broken:
                if len(taken) + len(self._waiting[0]) > room and (taken or not idle):
                    break
                taken += self._waiting.popleft()
            return taken

    def finished(self) -> None:
        """One response is there."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def give_back(self, requests: Sequence[GenerationRequest]) -> None:
        """Let somebody else do these: they go first."""
        with self._changed:
            if requests:
                self._waiting.appendleft(list(requests))
            self._changed.notify_all()

    def break_off(self) -> None:
        """Let nobody wait any longer: the call has failed."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def wait_for_more(self) -> bool:
        """Wait until there is something to take; False: every response is there, or the call has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._left or self._broken)
            return bool(self._waiting) and not self._broken


class ReplicaBackend:
    """Worker processes of ours, each with a copy of the model on GPUs of its own."""

    unproved = WorkerBackend.unproved

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config
        self._workers: list[WorkerBackend | None] = [self._make(index) for index in range(config.replicas)]
        self._started: tuple[int, str] = (0, "")

    @property
    def version(self) -> str:
        """vLLM's version in the workers' environment."""
        return self._alive()[0].version

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that are there."""
        return [worker.pid for worker in self._alive()]

    def load(self, checkpoint: Path, digest: str, max_length: int, dtype: str) -> None:
        """Start all workers with these weights, side by side."""
        self._started = (max_length, dtype)
        self._each(lambda worker: worker.load(checkpoint, digest, max_length, dtype))

    def swap(self, checkpoint: Path, digest: str) -> None:
        """Replace the weights of all; one that has died is started anew with them."""
        dead = [index for index, worker in enumerate(self._workers) if worker is None]
        self._each(lambda worker: worker.swap(checkpoint, digest))
        for index in dead:
            fresh = self._workers[index] = self._make(index)
            fresh.load(checkpoint, digest, *self._started)

    def sleep(self) -> None:
        """Put all to sleep."""
        self._each(lambda worker: worker.sleep())

    def differing(self, checkpoint: Path) -> list[str]:
        """Return the parameters that are not the checkpoint's in one of the workers or more."""
        return sorted({name for names in self._each(lambda worker: worker.differing(checkpoint)) for name in names})

    def probe(self, token_ids: Sequence[int]) -> list[list[float]]:
        """Return the log-probs of one sequence under every worker's weights."""
        return self._each(lambda worker: worker.score([token_ids])[0])

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs of every token but the first; the sequences are dealt out."""
        workers = self._alive()
        hands = [list(range(index, len(sequences), len(workers))) for index in range(len(workers))]
        found: list[list[float]] = [[] for _ in sequences]
        with ThreadPoolExecutor(len(workers)) as pool:
            scored = pool.map(lambda worker, hand: worker.score([sequences[i] for i in hand]), workers, hands)
            for hand, rows in zip(hands, scored, strict=True):
                for place, row in zip(hand, rows, strict=True):
                    found[place] = row
        return found

    def sample(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        expected: Expected,
        on_response: OnResponse,
        on_tokens: OnTokens,
    ) -> None:
        """Sample from one queue; ends when every response is there, also if some of the workers died on the way."""
        queue, report = PromptQueue(requests), _Report(on_response, on_tokens)
        alive = [(index, worker) for index, worker in enumerate(self._workers) if worker is not None]
        with ThreadPoolExecutor(len(alive)) as pool:
            work = [pool.submit(self._serve, i, w, queue, params, expected, report) for i, w in alive]
            problems = [problem for one in work if (problem := one.exception()) is not None]
        deaths = [problem for problem in problems if isinstance(problem, WorkerDied)]
        for problem in problems:
            if not isinstance(problem, WorkerDied):
                raise problem
        if deaths and len(deaths) == len(alive):
            raise deaths[0]
        for death in deaths:
            logger.warning("%d of %d vLLM replicas went on alone: %s", len(self._alive()), len(self._workers), death)

    def close(self) -> None:
        """End all workers."""
        for worker in self._alive_or_none():
            worker.close()

    def _serve(
        self,
        index: int,
        worker: WorkerBackend,
        queue: PromptQueue,
        params: SamplingParams,
        expected: Expected,
        report: "_Report",
    ) -> None:
        """Keep one worker busy until every response of the call is there."""
        held: dict[str, GenerationRequest] = {}
        most = min(self._config.max_sequences, math.ceil(HELD_SHARE * len(queue.requests) / len(self._workers)))

        def refill() -> None:
            more = queue.take(most - len(held), idle=not held)
            if more:
                held.update({request.request_id: request for request in more})
                worker.add_requests(more)

        try:
            worker.begin_sampling([], params, expected, more_follows=True)
            while queue.wait_for_more() if not held else True:
                refill()
                while held:
                    found = worker.next_found()
                    if isinstance(found, Response):
                        del held[found.request_id]
                        report.response(found)
                        queue.finished()
                    elif isinstance(found, int):
                        report.tokens(index, found)
                    refill()
            worker.end_of_requests()
            while worker.next_found() is not None:
                pass
        except WorkerDied:
            self._workers[index] = None
            worker.close()
            queue.give_back(list(held.values()))
            if not self._alive_or_none():
                queue.break_off()
            raise
        except BaseException:
            queue.break_off()
            raise

    def _make(self, index: int) -> WorkerBackend:
        return WorkerBackend(self._config, gpus_of_replica(index, self._config.tensor_parallel_size))

    def _alive_or_none(self) -> list[WorkerBackend]:
        return [worker for worker in self._workers if worker is not None]

    def _alive(self) -> list[WorkerBackend]:
        alive = self._alive_or_none()
        if not alive:
            raise WorkerDied("every vLLM replica has ended")
        return alive

    def _each(self, act: Callable[[WorkerBackend], T]) -> list[T]:
        """Have every worker do something at the same time; the first error is raised when all have ended."""
        workers = self._alive()
        with ThreadPoolExecutor(len(workers)) as pool:
            return [done.result() for done in [pool.submit(act, worker) for worker in workers]]


class _Report:
    """Passes on what the threads of all replicas find, one at a time."""

    def __init__(self, on_response: OnResponse, on_tokens: OnTokens) -> None:
        self._on_response, self._on_tokens = on_response, on_tokens
        self._tokens: dict[int, int] = {}
        self._lock = threading.Lock()

    def response(self, response: Response) -> None:
        with self._lock:
            self._on_response(response)

    def tokens(self, replica: int, written: int) -> None:
        with self._lock:
            self._tokens[replica] = written
            self._on_tokens(sum(self._tokens.values()))


def gpus_of_replica(index: int, width: int, environment: Any = os.environ) -> dict[str, str]:
    """Return the variable that shows a replica its own GPUs among those that this process sees; empty on the CPU."""
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu) for gpu in range((index + 1) * width)] if seen is None else seen.split(",")
    own = [name.strip() for name in names[index * width : (index + 1) * width]]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)} if any(own) else {}

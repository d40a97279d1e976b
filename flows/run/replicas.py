"""One generation over several engines on a Ray cluster: the leader's own, and one of each of its peers."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.run.peers import Peers
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.generation import GenerateConfig

if TYPE_CHECKING:
    from hacrl_core.generation.protocols import Generation, GenerationRequest, SamplingParams

_POLL_SECONDS = 0.5


class ReplicatedEngine:
    """This actor's engine and those of its peers, behind one list of parts: whoever is free takes the next part.

    A part is sampled as it would be here, with the same neighbours, so who takes it changes no bit. A part whose
    replica dies is taken by another one; this actor's own engine is always there.
    """

    def __init__(self, own: Any, config: GenerateConfig, peers: Peers, warn: Callable[[str], None]) -> None:
        self.name: str = own.name
        self.version: str = own.version
        self.replicas = peers.count
        self._own = own
        self._config = config
        self._peers = peers
        self._warn = warn

    def generate(
        self, checkpoint: Path, policy_digest: str, requests: Any, params: Any, on_progress: Any = None
    ) -> "list[Generation]":
        """Sample one part here."""
        found: list[Generation] = self._own.generate(checkpoint, policy_digest, requests, params, on_progress)
        return found

    def generate_parts(
        self,
        version: ArtifactRef,
        parts: "Sequence[Sequence[GenerationRequest]]",
        params: "SamplingParams",
        on_progress: Callable[[int, int], None],
        on_part: "Callable[[int, list[Generation]], None]",
    ) -> None:
        """Sample all parts, some here and some on peers; ``on_part`` gets each with its number when it is there."""
        work = _Work(len(parts), on_progress, on_part)
        helpers = [
            threading.Thread(target=self._serve, args=(index, work, version, parts, params), name=f"replica {index}")
            for index in range(1, min(self._peers.count, len(parts)))
        ]
        for helper in helpers:
            helper.start()
        try:
            while (number := work.take()) is not None:
                report = lambda done, tokens, number=number: work.tell(number, done, tokens)  # noqa: E731
                work.done(number, self._own.generate(version.path, version.digest, parts[number], params, report))
        except BaseException as problem:
            work.fail(problem)
        for helper in helpers:
            helper.join()
        work.raise_failure()

    def rest(self) -> None:
        """Free the device's memory here and on the peers until the next call."""
        self._own.rest()
        self._peers.everywhere("rest")

    def close(self) -> None:
        """Stop and free everything; the next call starts again."""
        self._own.close()
        self._peers.everywhere("close")

    def _serve(self, index: int, work: "_Work", version: ArtifactRef, parts: Any, params: Any) -> None:
        """Have a peer sample parts until none is left; give back what it held when it died."""
        import ray

        number: int | None = None
        try:
            hello = self._peers.actor(index).hello.remote()
            while not ray.wait([hello], timeout=_POLL_SECONDS)[0]:
                if work.is_over:
                    return
            ray.get(hello)
            while (number := work.take()) is not None:
                work.done(number, self._sample(index, number, work, version, parts[number], params))
        except ray.exceptions.RayError as problem:
            self._peers.drop(index)
            if number is not None:
                work.give_back(number)
            self._warn(f"replica {index} of {self._peers.count} died ({type(problem).__name__}); the others go on")
        except BaseException as problem:
            work.fail(problem)

    def _sample(
        self, index: int, number: int, work: "_Work", version: ArtifactRef, requests: Any, params: Any
    ) -> "list[Generation]":
        import ray

        call = self._peers.actor(index).generate.options(num_returns="streaming")
        found: list[Generation] = []
        for message in call.remote(self._config, version, requests, params):
            kind, value = ray.get(message)
            if kind == "response":
                found.append(value)
            elif kind == "progress":
                work.tell(number, *value)
            else:
                problem, lines = value
                for line in lines:
                    print(line, flush=True)
                if problem is not None:
                    raise problem
        return found


class _Work:
    """The parts of one generation: who takes which, what is done, and what failed."""

    def __init__(
        self, count: int, on_progress: Callable[[int, int], None], on_part: "Callable[[int, list[Generation]], None]"
    ) -> None:
        self._waiting = deque(range(count))
        self._left = count
        self._told: dict[int, tuple[int, int]] = {}
        self._failure: BaseException | None = None
        self._on_progress = on_progress
        self._on_part = on_part
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        return self._failure is not None or not self._left

    def take(self) -> int | None:
        """Return the next part; wait while others may still give one back; None when all is done or one failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_over)
            return None if self.is_over else self._waiting.popleft()

    def give_back(self, number: int) -> None:
        with self._changed:
            self._told.pop(number, None)
            self._waiting.appendleft(number)
            self._changed.notify_all()

    def done(self, number: int, found: "list[Generation]") -> None:
        with self._changed:
            self._left -= 1
            self._told[number] = (len(found), sum(len(one.token_ids) for one in found))
            self._on_part(number, found)
            self._changed.notify_all()
        self._report()

    def tell(self, number: int, done: int, tokens: int) -> None:
        with self._changed:
            self._told[number] = (done, tokens)
        self._report()

    def fail(self, problem: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or problem
            self._changed.notify_all()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _report(self) -> None:
        with self._changed:
            counts = list(self._told.values())
        self._on_progress(sum(done for done, _ in counts), sum(tokens for _, tokens in counts))

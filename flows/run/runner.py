"""Runs a campaign's stages, each in the worker process of its agent. How they are scheduled is a subclass's business: as Prefect tasks
(``tasks.py``), or in plain threads where there is no Prefect to talk to.

A call whose artifact exists is answered on the spot. Where a stage needs files that are no longer there (collected by a keep policy, or damaged
since), what made them runs again first.
"""

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from flows.record.record import Record
from flows.run.divergence import Watch
from flows.run.executors import Stopped, Worker
from flows.run.replay import Done, Observers, bind
from flows.stage_calls import Planned
from hacrl_core.artifacts import Store
from hacrl_core.errors import HacrlError, InputGoneError, StageError
from stages.runner import Outcome, lookup, run_stage
from stages.spec import Context, StageCall

LIGHT = ("sample", "credit")  # stages without torch: they run in this process
# Tasks wait for their inputs in their threads, and are submitted inputs first: with enough threads none can starve another.
THREADS = 256


class StageRunner(ABC):
    def __init__(
        self,
        store: Store,
        record: Record,
        workers: dict[str, Worker],
        retries: int,
        observers: Observers,
        watch: Watch | None = None,
    ) -> None:
        self.store, self.record, self.observers = store, record, observers
        self._workers, self._retries, self._watch = workers, retries, watch or Watch()
        self._context = Context(warn=observers.events.warn)
        self._running: list[Any] = []

    def submit(self, planned: Planned) -> Any:
        if all(isinstance(handle, Done) for handle in planned.inputs.values()):
            call = bind(planned)
            if found := lookup(self.store, call):
                self._note(call, found)
                return Done(found, planned)
        handle = self._schedule(planned)
        self._running.append(handle)
        return handle

    @abstractmethod
    def _schedule(self, planned: Planned) -> Any:
        """Have ``self.perform(planned)`` run once its inputs are there; a handle that waits for it."""

    def iteration_done(self, iteration: int) -> None:
        self._running = [handle for handle in self._running if not self._settled(handle)]
        self.observers.iteration(iteration)

    def finish(self) -> None:
        """Wait for what nobody else waits for: the last evaluations."""
        for handle in self._running:
            handle.outcome()
        self._running.clear()

    def first_failure(self) -> HacrlError | None:
        """What went wrong first: a stage below a failed one never starts, and only says that it did not."""
        for handle in self._running:
            if handle.failed():
                try:
                    handle.outcome()
                except Exception as problem:
                    known = first_error(problem)
                    if known is not None and not isinstance(known, Stopped):
                        return known
        return None

    def perform(self, planned: Planned) -> Outcome:
        """Resolve the inputs, run the stage where it belongs, tell everybody."""
        call = bind(planned)
        if found := lookup(self.store, call):
            self._note(call, found)
            return found
        self._watch.before(call)
        self.observers.started(call, self.record.why(self.store, call))
        outcome = self._with_inputs(planned, call)
        self._note(call, outcome)
        return outcome

    def _with_inputs(self, planned: Planned, call: StageCall) -> Outcome:
        try:
            return self._run(call)
        except InputGoneError:
            inputs = {**call.inputs, **self._restore(planned)}
            return self._run(replace(call, inputs=inputs))

    def _restore(self, planned: Planned) -> dict[str, Any]:
        """Run again what made the inputs that are gone, and before it what made *its* inputs, back to files that are there."""
        order: list[Planned] = []
        digests: list[str] = []
        waiting = [planned]
        while waiting:  # no recursion: a chain of versions may be thousands long
            for handle in waiting.pop().inputs.values():
                ref = handle.outcome().ref
                if not self.store.is_whole(ref) and handle.planned not in order:
                    order.append(handle.planned)
                    digests.append(ref.digest)
                    waiting.append(handle.planned)
        made: dict[str, Outcome] = {}
        for again, before in zip(reversed(order), reversed(digests), strict=True):
            call = replace(bind(again), restore=True)
            self.observers.started(call, ["its files are needed again"])
            outcome = made[call.label] = self._run(call)
            if outcome.ref.digest != before:  # verdicts, credit and scores of the old content must not meet the new
                raise StageError(
                    f"{call.label}: made again, it has other content than before; run the same command again"
                )
        labels = {role: bind(handle.planned).label for role, handle in planned.inputs.items()}
        return {role: made[label].ref for role, label in labels.items() if label in made}

    def _run(self, call: StageCall) -> Outcome:
        if call.stage in LIGHT:
            return run_stage(
                self.store, call, self._context, lambda holder: self.observers.events.waiting(call, holder)
            )
        return self._workers[call.agent].run(call, self.observers.events)

    def _note(self, call: StageCall, outcome: Outcome) -> None:
        self._watch.after(call, outcome)
        if not outcome.cached:
            self.store.mark_verified(outcome.ref)
        self.record.add(call, outcome)
        self.observers.finished(call, outcome)

    def _settled(self, handle: Any) -> bool:
        if not handle.done():
            return False
        handle.outcome()  # raises what the stage raised
        return True


@dataclass(frozen=True)
class Threaded:
    """A stage under way in a thread of this process."""

    future: "Future[Outcome]"
    planned: Planned

    def outcome(self) -> Outcome:
        return self.future.result()

    def done(self) -> bool:
        return self.future.done()

    def failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None


class PlainRunner(StageRunner):
    """Without Prefect: the same stages in the same workers, in threads that wait for their inputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threads = ThreadPoolExecutor(THREADS, "stage")

    def _schedule(self, planned: Planned) -> Threaded:
        return Threaded(self._threads.submit(self._retried, planned), planned)

    def _retried(self, planned: Planned) -> Outcome:
        from flows.run.executors import WorkerDied

        for _ in range(self._retries):
            try:
                return self.perform(planned)
            except WorkerDied as problem:
                self.observers.events.warn(f"{problem}; trying again")
        return self.perform(planned)


def first_error(problem: BaseException) -> HacrlError | None:
    """The project's own error inside whatever was wrapped around it."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, HacrlError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None

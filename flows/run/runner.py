"""Runners take a campaign's stage calls: they look each one up, run what is missing, and tell the listeners.

A call whose artifact exists is answered at once. Where a stage needs files that are no longer there (evicted by a keep
policy, or damaged since), the stages that made them run again first. How calls are scheduled is the business of a
subclass: one after the other, or in threads.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Protocol

from flows.record.record import Record
from flows.run.divergence import Watch
from flows.run.events import Listener
from flows.run.executors import Executor
from flows.run.worker import Stopped
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.errors import ArtifactError, ContentChangedError, HacrlError, InputGoneError, ProcessDiedError
from stages.runner import lookup
from stages.spec import Handle, Outcome, StageCall, find_stage

# How often an evaluation that was put off looks whether something failed.
DEFERRED_SECONDS = 0.5
# Before a call whose process died is tried again; twice as long before each further try.
FIRST_RETRY_SECONDS = 0.5
# Threads wait for their call's inputs, and calls are submitted inputs first: with enough threads none can starve
# another.
THREADS = 256


class CacheMiss(Exception):
    """A replay met a stage that has not been run yet."""


class Pending(Handle, Protocol):
    """A call under way."""

    def failed(self) -> bool:
        """Whether it has ended in an error."""

    def settle(self) -> None:
        """Let go of the calls that made the inputs, and of the metrics: called once the call has ended well."""


@dataclass
class Done:
    """A call whose outcome is known."""

    call: StageCall
    value: Outcome

    def outcome(self) -> Outcome:
        """Return the outcome; nothing to wait for."""
        return self.value

    def done(self) -> bool:
        """Always."""
        return True

    def failed(self) -> bool:
        """Never."""
        return False

    def settle(self) -> None:
        """Keep artifacts in place of handles."""
        self.call, self.value = self.call.bound(), replace(self.value, metrics={})


@dataclass
class Replay:
    """Answers calls from the store alone; the first one that is missing raises ``CacheMiss``.

    Needs neither Prefect nor torch.
    """

    store: Store
    record: Record
    watch: Watch

    def submit(self, call: StageCall) -> Done:
        """Look the call up and add it to the record."""
        bound = call.bound()
        found = look_up(self.store, self.record, bound)
        if found is None:
            raise CacheMiss(bound.title)
        self.watch.after(bound, found)
        self.record.add(bound, found)
        return Done(call, found)

    def iteration_done(self, iteration: int) -> None:
        """Nobody has to be told."""


class StageRunner(ABC):
    """Looks calls up, and has those that are missing run by an executor."""

    def __init__(
        self,
        store: Store,
        executor: Executor,
        listener: Listener,
        record: Record | None = None,
        watch: Watch | None = None,
        retries: int = 0,
    ) -> None:
        """``record`` and ``watch`` belong to a campaign; single calls (``hacrl eval``) do without them."""
        self.store = store
        self.listener = listener
        self.record = record
        self.retries = retries
        self._executor = executor
        self._watch = watch or Watch()
        self._pending: list[Pending] = []
        # Handles whose calls still hold the handles of their inputs.
        self._unsettled: list[Pending] = []
        # Walks the campaign through the store to an artifact that was made by calls we have let go of.
        # Without it nothing is let go of.
        self.find_maker: Callable[[ArtifactRef], Handle | None] | None = None
        # Agents whose benchmarks do not run between a score and the update that follows it.
        self.deferring: frozenset[str] = frozenset()
        self.ending = False
        # Agents and iterations whose score has begun and whose update has not ended.
        self._learning: set[tuple[str, int | None]] = set()
        self._learned = threading.Condition()

    def submit(self, call: StageCall) -> Handle:
        """Return a handle at once: a finished one where the artifact exists, else one that waits for the stage."""
        if all(isinstance(item, ArtifactRef | Done) for item in call.inputs.values()):
            bound = call.bound()
            if found := look_up(self.store, self.record, bound):
                self._finished(bound, found)
                self._has_learned(call)
                known = Done(call, found)
                self._unsettled.append(known)
                return known
        handle = self._schedule(call)
        self._pending.append(handle)
        self._unsettled.append(handle)
        return handle

    @abstractmethod
    def _schedule(self, call: StageCall) -> Pending:
        """Have ``self.perform(call)`` run once its inputs are there, and return a handle that waits for it."""

    def iteration_done(self, iteration: int) -> None:
        """Raise what a finished stage raised, and tell the listeners of the iteration."""
        self._pending = [handle for handle in self._pending if not _settled(handle)]
        self._let_go(iteration)
        self.listener.iteration_finished(iteration)

    def _let_go(self, iteration: int) -> None:
        """Forget how the artifacts of finished iterations came about, or memory would grow with every iteration."""
        if self.find_maker is None:
            return
        left = []
        for handle in self._unsettled:
            ended = handle.done() and not handle.failed()
            if ended and (handle.call.iteration is None or handle.call.iteration <= iteration):
                handle.settle()
            else:
                left.append(handle)
        self._unsettled = left

    def finish(self) -> None:
        """Wait for the calls that nothing else waits for: the last evaluations."""
        for handle in self._pending:
            handle.outcome()
        self._pending.clear()

    def end(self, *, complete: bool) -> None:
        """Called once no stage runs any more; ``complete`` unless an error or a signal ended the campaign."""
        self.ending = True

    def first_failure(self) -> HacrlError | None:
        """Return the error that came first: a stage whose input failed never starts, and only says that it did not."""
        for handle in self._pending:
            if handle.failed():
                try:
                    handle.outcome()
                except Exception as problem:
                    known = first_error(problem)
                    if known is not None and not isinstance(known, Stopped):
                        return known
        return None

    def perform(self, call: StageCall) -> Outcome:
        """Resolve the inputs, run the stage unless its artifact exists by now, and tell the listeners."""
        try:
            return self._perform(call)
        finally:
            self._has_learned(call)

    def _perform(self, call: StageCall) -> Outcome:
        bound = call.bound()
        if found := look_up(self.store, self.record, bound):
            self._finished(bound, found)
            return found
        self._watch.before(bound)
        self._wait_for_update(bound)
        if bound.stage == "score" and bound.agent in self.deferring:
            self._learning.add((bound.agent, bound.iteration))
        self.listener.stage_started(bound, self.record.why(self.store, bound) if self.record else [])
        try:
            outcome = self._run_with_inputs(call, bound)
        except Exception as problem:
            if not isinstance(problem, Stopped):
                self.listener.stage_failed(bound, problem)
            raise
        self._finished(bound, outcome)
        return outcome

    def _wait_for_update(self, call: StageCall) -> None:
        """Put an evaluation off while its agent is between score and update and has weights on the device.

        It waits for nothing that failed: the campaign is ending then.
        """
        if call.stage != "evaluate" or call.agent not in self.deferring:
            return
        with self._learned:
            while not self.ending and any(agent == call.agent for agent, _ in list(self._learning)):
                if any(handle.failed() for handle in list(self._pending)):
                    return
                self._learned.wait(DEFERRED_SECONDS)

    def _has_learned(self, call: StageCall) -> None:
        """Note the end of an update, and let the evaluations go on that waited for it."""
        if call.stage == "update" and self.deferring:
            with self._learned:
                self._learning.discard((call.agent, call.iteration))
                self._learned.notify_all()

    def _run_with_inputs(self, call: StageCall, bound: StageCall) -> Outcome:
        try:
            return self._executor.run(bound, self.listener)
        except InputGoneError:
            restored = self._restore_inputs(call)
            # None was restored where all have come back meanwhile, e.g. with the end of an upload.
            if not restored and not all(map(self.store.is_whole, bound.artifacts.values())):
                raise
            return self._executor.run(replace(bound, inputs={**bound.artifacts, **restored}), self.listener)

    def _restore_inputs(self, call: StageCall) -> dict[str, ArtifactRef]:
        """Run again what made the inputs that are gone, and before it what made *its* inputs, as far back as needed."""
        makers: dict[str, tuple[StageCall, str]] = {}
        # A stage runs after those that make its own inputs.
        order: TopologicalSorter[str] = TopologicalSorter()
        waiting = [call]
        while waiting:  # a loop and no recursion: a chain of versions may be thousands long
            user = waiting.pop()
            for given in user.inputs.values():
                item = given
                if isinstance(item, ArtifactRef):
                    whole = self.find_maker is None or self.store.is_whole(item)
                    maker = None if whole or self.find_maker is None else self.find_maker(item)
                    if maker is None:
                        continue
                    item = maker
                ref = item.outcome().ref
                if item.call.label not in makers and not self.store.is_whole(ref):
                    makers[item.call.label] = (item.call, ref.digest)
                    waiting.append(item.call)
                if item.call.label in makers:
                    order.add(user.label, item.call.label)
        made: dict[str, ArtifactRef] = {}
        for label in (found for found in order.static_order() if found in makers):
            lost, digest_before = makers[label]
            again = replace(lost.bound(), restore=True)
            self.listener.stage_started(again, ["its files are needed again"])
            ref = made[label] = self._executor.run(again, self.listener).ref
            if ref.digest != digest_before:
                self._continue_from(again, ref)
        labels = {role: item.call.label for role, item in call.inputs.items() if not isinstance(item, ArtifactRef)}
        return {role: made[label] for role, label in labels.items() if label in made}

    def _continue_from(self, call: StageCall, ref: ArtifactRef) -> None:
        """Use the new artifact from now on; verdicts, credit and scores of the old content must not meet the new."""
        if self.record is not None:
            self.record.use_instead(find_stage(call.stage).identity(call).key, ref.key)
        raise ContentChangedError(
            f"{call.title}: its files were gone, and computing it again gave other content (this hardware or these "
            "library versions do not repeat it bit for bit)"
        )

    def _finished(self, call: StageCall, outcome: Outcome) -> None:
        self._watch.after(call, outcome)
        if not outcome.cached:
            self.store.mark_verified(outcome.ref)
        if self.record is not None:
            self.record.add(call, outcome)
        self.listener.stage_finished(call, outcome)


class InlineRunner(StageRunner):
    """Runs each call when it is submitted, one after the other."""

    def _schedule(self, call: StageCall) -> Pending:
        return Done(call, self.perform(call))


@dataclass
class InThread:
    """A call under way in a thread of this process."""

    call: StageCall
    future: "Future[Outcome]"

    def outcome(self) -> Outcome:
        """Wait for the thread; raises what the stage raised."""
        return self.future.result()

    def done(self) -> bool:
        """Whether the thread has ended."""
        return self.future.done()

    def failed(self) -> bool:
        """Whether the thread has ended in an error."""
        return self.future.done() and self.future.exception() is not None

    def settle(self) -> None:
        """Keep artifacts in place of handles."""
        ended: Future[Outcome] = Future()
        ended.set_result(replace(self.future.result(), metrics={}))
        self.call, self.future = self.call.bound(), ended


class ThreadRunner(StageRunner):
    """Runs calls in threads that wait for their inputs."""

    _threads: ThreadPoolExecutor | None = None

    def _schedule(self, call: StageCall) -> Pending:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "stage")
        return InThread(call, self._threads.submit(self._perform_with_retries, call))

    def _perform_with_retries(self, call: StageCall) -> Outcome:
        for attempt in range(self.retries):
            try:
                return self.perform(call)
            except ProcessDiedError as problem:
                self.listener.warn(f"{problem}; trying again")
                time.sleep(FIRST_RETRY_SECONDS * 2**attempt)
        return self.perform(call)


def look_up(store: Store, record: Record | None, call: StageCall) -> Outcome | None:
    """Return the outcome of a bound call whose artifact exists, else None.

    Where the campaign made files again and got other content, the artifact is the new one.
    """
    found = lookup(store, call)
    if found is None or record is None or (key := record.now_at(found.ref.key)) == found.ref.key:
        return found
    try:
        manifest = store.manifest(found.ref.stage, key)
    except ArtifactError:
        return found
    ref = ArtifactRef(found.ref.stage, key, manifest.content_digest, store.folder(found.ref.stage, key))
    return replace(found, ref=ref, metrics=manifest.metrics)


def first_error(problem: BaseException) -> HacrlError | None:
    """Return the project's own error inside whatever was wrapped around it."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, HacrlError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _settled(handle: Pending) -> bool:
    """Whether the call has ended; raises what the stage raised."""
    if not handle.done():
        return False
    handle.outcome()
    return True

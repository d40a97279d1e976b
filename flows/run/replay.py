"""Answers stage calls from the store alone. A campaign whose artifacts are all there needs neither Prefect nor torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

from flows.record.record import Record
from flows.run.divergence import Watch
from flows.run.executors import Events
from flows.stage_calls import Planned
from hacrl_core.artifacts import Store
from stages.runner import Outcome, lookup
from stages.spec import StageCall


class CacheMiss(Exception):
    """A replay met a stage that has not been run yet."""


@dataclass(frozen=True)
class Done:
    value: Outcome
    planned: Planned | None = None  # what made it, should its files be needed again

    def outcome(self) -> Outcome:
        return self.value

    def done(self) -> bool:
        return True

    def failed(self) -> bool:
        return False


@dataclass
class Observers:
    """Who wants to hear of stages; each function may be called from several threads."""

    started: Callable[[StageCall, list[str]], None] = lambda call, why: None
    finished: Callable[[StageCall, Outcome], None] = lambda call, outcome: None
    iteration: Callable[[int], None] = lambda iteration: None
    events: Events = field(default_factory=Events)


def joined(*parts: Observers) -> Observers:
    """All of them, told one after the other."""

    def everybody(functions: list[Callable[..., None]]) -> Callable[..., None]:
        def tell(*news: object) -> None:
            for function in functions:
                function(*news)

        return tell

    events = [part.events for part in parts]
    listening = [e.output for e in events if e.output is not None]
    return Observers(
        started=everybody([part.started for part in parts]),
        finished=everybody([part.finished for part in parts]),
        iteration=everybody([part.iteration for part in parts]),
        events=Events(
            progress=everybody([e.progress for e in events]),
            warn=everybody([e.warn for e in events]),
            waiting=everybody([e.waiting for e in events]),
            output=everybody(listening) if listening else None,
        ),
    )


def bind(planned: Planned) -> StageCall:
    """The call with its inputs resolved; waits for those that still run."""
    inputs = {role: handle.outcome().ref for role, handle in planned.inputs.items()}
    return StageCall(
        planned.stage, dict(planned.config), inputs, planned.seed, planned.agent, planned.iteration, planned.variant
    )


@dataclass
class Replay:
    """The first call that is not in the store ends it."""

    store: Store
    record: Record
    watch: Watch = field(default_factory=Watch)

    def submit(self, planned: Planned) -> Done:
        call = bind(planned)
        found = lookup(self.store, call)
        if found is None:
            raise CacheMiss(call.label)
        self.watch.after(call, found)
        self.record.add(call, found)
        return Done(found, planned)

    def iteration_done(self, iteration: int) -> None:
        pass

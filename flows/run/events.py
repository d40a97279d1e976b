"""What happens while stages run, and who hears of it."""

from hacrl_core.spans import Span
from stages.spec import Outcome, StageCall


class Listener:
    """Hears what happens to stages.

    A subclass overrides what it needs; every method may be called from several threads.

    The live display, the log, Prefect's pages, the feed of MLflow and the collector of old versions are listeners.
    """

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        """A stage is about to run. ``why`` names what changed since it last ran in this campaign; empty at first."""

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """A stage has its artifact, computed now or found in the store."""

    def stage_failed(self, call: StageCall, problem: BaseException) -> None:
        """A stage that was started ended in an error; it may be tried again."""

    def iteration_finished(self, iteration: int) -> None:
        """Every agent has its next version."""

    def progress(self, call: StageCall, done: int, total: int, note: str) -> None:
        """A running stage has done so much of its work; ``note`` says how fast."""

    def waiting(self, call: StageCall, holder: str) -> None:
        """Another process computes the same artifact; the call waits for it."""

    def warn(self, message: str) -> None:
        """Something that a person should know and that does not stop the campaign."""

    def collapsed(self, message: str) -> None:
        """The rewards of an agent have collapsed; the message is also a warning, or ends the campaign."""

    def output(self, worker: str, line: str) -> None:
        """A line that a worker process or one of its children printed."""

    def spans(self, process: str, spans: list[Span]) -> None:
        """What a process did, where the campaign is profiled."""


class Listeners(Listener):
    """Several listeners as one; each is told in the order given."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.stage_started(call, why)

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.stage_finished(call, outcome)

    def stage_failed(self, call: StageCall, problem: BaseException) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.stage_failed(call, problem)

    def iteration_finished(self, iteration: int) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.iteration_finished(iteration)

    def progress(self, call: StageCall, done: int, total: int, note: str) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.progress(call, done, total, note)

    def waiting(self, call: StageCall, holder: str) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.waiting(call, holder)

    def warn(self, message: str) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.warn(message)

    def collapsed(self, message: str) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.collapsed(message)

    def output(self, worker: str, line: str) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.output(worker, line)

    def spans(self, process: str, spans: list[Span]) -> None:
        """Pass it on."""
        for listener in self._listeners:
            listener.spans(process, spans)

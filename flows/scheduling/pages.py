"""What Prefect's pages show of a campaign: its timeline and log, its progress, a table of its agents, a summary.

All of it goes through a thread, so the campaign never waits for a page. A Prefect artifact has one key per campaign and
is updated in place, so that a run of a thousand iterations leaves one of each. The bars of the timeline are task runs
of the flow run. Prefect records a task run from the events that its client sends, so a bar costs two events and the
server runs nothing.
"""

import base64
import contextvars
import json
import queue
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from flows.record.history import History, history_of_run, last
from flows.record.record import Record
from flows.record.trace import PREFECT
from flows.report.charts import current_learning_curves
from flows.run.events import Listener, Listeners
from flows.scheduling.api import told_gone
from flows.scheduling.tally import Tally
from flows.scheduling.timeline import BarState, LogLine, Timeline
from flows.views.text import clock, number, short
from hacrl_core.artifacts import Store
from hacrl_core.spans import span
from stages.spec import Outcome, StageCall

# The end of a campaign waits no longer than this for its pages.
PATIENCE_SECONDS = 20.0
# Progress and table are shown at most so often: no oftener than a hundredth of the run so far, within these bounds.
UPDATE_SECONDS = 15.0
MAX_UPDATE_SECONDS = 30.0
UPDATES_SO_FAR = 100
# How often bars and lines are sent.
SEND_SECONDS = 1.0
# A campaign that fails or is stopped waits no longer than this for its pages.
STOP_SECONDS = 2.0


def key(campaign: str, what: str) -> str:
    """Return the key of a campaign's Prefect artifact: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9-]+", "-", f"hacrl-{campaign}-{what}".lower()).strip("-")


class PrefectView(Listener):
    """Keeps the pages of the current flow run up to date.

    A problem with the server is reported once. It ends the view, never the campaign.
    """

    def __init__(self, store: Store, record: Record, warn: Callable[[str], None]) -> None:
        from prefect.runtime import flow_run

        self._store = store
        self._record = record
        self._warn = warn
        self._config = record.config
        self._flow_run = flow_run.id
        # Of the thread that sends.
        self._client: Any = None
        # Key → id of the Prefect artifact.
        self._known: dict[str, Any] = {}
        self._pending = False
        self._begun = time.monotonic()
        self._shown = float("-inf")
        self._lock = threading.Lock()
        self._timeline = Timeline()
        self._tally = Tally(self._config)
        self._heard = Listeners(self._timeline, self._tally)
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        # The events name the flow run of the context that they are sent from.
        inside = contextvars.copy_context()
        self._thread = threading.Thread(target=inside.run, args=(self._serve,), name="prefect view", daemon=True)
        self._thread.start()

    def close(self, *, complete: bool) -> None:
        """End the timeline; show the summary of a complete campaign. One that fails leaves the pages as they were."""
        self._timeline.end(complete=complete)
        if complete:
            self._queue.put(self._show_summary)
        self._queue.put(None)
        self._thread.join(PATIENCE_SECONDS if complete else STOP_SECONDS)

    # -- what is shown ---------------------------------------------------------------------------------------------

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        """Add it to the timeline and to what is counted."""
        self._heard.stage_started(call, why)

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Add it to the timeline and to what is counted."""
        self._heard.stage_finished(call, outcome)

    def stage_failed(self, call: StageCall, problem: BaseException) -> None:
        """Add it to the timeline and to what is counted."""
        self._heard.stage_failed(call, problem)

    def warn(self, message: str) -> None:
        """Write it into the page's log."""
        self._heard.warn(message)

    def iteration_finished(self, iteration: int) -> None:
        """Show the progress, at most every few seconds; what comes sooner is shown with the next, or at the end."""
        self._heard.iteration_finished(iteration)
        now = time.monotonic()
        pause = min(MAX_UPDATE_SECONDS, max(UPDATE_SECONDS, (now - self._begun) / UPDATES_SO_FAR))
        with self._lock:
            if self._pending or now - self._shown < pause:
                return
            self._pending = True
        self._queue.put(lambda: self._show_progress(iteration + 1))

    def _show_progress(self, done: int) -> None:
        with self._lock:
            self._pending = False
            self._shown = time.monotonic()
        left = self._tally.seconds_left(done)
        told = f"Campaign {self._config.name}: iteration {done} of {self._config.iterations}"
        told += f", {clock(left)} left" if left and done < self._config.iterations else ""
        self._put("progress", "progress", 100.0 * done / self._config.iterations, told)
        self._put("agents", "table", self._tally.rows(), f"Agents of {self._config.name} after {done} iterations")

    def _show_summary(self) -> None:
        with span("summary", PREFECT):
            history = history_of_run(self._record, self._store)
            self._show_progress(history.done)
            self._put("summary", "markdown", _markdown(history, self._record.folder), f"Summary of {self._config.name}")

    # -- Prefect ---------------------------------------------------------------------------------------------------

    def _put(self, what: str, kind: str, data: Any, description: str) -> None:
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        name = key(self._config.name, what)
        text = data if isinstance(data, str | float) else json.dumps(data)
        with span(f"send {what}", PREFECT):
            if name in self._known:
                self._client.update_artifact(self._known[name], ArtifactUpdate(data=text, description=description))
            else:
                made = self._client.create_artifact(
                    ArtifactCreate(key=name, type=kind, description=description, data=text, flow_run_id=self._flow_run)
                )
                self._known[name] = made.id

    def _send(self, states: list[BarState], lines: list[LogLine]) -> None:
        """Send bars as events and lines as logs of the flow run."""
        if not states and not lines:
            return
        with span("send bars and lines", PREFECT):
            for state in states:
                _emit(state, self._flow_run)
            if lines:
                self._client.create_logs([_log(line, self._flow_run) for line in lines])

    def _serve(self) -> None:
        from prefect.client.orchestration import get_client

        try:
            # One client for all of it: making one reads certificates and costs more than a request.
            with get_client(sync_client=True) as self._client:
                self._work()
        except Exception as problem:
            if told_gone.is_set():
                return
            first = (str(problem).splitlines() or [type(problem).__name__])[0][:160]
            self._warn(f"Prefect's pages are not up to date ({first}); the campaign goes on")

    def _work(self) -> None:
        work: Callable[[], None] | None = _nothing
        while work is not None:
            self._send(*self._timeline.take())
            try:
                work = self._queue.get(timeout=SEND_SECONDS)
            except queue.Empty:
                work = _nothing
            if work is not None:
                work()
        self._send(*self._timeline.take())


def _nothing() -> None:
    pass


def _emit(bar: BarState, flow_run: str | None) -> None:
    """Tell Prefect of a bar's new state, as its own task engine tells of a task run's."""
    from prefect.client.schemas.objects import State, StateType, TaskRun
    from prefect.utilities.engine import emit_task_run_state_change_event

    kind = StateType.COMPLETED if bar.state == "Cached" else StateType[bar.state.upper()]
    state: State[None] = State(type=kind, name=bar.state, timestamp=_moment(bar.at), message=bar.message or None)
    ended = None if bar.state == "Running" else _moment(bar.at)
    run = TaskRun(
        id=bar.id,
        name=bar.name,
        flow_run_id=None if flow_run is None else UUID(flow_run),
        task_key=bar.kind,
        dynamic_key=str(bar.id),
        run_count=1,
        start_time=_moment(bar.began),
        expected_start_time=_moment(bar.began),
        end_time=ended,
        total_run_time=timedelta(seconds=bar.at - bar.began),
        state=state,
    )
    emit_task_run_state_change_event(run, None, state)


def _log(line: LogLine, flow_run: str | None) -> dict[str, Any]:
    return {
        "name": "hacrl",
        "level": line.level,
        "message": line.text,
        "timestamp": _moment(line.at).isoformat(),
        "flow_run_id": flow_run,
        "task_run_id": None if line.bar is None else str(line.bar),
    }


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _rows(history: History) -> list[dict[str, Any]]:
    rows = []
    for agent in history.agents:
        row: dict[str, Any] = {"agent": agent, "reward": number(last(history.rewards(agent)), 3)}
        row["capability"] = number(last(history.capability(agent)), 3)
        for benchmark in history.benchmarks:
            points = history.accuracy(agent, benchmark)
            row[f"accuracy, {benchmark}"] = "" if not points else f"{points[-1][1]:.1%}"
            row[f"gain, {benchmark}"] = "" if len(points) < 2 else f"{100 * (points[-1][1] - points[0][1]):+.1f}"
        cost = history.cost(agent)
        rows.append({**row, "responses": short(cost.responses), "tokens": short(cost.tokens)})
    return rows


def _markdown(history: History, folder: Path) -> str:
    config = history.config
    cost = history.cost()
    rows = _rows(history)
    head = f"# {config.name}\n\n{config.preset}, {history.done} of {config.iterations} iterations, "
    head += f"{short(cost.responses)} responses, {short(cost.tokens)} tokens, {clock(cost.seconds)} of stages.\n\n"
    titles = list(rows[0])
    table = [titles, ["---"] * len(titles), *([str(row[title]) for title in titles] for row in rows)]
    body = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    picture = ""
    if (path := current_learning_curves(history, folder)) is not None:
        encoded = base64.b64encode(path.read_bytes()).decode()
        picture = f"\n\n![learning curves](data:image/png;base64,{encoded})"
    return f"{head}{body}{picture}\n\nMore: `hacrl report {config.name}`, `hacrl export {config.name}/AGENT@best DIR`\n"

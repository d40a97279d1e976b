"""What Prefect's pages show of a campaign: its progress, its agents as a table, a summary with the picture at the end, stages from the cache.

All of it goes through a thread of its own: the campaign never waits for a page. An artifact has one key for each campaign and is updated in place, so
that a run of a thousand iterations leaves one of each.
"""

import base64
import json
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.record.history import History, last
from flows.record.record import Record
from flows.run.events import Listener
from flows.views.text import clock, number, short
from hacrl_core.artifacts import Store
from stages.spec import StageCall

PATIENCE_SECONDS = 20.0  # that the end of a campaign waits for its pages at most
EVERY_SECONDS = 3.0
MOST_LABELS = 200  # of stages in one task's parameters


def key(campaign: str, what: str) -> str:
    """Prefect's keys: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9-]+", "-", f"hacrl-{campaign}-{what}".lower()).strip("-")


class PrefectView(Listener):
    """Made inside a flow run. Trouble with the server is told once and ends the view, never the campaign."""

    def __init__(self, store: Store, record: Record, warn: Callable[[str], None]) -> None:
        from prefect.runtime import flow_run

        self._store, self._record, self._warn = store, record, warn
        self._config = record.config
        self._flow_run = flow_run.id
        self._known: dict[str, Any] = {}  # key → id of its artifact
        self._pending, self._shown = False, float("-inf")
        self._lock = threading.Lock()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="prefect view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """At the end of a complete campaign; one that fails leaves the pages as they were."""
        self._queue.put(self._show_summary)
        self._queue.put(None)
        self._thread.join(PATIENCE_SECONDS)

    # -- what is shown ---------------------------------------------------------------------------------------------

    def iteration_finished(self, iteration: int) -> None:
        """A page need not be newer than a person's glance: what follows too soon is shown with the next, or at the end."""
        with self._lock:
            if self._pending or time.monotonic() - self._shown < EVERY_SECONDS:
                return
            self._pending = True
        self._queue.put(lambda: self._show_progress(iteration + 1))

    def _show_progress(self, done: int) -> None:
        with self._lock:
            self._pending, self._shown = False, time.monotonic()
        history = self._history()
        left = history.seconds_left()
        told = f"Campaign {self._config.name}: iteration {done} of {self._config.iterations}"
        told += f", {clock(left)} left" if left and done < self._config.iterations else ""
        self._put("progress", "progress", 100.0 * done / self._config.iterations, told)
        self._put("agents", "table", _rows(history), f"Agents of {self._config.name} after {done} iterations")

    def _show_summary(self) -> None:
        history = self._history()
        self._show_progress(history.done)
        self._put("summary", "markdown", _markdown(history), f"Summary of {self._config.name}")

    def _history(self) -> History:
        return History(self._config, self._store, self._record.entries())

    # -- Prefect ---------------------------------------------------------------------------------------------------

    def _put(self, what: str, kind: str, data: Any, description: str) -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        name = key(self._config.name, what)
        text = data if kind == "progress" else data if isinstance(data, str) else json.dumps(data)
        with get_client(sync_client=True) as client:
            if name in self._known:
                client.update_artifact(self._known[name], ArtifactUpdate(data=text, description=description))
            else:
                made = client.create_artifact(
                    ArtifactCreate(key=name, type=kind, description=description, data=text, flow_run_id=self._flow_run)
                )
                self._known[name] = made.id

    def _serve(self) -> None:
        try:
            while (work := self._queue.get()) is not None:
                work()
        except Exception as problem:
            first = (str(problem).splitlines() or [type(problem).__name__])[0][:160]
            self._warn(f"Prefect's pages are not up to date ({first}); the campaign goes on")


class CachedStages:
    """Stages answered from the store become tasks in the state Cached, many in one: a task run costs more than the look-up."""

    def __init__(self, submit: Callable[[str, list[str]], None]) -> None:
        self._submit = submit  # the task's name, the stages in it
        self._waiting: list[StageCall] = []

    def add(self, call: StageCall) -> None:
        self._waiting.append(call)

    def flush(self) -> None:
        """Before something runs, and at the end: what was found since the last time is one task."""
        found, self._waiting = self._waiting, []
        if found:
            self._submit(_name(found), [call.label for call in found[:MOST_LABELS]])


def _name(found: list[StageCall]) -> str:
    if len(found) == 1:
        return found[0].label
    numbers = sorted({call.iteration for call in found if call.iteration is not None})
    where = "" if not numbers else f" #{numbers[0]}" if len(numbers) == 1 else f" #{numbers[0]} to #{numbers[-1]}"
    return f"{len(found)} stages from the store{where}"


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


def _markdown(history: History) -> str:
    from flows.report.charts import draw_learning_curves

    config, cost, rows = history.config, history.cost(), _rows(history)
    head = f"# {config.name}\n\n{config.preset}, {history.done} of {config.iterations} iterations, "
    head += f"{short(cost.responses)} responses, {short(cost.tokens)} tokens, {clock(cost.seconds)} of stages.\n\n"
    titles = list(rows[0])
    table = [titles, ["---"] * len(titles), *([str(row[title]) for title in titles] for row in rows)]
    body = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    picture = ""
    with tempfile.TemporaryDirectory() as place:
        if (path := draw_learning_curves(history, Path(place))) is not None:
            encoded = base64.b64encode(path.read_bytes()).decode()
            picture = f"\n\n![learning curves](data:image/png;base64,{encoded})"
    return f"{head}{body}{picture}\n\nMore: `hacrl report {config.name}`, `hacrl export {config.name}/AGENT@best DIR`\n"

"""What Prefect's pages show of a campaign: its progress, a table of its agents, a summary at the end, cached stages.

All of it goes through a thread, so the campaign never waits for a page. A Prefect artifact has one key per campaign and
is updated in place, so that a run of a thousand iterations leaves one of each.
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
from flows.report.charts import draw_learning_curves
from flows.run.events import Listener
from flows.views.text import clock, number, short
from hacrl_core.artifacts import Store
from stages.spec import StageCall

# The end of a campaign waits no longer than this for its pages.
PATIENCE_SECONDS = 20.0
UPDATE_SECONDS = 3.0
# Of stages in one task's parameters.
MAX_LABELS = 200


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
        # Key → id of the Prefect artifact.
        self._known: dict[str, Any] = {}
        self._pending = False
        self._shown = float("-inf")
        self._lock = threading.Lock()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="prefect view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show the summary of a complete campaign; one that fails leaves the pages as they were."""
        self._queue.put(self._show_summary)
        self._queue.put(None)
        self._thread.join(PATIENCE_SECONDS)

    # -- what is shown ---------------------------------------------------------------------------------------------

    def iteration_finished(self, iteration: int) -> None:
        """Show the progress, at most every few seconds; what comes sooner is shown with the next, or at the end."""
        with self._lock:
            if self._pending or time.monotonic() - self._shown < UPDATE_SECONDS:
                return
            self._pending = True
        self._queue.put(lambda: self._show_progress(iteration + 1))

    def _show_progress(self, done: int) -> None:
        with self._lock:
            self._pending = False
            self._shown = time.monotonic()
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
        text = data if isinstance(data, str | float) else json.dumps(data)
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
    """Shows stages found in the store as tasks in the state Cached.

    Many stages share one task, because a task run costs more than a lookup.
    """

    def __init__(self, submit: Callable[[str, list[str]], None]) -> None:
        # Takes the task's name and the labels of its stages.
        self._submit = submit
        self._waiting: list[StageCall] = []

    def add(self, call: StageCall) -> None:
        """Note a stage for the next task."""
        self._waiting.append(call)

    def flush(self) -> None:
        """Submit the noted stages as one task; called before a stage runs, and at the end."""
        found = self._waiting
        self._waiting = []
        if found:
            self._submit(_name(found), [call.label for call in found[:MAX_LABELS]])


def _name(found: list[StageCall]) -> str:
    if len(found) == 1:
        return found[0].label
    numbers = sorted({call.iteration for call in found if call.iteration is not None})
    where = f" #{numbers[0]}" if numbers else ""
    where += f" to #{numbers[-1]}" if len(numbers) > 1 else ""
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
    config = history.config
    cost = history.cost()
    rows = _rows(history)
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

"""A sweep in MLflow: a parent run, and below it the runs of every cell, replayed when the cell is finished."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flows.home import Home
from flows.sweep.cells import Job, finished_entries
from flows.tracking.feed import first_line
from flows.tracking.points import clean_name
from flows.tracking.projection import (
    Projection,
    ensure_database,
    find_experiment,
    quiet_environment,
    tracking_uri,
)
from hacrl_core.artifacts import open_store
from hacrl_core.config.sweep import Cell, Sweep

# A stopped sweep waits this long for MLflow to note it.
STOP_SECONDS = 5.0


class SweepTracker:
    """Feeds MLflow from one thread: cells never wait for it, and a dead server costs one warning."""

    def __init__(self, sweep: Sweep, home: Home, warn: Callable[[str], None]) -> None:
        self._sweep = sweep
        self._home = home
        self._warn = warn
        self._enabled = sweep.cells[0].config.tracking.enabled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._client: Any = None
        self._run = ""

    def replay(self, cell: Cell) -> None:
        """Send a finished cell's runs."""
        self._later(lambda: self._replay(cell))

    def summarise(self, metrics: dict[str, float], files: list[Any], finished_at: float) -> None:
        """Send the sweep's own numbers, tables and pictures; ``finished_at`` is the time of its newest manifest."""
        self._later(lambda: self._summarise(metrics, files, finished_at))

    def __enter__(self) -> "SweepTracker":
        """Prepare MLflow's environment."""
        quiet_environment()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the sweep's run: finished, killed or failed."""
        if kind is None:
            self._later(lambda: self._open().set_terminated(self._run, "FINISHED"))
            self._thread.shutdown()
            return
        status = "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED"
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            last = threading.Thread(target=self._guarded, args=(lambda: self._close(status),), daemon=True)
            last.start()
            last.join(STOP_SECONDS)

    def _close(self, status: str) -> None:
        self._client.set_terminated(self._run, status)

    def _later(self, work: Callable[[], Any]) -> None:
        if self._enabled:
            self._thread.submit(self._guarded, work)

    def _guarded(self, work: Callable[[], Any]) -> None:
        if not self._enabled:
            return
        try:
            work()
        except Exception as problem:
            self._enabled = False
            self._warn(
                f"MLflow: {first_line(problem)}; the sweep goes on and nothing is lost: the same command again fills "
                "MLflow in"
            )

    def _replay(self, cell: Cell) -> None:
        entries = finished_entries(Job(cell.config, self._home.campaign(cell.label)), self._home.store)
        if entries is None:
            return
        self._open()
        uri = tracking_uri(cell.config, self._home)
        projection = Projection(cell.config, open_store(self._home.store), uri, self._home, parent=self._run)
        projection.replay(entries)
        projection.finish()

    def _summarise(self, metrics: dict[str, float], files: list[Any], finished_at: float) -> None:
        from mlflow.entities import Metric

        client = self._open()
        # A point of the same time, step and value is the same point: the same sweep again adds none.
        at = int(finished_at * 1000)
        client.log_batch(self._run, metrics=[Metric(clean_name(name), value, at, 0) for name, value in metrics.items()])
        client.log_dict(self._run, self._sweep.config.model_dump(mode="json"), "sweep.json")
        for path in files:
            client.log_artifact(self._run, str(path))

    def _open(self) -> Any:
        """Return the client, and find the sweep's run by its name or create it."""
        if self._client is None:
            from mlflow import MlflowClient

            first = self._sweep.cells[0].config
            uri = tracking_uri(first, self._home)
            if uri == self._home.tracking_uri:
                ensure_database(self._home)
            client = MlflowClient(tracking_uri=uri)
            name = self._sweep.config.name
            experiment = find_experiment(client, first.tracking.experiment, uri, self._home)
            query = f"tags.`hacrl.sweep` = '{name}'"
            found = client.search_runs([experiment], query, max_results=1)
            if found:
                self._run = found[0].info.run_id
                client.update_run(self._run, status="RUNNING")
            else:
                made = client.create_run(experiment, run_name=name, tags={"hacrl.sweep": name})
                self._run = made.info.run_id
            self._client = client
        return self._client

"""System metrics of a campaign: what the machine did while it ran, under MLflow's own names.

They are not in any manifest, so they are recorded in the campaign's folder first and sent from there: a database that
was lost gets them back like everything else.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from flows.record.trace import MLFLOW
from hacrl_core.spans import span

NAME = "system.jsonl"
SECONDS = 30.0


class SystemSampler:
    """Appends CPU, memory, disk, network and GPU use to the campaign's folder from a thread of its own."""

    def __init__(self, folder: Path, seconds: float | None = None) -> None:
        self._path = folder / NAME
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)

    def __enter__(self) -> "SystemSampler":
        """Start sampling."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop sampling; a sample under way is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        try:
            monitors, seconds = _monitors(), self._seconds or _interval()
            with self._path.open("a", encoding="utf-8") as file:
                while not self._stop.wait(seconds):
                    with span("look at the machine", MLFLOW):
                        file.write(json.dumps({"at": int(time.time() * 1000), "values": _sample(monitors)}) + "\n")
                        file.flush()
        except Exception:
            # What the machine does is shown beside the campaign, which goes on without it.
            return


def _interval() -> float:
    """Return the seconds between two samples: MLflow's own variable, else ours."""
    try:
        return float(os.environ["MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"])
    except (KeyError, ValueError):
        return SECONDS


def _monitors() -> list[Any]:
    """Return MLflow's monitors of this machine; those of disk and network count from here on."""
    import psutil
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    # The first value is that since this call.
    psutil.cpu_percent()
    always: list[Any] = [CPUMonitor, DiskMonitor, NetworkMonitor]
    monitors, of_gpus = [kind() for kind in always], cast(Any, GPUMonitor)
    try:
        monitors.append(of_gpus())
    except Exception:
        # No GPU, or no library that reads it.
        return monitors
    return monitors


def _sample(monitors: list[Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for monitor in monitors:
        monitor.collect_metrics()
        found.update(monitor.aggregate_metrics())
        monitor.clear_metrics()
    return found


class SystemLog:
    """Reads the samples of a campaign; each call goes on where the one before ended."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._offset = 0
        self._step = 0

    def points(self) -> Iterator[tuple[str, float, int, int]]:
        """Yield name, value, milliseconds and step of new samples; a step counts the samples of the campaign."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._offset += len(raw)
                self._step += 1
                try:
                    line = json.loads(raw)
                    values = {str(name): float(value) for name, value in line["values"].items()}
                    at = int(line["at"])
                except (ValueError, KeyError, TypeError, AttributeError):
                    # Torn by a crash.
                    continue
                for name, value in values.items():
                    yield f"system/{name}", value, at, self._step

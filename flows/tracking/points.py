"""Sends metrics to MLflow: through its client, or straight into a sqlite database that is opened from here.

A tiny iteration has some 150 values. MLflow's own way makes an object of each, and where one is there already it asks
for every one of them. Two statements do the same at a fraction of the CPU time: points that are there stay, and the
latest value of a metric is the one that MLflow would choose.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from flows.tracking.database import open_store

# MLflow's limit of metrics in one call.
_BATCH = 1000


def send_points(client: Any, points: Mapping[str, Sequence[Any]]) -> None:
    """Send MLflow's metrics of several runs, by the runs' ids."""
    store = open_store(client)
    if store is None:
        for run, metrics in points.items():
            for start in range(0, len(metrics), _BATCH):
                client.log_batch(run, metrics=metrics[start : start + _BATCH])
        return
    with store.ManagedSessionMaker(read_only=False) as session:
        for run, metrics in points.items():
            # As MLflow does: a run that somebody deleted takes nothing.
            store._check_run_is_active(store._get_run(session, run))
            rows = [_row(store, run, metric) for metric in metrics]
            if rows:
                every, latest = _statements()
                session.execute(every, rows)
                newest: dict[str, dict[str, Any]] = {}
                for row in rows:
                    if row["key"] not in newest or _age(row) > _age(newest[row["key"]]):
                        newest[row["key"]] = row
                session.execute(latest, list(newest.values()))


def distinct(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out what repeats an accuracy: avg@1, pass@1, best@1 and maj@1 are the accuracy by definition.

    The accuracy itself is shown as ``accuracy/<benchmark>``.
    """
    repeated = [
        name for name in metrics if name.startswith("evaluate/") and ("@1/" in f"{name}/" or name.endswith("/accuracy"))
    ]
    return {name: value for name, value in metrics.items() if name not in repeated}


@functools.lru_cache(maxsize=4096)
def clean_name(name: str) -> str:
    """Return the name with only those characters that MLflow accepts in a metric's name."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "_-./ ") else "_" for c in name)
    return "/".join(part.replace("..", "_") or "_" for part in plain.split("/"))


def _row(store: Any, run: str, metric: Any) -> dict[str, Any]:
    is_nan, value = store.sanitize_metric_value(metric.value)
    return {
        "run_uuid": run,
        "key": metric.key,
        "value": value,
        "timestamp": metric.timestamp,
        "step": metric.step,
        "is_nan": is_nan,
    }


def _age(row: Mapping[str, Any]) -> tuple[int, int, float]:
    return row["step"], row["timestamp"], row["value"]


@functools.cache
def _statements() -> tuple[Any, Any]:
    """Return the statement that adds points, and the one that keeps the latest point of each metric."""
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
    from sqlalchemy import tuple_
    from sqlalchemy.dialects.sqlite import insert

    every: Any = SqlMetric
    latest: Any = SqlLatestMetric
    known, given = latest.__table__, insert(latest.__table__)
    names = ("step", "timestamp", "value")
    newer = tuple_(*(given.excluded[name] for name in names)) > tuple_(*(known.c[name] for name in names))
    changed = {name: given.excluded[name] for name in (*names, "is_nan")}
    return (
        insert(every.__table__).on_conflict_do_nothing(),
        given.on_conflict_do_update(index_elements=["key", "run_uuid"], set_=changed, where=newer),
    )

"""Reads the trace that ``hacrl run --profile`` wrote: where each process spent its time."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "profile"
# The group of tracks of calls that wait for their process.
WAITING = "waiting"
# Kinds of work that threads of the campaign's own process do beside the stages. Each is a group of tracks.
MLFLOW, PREFECT = "MLflow", "Prefect"
BESIDE = (MLFLOW, PREFECT)


def newest_trace(folder: Path) -> Path | None:
    """Return the trace of a campaign's last profiled run; None if there is none."""
    return max((folder / FOLDER).glob("trace-*.json"), default=None)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace, also of one that was cut off."""
    with path.open() as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if text.startswith("{"):
                try:
                    yield json.loads(text)
                except ValueError:
                    return


@dataclass(frozen=True)
class Spent:
    """Where one process spent its time; the seconds of all kinds together are those of the trace.

    Waiting calls are no process, and what is done beside the stages is no part of any: of those there is no idle time.
    """

    process: str
    seconds: dict[str, float]


def where_time_went(path: Path) -> list[Spent]:
    """Add up the kinds of work of each process. Work inside other work counts once, as the inner kind."""
    names: dict[int, str] = {}
    spans: dict[int, list[dict[str, Any]]] = {}
    for event in read_events(path):
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event["cat"] != "op":
            spans.setdefault(event["pid"], []).append(event)
    everything = [one for of in spans.values() for one in of if one["cat"] not in BESIDE]
    if not everything:
        return []
    whole = (max(one["ts"] + one["dur"] for one in everything) - min(one["ts"] for one in everything)) / 1e6
    found = []
    for number, own in spans.items():
        if names.get(number) == WAITING:
            seconds: dict[str, float] = {}
            for one in own:
                seconds[one["cat"]] = seconds.get(one["cat"], 0.0) + one["dur"] / 1e6
        else:
            seconds = _own_seconds(own)
            if own[0]["cat"] not in BESIDE:
                seconds["idle"] = max(0.0, whole - _covered(own))
        found.append(Spent(names.get(number, str(number)), seconds))
    return found


def _own_seconds(spans: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each kind, without those of spans inside."""
    seconds: dict[str, float] = {}
    open_spans: list[tuple[int, float, str]] = []
    for one in sorted(spans, key=lambda one: (one["tid"], one["ts"], -one["dur"])):
        while open_spans and (open_spans[-1][0] != one["tid"] or open_spans[-1][1] <= one["ts"]):
            open_spans.pop()
        kind, lasted = kind_of(one), one["dur"] / 1e6
        if open_spans:
            seconds[open_spans[-1][2]] -= lasted
        seconds[kind] = seconds.get(kind, 0.0) + lasted
        open_spans.append((one["tid"], one["ts"] + one["dur"], kind))
    return seconds


def kind_of(event: dict[str, Any]) -> str:
    """Return what kind of work an event is: a stage by its name, or a part of one."""
    return str(event["cat"]) if event["cat"] != "stage" else str(event["name"]).partition(" ")[0]


def _covered(spans: list[dict[str, Any]]) -> float:
    """Return the seconds in which at least one span ran."""
    covered, reached = 0.0, float("-inf")
    for one in sorted(spans, key=lambda one: one["ts"]):
        end = one["ts"] + one["dur"]
        covered += max(0.0, end - max(one["ts"], reached))
        reached = max(reached, end)
    return covered / 1e6

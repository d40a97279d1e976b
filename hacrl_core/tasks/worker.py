"""What a verifier's worker process calls: load the user's function once, then judge rows and batches of rows.

A row travels as JSON. The reward comes back scaled to [0, 1], which is what the algorithm learns from, beside the raw
number that the function returned.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from hacrl_core.tasks.api import Problem, Verdict
from hacrl_core.tasks.forms import Found, form_of, judge
from hacrl_core.tasks.loading import load_function

_MOST_ANSWER = 20_000
_MOST_NAMES = 64


def load_verifier(name: str, options: Mapping[str, Any]) -> Callable[[str, str, dict[str, Any]], dict[str, Any]]:
    """Import a verifier and return what a worker calls with (problem, response); ``options`` are those of a group."""
    function, declared = load_function(name)
    given = options.get("form", "auto")
    form = form_of(function) if given == "auto" else str(given)
    low, high = options.get("range") or declared or (0.0, 1.0)

    def judge_rows(problem: str, response: str, _: dict[str, Any]) -> dict[str, Any]:
        if not options.get("batch"):
            return _result(judge(function, form, [(response, problem_of(json.loads(problem)))])[0], low, high)
        rows = [(text, problem_of(row)) for text, row in zip(json.loads(response), json.loads(problem), strict=True)]
        found = judge(function, form, rows)
        return {"verdict": "correct", "rows": [_guarded_result(each, low, high) for each in found]}

    return judge_rows


def problem_of(row: Mapping[str, Any]) -> Problem:
    """Return the problem that a row of JSON describes."""
    problem = Problem(row["messages"], row["answer"], id=row["id"], tags=row["tags"], source=row["source"])
    problem.columns = dict(row["columns"])
    return problem


def _guarded_result(found: Found, low: float, high: float) -> dict[str, Any]:
    """One bad result of a batch is an error of its own row."""
    try:
        return _result(found, low, high)
    except (TypeError, ValueError) as problem:
        return {"verdict": "error", "message": f"{type(problem).__name__}: {problem}"[:500]}


def _result(found: Found, low: float, high: float) -> dict[str, Any]:
    if isinstance(found, str):
        return {"verdict": "error", "message": found, "absent": True}
    parts, metrics = _numbers("parts", found.parts), _numbers("metrics", found.metrics)
    answer = str(found.answer)[:_MOST_ANSWER]
    raw = _reward(found, parts)
    if raw is None:
        return {"verdict": "unparseable", "answer": answer, "range": [low, high], "metrics": metrics}
    if not low <= raw <= high:
        raise ValueError(
            f"reward {raw:g} is outside [{low:g}, {high:g}]; declare reward_range = (lowest, highest) in the task, "
            "or set verify.reward_range"
        )
    scaled = min(1.0, max(0.0, (raw - low) / (high - low)))
    correct = scaled == 1.0 if found.correct is None else bool(found.correct)
    return {
        "verdict": "correct" if correct else "incorrect",
        "reward": scaled,
        "raw": raw,
        "range": [low, high],
        "answer": answer,
        "parts": parts,
        "metrics": metrics,
    }


def _reward(found: Verdict, parts: Mapping[str, float]) -> float | None:
    if found.reward is None:
        return sum(parts.values()) if parts else None
    raw = float(found.reward)
    if not math.isfinite(raw):
        raise ValueError(f"reward {raw} is not a finite number")
    return raw


def _numbers(what: str, values: Mapping[str, Any]) -> dict[str, float]:
    found = {str(name): float(value) for name, value in values.items()}
    bad = [name for name, value in found.items() if not math.isfinite(value)]
    if bad:
        raise ValueError(f"{what} {bad[0]!r} is not a finite number")
    if len(found) > _MOST_NAMES:
        raise ValueError(f"{len(found)} {what}, at most {_MOST_NAMES} are kept")
    return found

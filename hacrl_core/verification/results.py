"""What a worker sends back about a user's function, checked: the function may have written anything to its socket."""

import math
from collections.abc import Mapping
from typing import Any

from hacrl_core.verification.verdict import VerdictKind

_MALFORMED = {"verdict": "error", "message": "the verifier's result has the wrong form"}


def checked_rows(result: Mapping[str, Any], count: int) -> list[dict[str, Any]] | None:
    """Return the results of a batch, one per row; None where the batch failed as a whole."""
    rows = result.get("rows")
    if not isinstance(rows, list) or len(rows) != count:
        return None
    milliseconds = float(result.get("milliseconds", 0.0)) / max(1, count)
    return [{**row, "milliseconds": milliseconds} if isinstance(row, dict) else dict(_MALFORMED) for row in rows]


def checked_result(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a result whose fields have the right types, else an error."""
    reward, raw = result.get("reward"), result.get("raw")
    ends = result.get("range")
    proper = (
        result.get("verdict") in list(VerdictKind)
        and (reward is None or (_is_number(reward) and 0 <= reward <= 1))
        and (raw is None or _is_number(raw))
        and (ends is None or (isinstance(ends, list) and len(ends) == 2 and all(map(_is_number, ends))))
        and all(_are_numbers(result.get(name, {})) for name in ("parts", "metrics"))
        and isinstance(result.get("answer", ""), str)
        and isinstance(result.get("message", ""), str)
    )
    return result if proper else _MALFORMED


def further_fields(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a verdict that only a user's function fills."""
    found: dict[str, Any] = {
        "parts": result.get("parts", {}),
        "metrics": result.get("metrics", {}),
        "message": result.get("message", ""),
        "absent": bool(result.get("absent", False)),
    }
    if result.get("raw") is not None:
        found["raw_reward"] = float(result["raw"])
    if result.get("range") is not None:
        found["raw_range"] = (float(result["range"][0]), float(result["range"][1]))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(_is_number(value) for value in values.values())

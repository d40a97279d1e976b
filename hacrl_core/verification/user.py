"""The user's own verifier: ``verifier: my_module:my_fn`` with ``my_fn(response, gold)``, run in a worker like everything risky."""

import math
from collections.abc import Callable
from typing import Any


def call_user_function(function: Callable[[str, str], Any], response: str, gold: str) -> dict[str, Any]:
    """``my_fn`` returns a bool, a reward in [0, 1], None for "no answer found", or (that, the answer it found)."""
    value = function(response, gold)
    answer = ""
    if isinstance(value, tuple):
        value, answer = value
    if value is None:
        return {"verdict": "unparseable", "answer": str(answer)}
    reward = float(value)
    if not math.isfinite(reward) or not 0 <= reward <= 1:
        raise ValueError(f"reward {reward} is outside [0, 1]")
    return {"verdict": "correct" if reward == 1 else "incorrect", "reward": reward, "answer": str(answer)}

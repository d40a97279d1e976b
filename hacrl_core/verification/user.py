"""The user's own verifier: ``verifier: my_module:my_fn`` with ``my_fn(response, gold)``, run in a worker like everything risky."""

import hashlib
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hacrl_core.errors import ConfigError


def verifier_source(verifier: str) -> str:
    """A digest of the file a user's verifier is in, so that changed code gives new verdicts; empty for the built-in ones.

    Helpers that the file imports are not followed.
    """
    module, colon, _ = verifier.partition(":")
    if not colon:
        return ""
    try:
        spec = find_spec(module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"verify.verifier {verifier}: no module {module}; put {module}.py in the current folder or on PYTHONPATH"
        )
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


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

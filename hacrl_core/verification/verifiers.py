"""The verifiers besides maths: exact match, numeric tolerance, and the user's own function."""

import hashlib
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ConfigError
from hacrl_core.verification.extraction import extract_answer, extract_gold
from hacrl_core.verification.maths import MathsVerifier, quantity
from hacrl_core.verification.normalise import text_key
from hacrl_core.verification.numbers import close
from hacrl_core.verification.strict import StrictVerifier
from hacrl_core.verification.verdict import Judgement, VerdictKind, Verifier


class ExactVerifier:
    """Accept the same text, up to spacing and LaTeX spelling: for labels, words, codes and the demo's arithmetic."""

    name = "exact"
    task: str | None = None

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        """Compare the extracted answer with the gold as text."""
        answer = extract_answer(response, config.fallbacks, join=False).answer
        if not answer:
            return Judgement(VerdictKind.UNPARSEABLE, "")
        target = extract_gold(gold)
        return Judgement(_kind(answer == target or text_key(answer) == text_key(target)), answer)


class NumericVerifier:
    """Accept a number within the relative tolerance, however exactly it is written: for physics and simulation."""

    name = "numeric"
    task: str | None = None

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        """Compare the extracted number with the gold's; a gold that is not a number is an error."""
        answer = extract_answer(response, config.fallbacks, join=False).answer
        number, target = quantity(answer).number, quantity(extract_gold(gold)).number
        if target is None:
            return Judgement(VerdictKind.ERROR, answer)
        if number is None:
            return Judgement(VerdictKind.UNPARSEABLE, answer)
        gold_value = target.value / 100 if target.percent and not number.percent else target.value
        value = number.value / 100 if number.percent and not target.percent else number.value
        return Judgement(_kind(close(gold_value, value, config.tolerance)), answer)


class UserVerifier:
    """Call the user's function, ``verifier: my_module:my_fn``, in a worker, with the response as the model wrote it."""

    def __init__(self, entry_point: str) -> None:
        self.name = entry_point
        self.task: str | None = entry_point

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        """Leave every decision to a worker: user code never runs in this process."""
        return Judgement(None, response)


_BUILT_IN: dict[str, Verifier] = {
    verifier.name: verifier for verifier in (StrictVerifier(), MathsVerifier(), ExactVerifier(), NumericVerifier())
}


def find_verifier(name: str) -> Verifier:
    """Return the built-in verifier of this name, or one that calls the user's function."""
    return _BUILT_IN.get(name) or UserVerifier(name)


def verifier_source(verifier: str) -> str:
    """Return a digest of the file that a user's verifier is in; empty for the built-in ones.

    Changed code thereby gives new verdicts. Helpers that the file imports are not followed.
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
    """Call ``my_fn(response, gold)`` and return a worker's result.

    The function returns a bool, a reward in [0, 1], None for "no answer found", or (one of these, the answer it found).
    """
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


def _kind(correct: bool) -> VerdictKind:
    return VerdictKind.CORRECT if correct else VerdictKind.INCORRECT

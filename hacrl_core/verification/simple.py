"""The verifiers that never need a worker: exact match and numeric tolerance."""

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.verification.extraction import extract_answer, extract_gold
from hacrl_core.verification.maths import quantity
from hacrl_core.verification.normalise import text_key
from hacrl_core.verification.numbers import close
from hacrl_core.verification.verdict import Judgement, VerdictKind


def _kind(correct: bool) -> VerdictKind:
    return VerdictKind.CORRECT if correct else VerdictKind.INCORRECT


class ExactVerifier:
    """The same text, up to spacing and LaTeX spelling: for labels, words, codes and the demo's arithmetic."""

    name = "exact"
    task: str | None = None

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        answer = extract_answer(response, config.fallbacks, join=False).answer
        if not answer:
            return Judgement(VerdictKind.UNPARSEABLE, "")
        target = extract_gold(gold)
        return Judgement(_kind(answer == target or text_key(answer) == text_key(target)), answer)


class NumericVerifier:
    """Two numbers within the relative tolerance, however exactly they are written: for physics and simulation."""

    name = "numeric"
    task: str | None = None

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        answer = extract_answer(response, config.fallbacks, join=False).answer
        number, target = quantity(answer).number, quantity(extract_gold(gold)).number
        if target is None:
            return Judgement(VerdictKind.ERROR, answer)
        if number is None:
            return Judgement(VerdictKind.UNPARSEABLE, answer)
        gold_value = target.value / 100 if target.percent and not number.percent else target.value
        value = number.value / 100 if number.percent and not target.percent else number.value
        return Judgement(_kind(close(gold_value, value, config.tolerance)), answer)

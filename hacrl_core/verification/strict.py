r"""The ``strict`` verifier in this process: which answer counts, and what text and exact numbers decide about it."""

import re

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.place import module
from hacrl_core.verification.assertion import gives_answer
from hacrl_core.verification.extraction import extract_answer, extract_gold
from hacrl_core.verification.gates import gate
from hacrl_core.verification.normalise import clean, list_words
from hacrl_core.verification.reading import decide
from hacrl_core.verification.spelling import plain_spelling
from hacrl_core.verification.verdict import Judgement, VerdictKind

# As symbolic.STRICT_MARK, which this process must not import: it would load sympy.
_MARK = "\x1e"
_WORDS = re.compile(r"(?<![\\{A-Za-z_])[A-Za-z]{3,}(?:'[a-z]+)?")
_SHORT_WORDS = "the not and for are was all any can has yes one two six ten out but nor may its odd non none"
_MATH_WORDS = "sqrt sin cos tan cot sec csc log exp inf infinity frac cdot times circ"
_GOES_ON = re.compile(r"\.\.\.|…")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")


class StrictVerifier:
    """Accept an answer only when it is proved equal to the gold; see docs/verification.md for the policies."""

    name = "strict"
    task: str | None = f"{module('hacrl_core.verification.symbolic')}:compare_strict"

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        """Decide by text and exact numbers, or ask for a worker."""
        found = extract_answer(response, config.places)
        if not found.answer or not gives_answer(found, response):
            return Judgement(VerdictKind.UNPARSEABLE, "")
        target, answer = extract_gold(gold), found.joined
        if _GOES_ON.search(answer) and not _GOES_ON.search(target):
            # Digits or members follow that are not written down.
            return Judgement(VerdictKind.UNPARSEABLE, answer)
        if len(answer) > config.max_answer_chars:
            # The comparisons below are for answers of an answer's size; beyond it only the very same text is right.
            same = "".join(answer.split()) == "".join(target.split())
            return Judgement(VerdictKind.CORRECT if same else VerdictKind.UNPARSEABLE, answer)
        read, known = plain_spelling(answer), plain_spelling(target)
        decision = decide(known, read, config.tolerance)
        if decision is not None:
            return Judgement(VerdictKind.CORRECT if decision else VerdictKind.INCORRECT, answer)
        if gate(read, config.max_answer_chars):
            return Judgement(VerdictKind.UNPARSEABLE, answer)
        if gate(known, config.max_answer_chars) or is_prose(known) or is_prose(read):
            # Such a text has no mathematical reading: only the same text is right.
            return Judgement(VerdictKind.INCORRECT, answer)
        return Judgement(None, answer)

    def payload(self, gold: str, answer: str) -> tuple[str, str]:
        """Return the pair of texts to send to a worker."""
        known, read = plain_spelling(extract_gold(gold)), plain_spelling(answer)
        return _MARK + list_words(_kept(known)), list_words(_kept(read))


def _kept(text: str) -> str:
    """Clean LaTeX, but keep the sign of a currency, which decides about units."""
    sign = "\\$" if re.match(r"^\s*-?\s*(?:\\?\$)\s*\d[\d.,]*\s*$", text) else ""
    return sign + clean(text)


def is_prose(text: str) -> bool:
    """Return whether words of a sentence stand outside of units: then a formula is not all that the text says."""
    words = _WORDS.findall(_TEXT.sub(" ", clean(text)))
    return any(
        word.casefold() not in _MATH_WORDS.split() and (len(word) > 4 or word.casefold() in _SHORT_WORDS.split())
        for word in words
    )

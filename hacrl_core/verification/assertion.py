r"""Decide whether a response *gives* the answer that was found in it, or only mentions it: for the ``strict`` verifier.

A box counts unless the text right around it makes something else of it, as `surroundings` says.

A sentence can mention a number in more ways than a list of denials can name. A phrase ("the answer is …") therefore
counts only in a sentence of a known form: known words lead to it, the answer follows at once, and nothing behind it
takes it back. The last number of a response has no form, so denials are looked for there; training does not reward it.

Everything here is linear in the length of the text.
"""

import re

from hacrl_core.verification.extraction import HASHES, PHRASE, Extraction, after_thinking, find_boxes
from hacrl_core.verification.surroundings import one_tag, stands

# A sentence is looked at so far around its answer.
_NEAR = 300
_SENTENCE = re.compile(r"[.;!?](?=\s|$)|\n")
_LEADING = (
    "so then thus hence therefore finally and the my our this that's its final correct required value total overall "
    "result we have find get see conclude consequently accordingly in conclusion answer to question problem is"
)
_LEAD = re.compile(rf"[\W_]*(?:(?:{'|'.join(_LEADING.split())})[\W_]+)*", re.IGNORECASE)
# What may stand between a phrase and its answer: emphasis, quotes, the beginning of a formula, a sign, a name.
_OPENING = re.compile(
    r"[\s*_`\"'“‘:({\[\\$€£]*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{\s*)?(?:[A-Za-z]\s*=\s*)?[\s$\\({\[]*"
)
_NAMED = re.compile(r"[\s*_]*The\s[^.;!?\n]*\s(?:is|equals|=)[\s*_$\\({\[]*", re.IGNORECASE)
_DOUBT = re.compile(
    r"\b(?:not|never|no|nope|cannot|neither|nor|none|nobody|wrong|incorrect|false|untrue|mistaken?|error|except|unless|"
    r"unlikely|doubt\w*|reject\w*|den(?:y|ies|ied)|refut\w*|rul(?:e|es|ed|ing)\s+out|instead|rather|otherwise|wait|"
    r"sorry|actually|correction|maybe|perhaps|possibly|probably|either|or|if|whether|were|would|could|might|may|but|"
    r"different|differs?|other|than|least|most|approximately|about|roughly|around|nearly|almost|guess\w*|suppose\w*|"
    r"assum\w*|pretend\w*|impossible|fake|lie|joke|contrary|opposite|unsure|uncertain|unclear|unknown)\b|n['’]t\b|[?¬≠~]",
    re.IGNORECASE,
)
# Words right behind a number that make another one of it.
_CHANGED = re.compile(
    r"[^\w\n]*(?:[A-Za-z]+\W+)?(?:squared|cubed|divided|times|plus|minus|multiplied|added|subtracted|more|less|fewer|dozens?|hundreds?|"
    r"thousands?|millions?|billions?|trillions?|hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|tenths?|hundredths?|"
    r"thousandths?|factorial|choose|modulo|mod|to\s+the\s+power|and\s+a)\b|\s*[×÷^!/+]",
    re.IGNORECASE,
)
# Behind the sentence of an answer a response may go on, but not take it back.
_RETRACTED = re.compile(
    r"\b(?:not|no|nope|wrong|incorrect|false|mistaken?|wait|sorry|actually|correction|instead|rather|however|but|doubt\w*|"
    r"unless|joke|reject\w*)\b|n['’]t\b|\?",
    re.IGNORECASE,
)
_CLOSING = re.compile(r"I hope (?:it|this|that) is correct", re.IGNORECASE)
# Denied: no other number stands between the word and the answer. "not 41 but 42" denies 41.
_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|neither|nor|except|than|unlikely|anything but|doubt\w*|different from|nobody|no one|"
    r"none|reject\w*|rul\w+ out|false|wrong|incorrect|impossible|exclud\w*)\b|n['’]t\b)[^\d\n]*$"
    r"|\bif\b[^\n]*\b(?:were|was|had|would)\b[^\d\n]*$"
    r"|\b(?:at\s+(?:least|most)|approximately|about|roughly|around|nearly|almost|over|under|above|below)\W*$",
    re.IGNORECASE,
)
_HEDGED = re.compile(
    r"\b(?:either|neither|between|maybe|perhaps|possibly)\b[^.;\n]*$|\b(?:could|might|may)\s+(?:also\s+)?be\W*$"
    r"|\d\W*\s(?:or|nor)\W+$",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    r"^[^\d\n]*?\b(?:is|was|looks|seems)\s*(?:not\b|n['’]t\b|wrong\b|incorrect\b|false\b)|^\W*or\s|^[^\w\n]*\?"
    r"|^\W*(?:no|nope)\b",
    re.IGNORECASE,
)


def gives_answer(found: Extraction, response: str) -> bool:
    """Return whether the response gives the answer that was found in it."""
    text = after_thinking(response)
    if found.boxed:
        return stands(text, [box for box in find_boxes(text) if box[2]])
    if not one_tag(text):
        return False
    if found.place == "phrase":
        return _given_by_phrase(found.answer, text)
    if found.place == "whole":
        return not _DOUBT.search(text)
    return found.place != "last" or not _denied_by_its_sentence(found.answer, text)


def _given_by_phrase(answer: str, text: str) -> bool:
    """Return whether a sentence of a known form gives the answer, and nothing behind it takes it back."""
    if hashes := list(HASHES.finditer(text)):
        return not _retracted(text[hashes[-1].end() :])
    for phrase in reversed(list(PHRASE.finditer(text[-4000:]))):
        shift = max(0, len(text) - 4000)
        begin, end = phrase.start() + shift, phrase.end() + shift
        place = text.find(_first_part(answer), end)
        if place < 0:
            continue
        start = max((match.end() for match in _SENTENCE.finditer(text, max(0, begin - _NEAR), begin)), default=0)
        before = text[max(start, begin - _NEAR) : begin]
        ended = _SENTENCE.search(text, place + len(answer))
        stop = ended.start() if ended else len(text)
        rest = text[place : min(stop, place + len(answer) + _NEAR)]
        asked = ended is not None and ended.group() == "?"
        return (
            bool(_LEAD.fullmatch(re.split(r"[,:]", before)[-1]))
            and not _DOUBT.search(_before_clause(before))
            and _leads_on(text[end:place])
            and not asked
            and not _DOUBT.search(rest)
            and not _CHANGED.match(text, place + len(answer))
            and not _retracted(text[stop:])
        )
    return False


def _leads_on(between: str) -> bool:
    """Return whether an answer follows its phrase at once, or ends a sentence that says what it is: "The sum is 42"."""
    if _OPENING.fullmatch(between):
        return True
    named = _NAMED.fullmatch(between[:_NEAR])
    return named is not None and not _DOUBT.search(between)


def _before_clause(before: str) -> str:
    """Return the words of a sentence before its last clause; "Not 41, so" denies another answer and is no doubt."""
    clauses = re.split(r"[,:]", before)[:-1]
    return " ".join(clause for clause in clauses if not re.search(r"\d", clause))


def _first_part(answer: str) -> str:
    """Return what a search for the answer in the response begins with: parts of a list are joined by commas."""
    return answer.split(",")[0].strip(" \\%")


def _retracted(text: str) -> bool:
    return bool(_RETRACTED.search(_CLOSING.sub("", text)))


def _denied_by_its_sentence(answer: str, text: str) -> bool:
    """Return whether the sentence around the last number denies it, hedges, or names another."""
    last = answer.split(",")[-1].strip(" \\%")
    place = text.rfind(last)
    if place < 0:
        return False
    begin = max((match.end() for match in _SENTENCE.finditer(text, 0, place)), default=0)
    ended = _SENTENCE.search(text, place + len(last))
    end = place + len(last)
    before = text[max(begin, place - _NEAR) : place]
    after = text[end : min(ended.end() if ended else len(text), end + _NEAR)]
    rest = text[ended.end() :] if ended else ""
    return bool(
        _DENIED.search(before) or _HEDGED.search(before) or _TAKEN_BACK.search(after) or _TAKEN_BACK.search(rest)
    )

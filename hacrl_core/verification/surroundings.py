r"""Decide whether the text around a box leaves it standing as the answer: for the ``strict`` verifier.

A box is no answer when it is hidden (a comment, crossed out), when the formula around it makes another value or a
denial of it, when the words right beside it deny it, or when another candidate stands right beside it.
docs/verification.md has the policy.

Everything here is linear in the length of the text: only the text near the last box is looked at, except for comments.
"""

import re

from hacrl_core.verification.extraction import connected, find_boxes, has_prose
from hacrl_core.verification.maths import quantity
from hacrl_core.verification.reading import decide
from hacrl_core.verification.spelling import plain_spelling

# So many characters beside a box are looked at, so many between two boxes, and so many tags.
NEAR = 300
_BETWEEN = 60
_MAX_TAGS = 64
_BOX_COMMAND = re.compile(r"\\+(?:boxed|fbox)[ \t]*\{?$")
_SPACE = r"(?:\s|\\[,;:! ]|\\q?quad(?![A-Za-z])|\\(?:left|right|displaystyle|textstyle)(?![A-Za-z])|\{\})"

# -- hidden ------------------------------------------------------------------------------------------------------------

_HIDING = (("<!--", "-->"), ("\\begin{comment}", "\\end{comment}"), ("\\iffalse", "\\fi"), ("<del>", "</del>"))
# A percent sign is a comment where no number or word can belong to it: "20 % of them" is none.
_COMMENT = re.compile(r"(?:(?:^|\n)[ \t]*|[.;!?,][ \t]*)%[^\n]*$")
_STRUCK = re.compile(r"~~[^~\n]{0,60}$")

# -- the formula -------------------------------------------------------------------------------------------------------

_TAIL_SPACE = re.compile(_SPACE + r"+$")
_HEAD_SPACE = re.compile(_SPACE + r"+")
# A group that changes nothing but the looks of a box. Any other group around a box is no answer: \sqrt{\boxed{2}}.
_LOOKS = re.compile(
    r"(?:\\(?:text\w*|math(?:bf|rm|it|sf|tt|normal|bin|rel|ord)|boldsymbol|bm|emph|underline|underbrace|colorbox|color|framebox|tag|"
    r"Rightarrow|rightarrow|implies|Longrightarrow|longrightarrow|large|Large|LARGE|huge|Huge)\s*(?:\{[^{}]*\}\s*)*"
    r"|(?:^|[\s=$&>:(\[]))\{$"
)
# Commands that may stand right before a box; behind any other one it is a part of a formula.
_LEADING = (
    "equiv in approx Rightarrow rightarrow implies Longrightarrow longrightarrow Leftrightarrow Longleftrightarrow iff "
    "to le leq leqslant ge geq geqslant sim simeq cong mapsto colon coloneqq triangleq doteq therefore hline item "
    "bullet checkmark star blacksquare square large Large LARGE huge Huge bf bfseries noindent centering newline par "
    "ldots dots hfill nonumber small normalsize newpage bigskip medskip smallskip"
)
_BEFORE = frozenset(_LEADING.split())
_LAST_COMMAND = re.compile(r"\\([A-Za-z]+)\*?$")
_LAST_GROUP = re.compile(
    r"\\(?:text\w*|mathrm|mathbf|mbox|stackrel|overset|color|renewcommand|hspace|vspace|tag|label|begin|end|arraystretch)"
    r"\*?\s*(?:\[[^\[\]]*\])?\s*(?:\{[^{}]*\}\s*)*\{[^{}]*\}$"
)
_DENYING = re.compile(
    r"(?:\\(?:ne|neq|not\s*(?:=|\\[a-z]+)|nsim|ncong|notin|nleq|ngeq|lt|gt|ll|gg|lnot|neg|propto|not)(?![A-Za-z])|[≠≢∉≪≫∝¬]"
    r"|(?<!\S)!=|=/=|(?<![-=<>\n])(?<!^)[<>])$"
)
_OPERATOR = re.compile(
    r"(?:\\(?:cdot|times|div|pm|mp|ast|bmod|mod|circ|wedge|vee|cup|cap|setminus)(?![A-Za-z])"
    r"|(?<![=&])(?<![=&]\s)\+|[×÷±·/^]|[^\s*][ \t]*\*)$"
)
# "- " may begin a line or a remark; behind a relation, in a formula or glued to the box it is a sign.
_SIGN = re.compile(
    r"(?:^|[^\w)}\]\s-]|(?<![A-Za-z\\])[A-Za-z]|[\d)}\]])[-−–]$|(?<!\S)[-−–]$"
    rf"|\$[-−–](?:{_SPACE}|~)*$|(?:[=(\[&+*^]|\\approx|\b(?:is|be|equals)\b|[=$]\s*(?:[\d.]+|[A-Za-z])){_SPACE}*[-−–](?:{_SPACE}|~)*$"
)
_FACTOR = re.compile(
    r"\d,?$|[$=+*^]\s*(?:[\d.]+|[A-Za-z]|[A-Za-z]\(|[\d.]+\s*:)\s*$|(?<![A-Za-z\\'’])[A-Za-z]$|\\[a-z]+_\{?\w+\}?\s*$|\([^()]*[-+][^()]*\)$"
)
_OPENED = re.compile(
    r"[\w)}\]]\($|\\\{$|[=$,]\s*[(\[]$|[(\[]\s*[-\d.]+\s*,$|[=$+*(-]\s*\|$|[-−–+*/^]\s*(?:\\left\s*)?\($"
)
_INSIDE = re.compile(
    r"\\(?:sqrt|[dtc]?frac)\s*(?:\[[^\]{}$]*\])?\{[^{}$\n]*$|\\[dtc]?frac\s*\{[^{}$\n]*\}\s*\{[^{}$\n]*$"
)
_ENDS_IN_TAG = re.compile(r"</?[A-Za-z][^<>\n]{0,60}>$|\|>$|-->$")
_DELIMITERS = re.compile(r"(?:\$|\\[\[\]()]|\s)+$")

_CLOSERS = re.compile(r"(?:[)\]}|]|\\right\s*[)\]|.]|" + _SPACE + r")*")
_GOES_ON = re.compile(
    r"\.?\d|[-−+*/×÷]\s*(?:\d|\\(?!\\|text|mathrm|mbox)|[A-Za-z](?=[$^_)}\]]))|[+×÷^](?!\s*\{?\s*(?:\\circ|\\prime|\\text|\\mathrm|\*|°|[a-z]{2}))"
    r"|:\d|\([^()$]{0,60}[-+][^()$]{0,60}\)"
    r"|\\(?:times|cdot|div|pm|mp|sqrt|d?frac|bmod|ast|binom|ldots|dots|cdots)(?![A-Za-z])|!\s*(?:\$|\\\))|\{\}\s*[-+*/^]"
)
_DENIES = re.compile(
    r"\\(?:ne|neq|not|notin|lt|gt|ll|gg|le|leq|ge|geq|propto|mid|nmid)(?![A-Za-z])|[≠<>≪≫≤≥]|!="
    r"|\\(?:to|rightarrow|Rightarrow|implies)\s*-?\d"
)
_MARKUP = re.compile(r"</?[A-Za-z][^<>\n]{0,60}>|<\||<!--|>\s*(?:\n|$)")
_EQUALS = re.compile(r"&?\s*(=+|\\approx(?![A-Za-z])|≈)\s*([^$\n&]*)")
_FORMULA_EDGE = re.compile(r"\$|\n|\\[\[\]()]")
_RELATION = re.compile(r"[=<>≠≤≥≈]|\\(?:ne|neq|not|lt|gt|le|leq|ge|geq|approx|equiv|in|notin)(?![A-Za-z])")
_FORMULA_END = re.compile(r"\\[\])]|\\\\|\\end\b|\\(?:text|mbox|mathrm|q?quad)\b|[.,;](?!\d)|=")
_VARIABLE = re.compile(
    r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|\\(?:alpha|beta|gamma|theta|lambda|triangle|angle|sum|int)"
)

# -- the words ---------------------------------------------------------------------------------------------------------

_MARKS = r"[\s*_\"'“”‘’:$({}\[\\,—–-]*"
_FILLERS = (
    rf"(?:{_MARKS}(?:be|been|equals?|to|simply|just|exactly|even|really|actually|definitely|clearly|necessarily|the|answer|"
    rf"text|\(|\[)\b)*{_MARKS}(?:[A-Za-z]\s*=\s*)?{_MARKS}$"
)
_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|neither|nor|hardly|rather\s+than|instead\s+of|"
    r"(?:anything|everything|nothing|all|any\s+number)\s+but|different\s+from|distinct\s+from|far\s+from|no\s+longer|"
    r"unequal\s+to|(?:more|less|fewer|greater|larger|smaller|bigger)\s+than|almost|nearly|twice|minus|negative(?:\s+of)?|"
    r"(?:squares?|half|double|triple|third|quarter)(?:\s+root)?\s+of)\b|\b(?:wrong|incorrect|false)\s*:|n['’]t\b|(?<!\bno)(?<!\bnothing)(?<!\bnone)(?<!\bno\s\w{6})\s+other\s+than\b)"
    + _FILLERS,
    re.IGNORECASE,
)
# No comma or figure stands between such a word and the box: "not true, so the answer is …" denies something else.
_DISBELIEVED = re.compile(
    r"(?:(?:\bnot|n['’]t)\s+(?:think|believe|claim|say|mean|agree|true|correct|right|the\s+case)\b"
    r"|\b(?:false|untrue|wrong|incorrect|mistaken)\s+(?:that|to\s+(?:say|answer|write|claim|conclude|think))\b"
    r"|(?:\bnot|n['’]t|\bnobody\s+would|\bno\s+one\s+would)\s+(?:write|answer|use|take|choose|pick|put|enter)\b"
    r"|\bdoubt\w*\b|\bden(?:y|ied|ies)\b)[^.,;:!?\d]*$",
    re.IGNORECASE,
)
_WRONG_ONE = re.compile(
    r"^\W*(?:(?:so|thus|but|hence|now|here)\W+)?(?:(?:a|an|the|one|my)\s+)?(?:common\s+|usual\s+|typical\s+|popular\s+|first\s+)?"
    r"(?:(?:wrong|incorrect|false|mistaken)\s+(?:answer|value|result|solution|conclusion|guess)|mistake|error|trap|pitfall)\b"
    r"[^.,;!?\d]*$",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[.;!?](?=[\s\"'”)*]|$)|\n\s*\n")
_END_MARKS = r"[\s$\\)\]}*_\"'”’.,;:!(—–-]*(?:text\w*\{\s*)?"
_FALSE = (
    r"(?:not\s+(?:\w+\s+)?(?:correct|right|true|answer|valid|it)\b|wrong\b(?!\s+to)|incorrect\b|false\b|mistaken?\b"
    r"|a\s+mistake\b|a\s+wrong\b|an\s+incorrect\b|never\s+the\b)"
)
_TAKEN_BACK = re.compile(
    rf"{_END_MARKS}(?:(?:no|nope|wait|hmm|oops|actually|sorry|but)\W+)*"
    rf"(?:(?:that|this|it|which|answer)\s+)?(?:is|was|would\s+be|seems|looks)\s+{_FALSE}"
    rf"|{_END_MARKS}(?:(?:that|this|it|which)\s+)?(?:(?:is|was|would|does)n['’]t|cannot|can['’]t|can\s+not)\s+(?:be\s+)?(?:\w+\s+)?(?:correct|right|true|answer|valid|it)\b"
    rf"|{_END_MARKS}(?:(?:does|do|did)(?:n['’]t|\s+not)\s+(?:work|satisfy|hold|fit)\b|fails\b|(?:is|must\s+be|should\s+be|is\s+to\s+be)"
    r"\s+(?:rejected|discarded|excluded|ruled\s+out|impossible|extraneous|invalid)\b)"
    rf"|{_END_MARKS}(?:squared|cubed|plus|minus|divided\s+by|multiplied\s+by)\b"
    rf"|{_END_MARKS}(?:wrong|incorrect|false)\s*[).\]!]"
    rf"|[^.!?\n]{{0,120}}\bbut\s+(?:it|this|that)\s+is\s+{_FALSE}"
    r"|[\s$\\)\]}*_\"'”’]*\?",
    re.IGNORECASE,
)

# -- other candidates --------------------------------------------------------------------------------------------------

_HEDGE = r"(?:or|possibly|perhaps|maybe|alternatively|and/or|otherwise|if\s+not)"
_NUMERAL = r"(-?\d(?:[\d.,]*\d)?)"
# A comma before "or" begins another way to write the same: "7^3, or 343".
_OR_BEFORE = re.compile(
    rf"(?:^|\s|(?<=\s)\$){_NUMERAL}[\s$*_]*\b{_HEDGE}\b(?:\W+{_HEDGE}\b)*[\s$\\(\[*_:,]*$", re.IGNORECASE
)
_OR_AFTER = re.compile(
    rf"[\s$\\)\]}}*_,;(/.]*\b{_HEDGE}\b(?:\W+{_HEDGE}\b)*[\s$\\(\[*_:,]*{_NUMERAL}"
    rf"|\s*,\s*{_NUMERAL}\s*(?:\$|\\\)|\\\])",
    re.IGNORECASE,
)
_ONLY_HEDGES = re.compile(rf"(?:[^A-Za-z\\]|\\[^A-Za-z]|\b{_HEDGE}\b|\b(?:and|either|also)\b)*", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.{0,600}?)</answer>", re.DOTALL | re.IGNORECASE)


def stands(text: str, boxes: list[tuple[int, int, bool]]) -> bool:
    """Return whether the last of the complete boxes of a text, or a list of boxes at its end, is its answer."""
    start, end, _ = boxes[-1]
    inner = text[start:end]
    stop = end + text.startswith("\\", end) + (text[start - 1] == "{")
    earlier = boxes[:-1]
    while earlier and connected(text[earlier[-1][1] + 1 : _command(text, start)]):
        start = earlier.pop()[0]
    begin = _command(text, start)
    before, after = text[max(0, begin - NEAR) : begin], text[stop : stop + NEAR]
    return not (
        _hidden(text, begin, before)
        or _changed(before, inner, after)
        or _denied(before, after)
        or _one_of_several(inner, before, after)
        or (earlier and _only_hedged(text, earlier[-1], begin, inner))
        or not one_tag(text, inner)
    )


def one_tag(text: str, answer: str = "") -> bool:
    """Return whether all ``<answer>`` tags of a text give one value, which is ``answer`` where that is given."""
    values = [answer] if answer else []
    for tag in _TAG.findall(text)[:_MAX_TAGS]:
        boxes = [box for box in find_boxes(tag) if box[2]]
        value = tag[boxes[-1][0] : boxes[-1][1]] if boxes else tag.strip(" \n$")
        if boxes or not has_prose(value):
            values.append(value)
    return all(_same(values[0], value) for value in dict.fromkeys(values[1:]))


def _command(text: str, start: int) -> int:
    """Return where the command of a box begins."""
    found = _BOX_COMMAND.search(text, max(0, start - NEAR), start)
    return found.start() if found else start


def _same(one: str, other: str) -> bool:
    return one == other or decide(plain_spelling(one), plain_spelling(other), 1e-6) is True


def _hidden(text: str, begin: int, before: str) -> bool:
    for opening, closing in _HIDING:
        place = text.rfind(opening, 0, begin)
        if place >= 0 and text.find(closing, place, begin) < 0:
            return True
    return bool(_COMMENT.search(before) or _STRUCK.search(before))


def _changed(before: str, inner: str, after: str) -> bool:
    """Return whether the formula around a box makes another value of it, or says that it is not the value."""
    near = _without_looks(before)
    rest = after[_CLOSERS.match(after).end() :]  # type: ignore[union-attr]
    is_part = bool(_INSIDE.search(before)) or (near is not None and _is_operand(near))
    if not is_part and (near is None or _denied_by_formula(near)):
        return True
    if near is not None and _SIGN.search(near):
        return True
    if _MARKUP.match(rest):
        return is_part
    if is_part or _GOES_ON.match(rest):
        return not _is_blank(before, rest)
    return bool(_DENIES.match(rest)) or _equals_another(inner, rest)


def _without_looks(before: str) -> str | None:
    """Return the text before a box without groups that only change its looks; None where another group holds it."""
    while True:
        bare = _bare(before)
        if bare.endswith("~~"):
            return None
        if not bare.endswith("{") or bare.endswith("\\{"):
            return before
        looks = _LOOKS.search(bare)
        if looks is None:
            return None
        before = bare[: looks.start()] if looks.group().startswith("\\") else bare[:-1]


def _bare(before: str) -> str:
    return before if before.endswith("~~") else _TAIL_SPACE.sub("", before).rstrip("~")


def _is_operand(near: str) -> bool:
    """Return whether an operation, a factor or a bracket stands right before a box."""
    bare = _bare(near)
    command = _LAST_COMMAND.search(bare)
    return bool(
        _OPERATOR.search(bare)
        or _FACTOR.search(near)
        or _OPENED.search(bare)
        or (command and command[1] not in _BEFORE and not _DENYING.search(bare))
        or (bare.endswith("}") and not _LAST_GROUP.search(bare))
    )


def _denied_by_formula(near: str) -> bool:
    bare = _bare(near)
    return not _ENDS_IN_TAG.search(bare) and bool(_DENYING.search(bare) or _DENYING.search(_DELIMITERS.sub("", bare)))


def _is_blank(before: str, rest: str) -> bool:
    r"""Return whether a box is a blank that was filled in, on the left of an equation: ``3 + \boxed{4} = 7``."""
    left = _FORMULA_EDGE.split(before)[-1]
    right = _FORMULA_EDGE.split(rest, maxsplit=1)[0]
    return "=" in right and not _RELATION.search(left) and not _RELATION.search(right.replace("=", "", 1))


def _equals_another(inner: str, rest: str) -> bool:
    """Return whether a box is set equal to another value; an equation for a variable may follow: ``\\boxed{5} = x``."""
    equals = _EQUALS.match(rest)
    if equals is None:
        return False
    other = _FORMULA_END.split(equals[2], maxsplit=1)[0].strip()
    if equals[1][0] != "=":
        return not _rounds(inner, other)
    if not other or _same(inner, other):
        return False
    return quantity(other).number is not None or not _VARIABLE.search(other)


def _rounds(inner: str, other: str) -> bool:
    """Return whether a number is a box's value, rounded or cut off; what is no number may be about anything."""
    value, rounded = quantity(inner).number, quantity(other).number
    if value is None or rounded is None:
        return rounded is not None or not other
    places = len(other.partition(".")[2].rstrip("\\% "))
    return bool(abs(value.value - rounded.value) * 10**places < 1)


def _denied(before: str, after: str) -> bool:
    ends = [match.end() for match in _SENTENCE.finditer(before) if before[match.end() :].strip(" \n$\\[(*")]
    sentence = before[ends[-1] :] if ends else before
    return bool(
        _DENIED.search(before)
        or _DISBELIEVED.search(sentence)
        or _WRONG_ONE.search(sentence)
        or _TAKEN_BACK.match(after)
    )


def _one_of_several(inner: str, before: str, after: str) -> bool:
    """Return whether "or" and another number stand right beside a box."""
    beside = _OR_BEFORE.search(before), _OR_AFTER.match(after)
    others = [next(group for group in found.groups() if group) for found in beside if found]
    return any(not _same(inner, other) for other in others)


def _only_hedged(text: str, earlier: tuple[int, int, bool], begin: int, inner: str) -> bool:
    """Return whether nothing between two boxes says that the second corrects the first: ``\\boxed{1}. \\boxed{2}``."""
    between = text[earlier[1] + 1 : begin]
    hedged = len(between) <= _BETWEEN and _ONLY_HEDGES.fullmatch(between)
    return bool(hedged) and not _same(text[earlier[0] : earlier[1]], inner)

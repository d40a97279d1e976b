r"""Pairs of gold and answer whose truth is known by construction: wrong by a small step, or the same in another form.

Nothing here asks a verifier. A wrong pair changes the value by a step that cannot vanish (one more, a sign, a factor, a
bracket), and a gold for which that is not sure gets no such pair. A pair of equal answers is a respelling, or a
rewriting by sympy. Everything follows from the seed.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

OWN_GOLDS = (
    "42", "7", "-13", "1234", "250000", "0.75", "12.5", r"\frac{3}{4}", r"-\frac{7}{2}", r"\frac{22}{7}", r"2\sqrt{3}",
    r"\frac{\sqrt{2}}{2}", "x^2+2x+1", r"\frac{x+1}{y-2}", "3n-4", r"(2,5)", r"[0,7)", r"(-\infty,3]", r"\{1,4,9\}",
    "1,4,9", r"\left(3,\frac{1}{2}\right)", r"15\text{ cm}", r"8\text{ m}^2", r"\$32", r"15\%", "2516_8", "1101_2",
    "y=2x+3", "x=5", r"2^{100}-1", r"\binom{10}{3}", r"5\pi", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "1+2i",
    r"120^\circ", r"\text{even}", r"(-2,3) \cup (5,8]",
)  # fmt: skip
_INTEGER = re.compile(r"-?\d{1,15}")
_DECIMAL = re.compile(r"-?\d{1,9}\.\d{1,5}")
_FRACTION = re.compile(r"(-?)\\d?frac\{(\d{1,9})\}\{(\d{1,9})\}")
_GROUP = re.compile(r"(\\left)?(\(|\[|\\\{)(.+?)(?:\\right)?(\)|\]|\\\})", re.DOTALL)
_UNIT = re.compile(r"(-?[\d.]+)\s*\\(?:text|mbox|mathrm)\{\s*([a-z ]+)\s*\}\s*(\^\{?\d\}?)?")
_BASED = re.compile(r"(\d+)_\{?(\d+)\}?")
_NOT_FORMULA = re.compile(r"[,;=<>:%$&]|\\(?:text|mbox|mathrm|begin|le|ge|lt|gt|in|cup|pm|ne|approx|infty|circ)|_|\\\{")
_NAMED = re.compile(r"([xyzabnk])\s*=\s*([^=<>,]+)")
_OTHER_UNITS = ("cm", "kg", "hours", "miles")
_HUGE = (12, 15, 20, 30)


@dataclass(frozen=True, slots=True)
class Pair:
    """A gold, a response to it, what was done, and whether the response is right."""

    kind: str
    gold: str
    response: str
    right: bool


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold, and whether its problem speaks of percentages: there ``5\\%`` may be right for 5."""

    text: str
    percent: bool = False


def boxed(answer: str) -> str:
    """Return a response that ends in the answer."""
    return f"So the answer is $\\boxed{{{answer}}}$."


def wrong_pairs(golds: Sequence[Gold], seed: int) -> Iterator[Pair]:
    """Yield wrong answers to each gold, each by one small step."""
    rng = random.Random(seed)
    for gold in golds:
        text = gold.text.strip()
        if not text or len(text) > 200:
            continue
        for kind, answer in _steps(gold, text, rng):
            yield Pair(kind, gold.text, answer if "answer is" in answer else boxed(answer), False)
        for kind, made, answer in _made_up(text):
            yield Pair(kind, made, boxed(answer), False)


def _steps(gold: Gold, text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    if _INTEGER.fullmatch(text):
        yield from _integer_steps(int(text), gold.percent, rng)
    elif _DECIMAL.fullmatch(text):
        yield from _decimal_steps(text, gold.percent)
    elif match := _FRACTION.fullmatch(text):
        yield from _fraction_steps(match[1], int(match[2]), int(match[3]), gold.percent)
    elif match := _BASED.fullmatch(text):
        yield "base", f"{match[1]}_{{{int(match[2]) + 1}}}"
        if int(match[2]) != 10:
            yield "base", match[1]
    elif match := _UNIT.fullmatch(text):
        yield from _unit_steps(match[1], match[2], match[3] or "")
    elif text.startswith(("\\$", "$")) and _INTEGER.fullmatch(text.lstrip("\\$")) and not text.endswith("$"):
        figure = text.lstrip("\\$")
        yield "percent", f"{figure}\\%"
        yield "plus one", f"\\${int(figure) + 1}"
    elif match := _GROUP.fullmatch(text):
        yield from _group_steps(match[2], _items(match[3]), match[4], rng)
    elif (items := _items(text)) and len(items) > 1 and all(re.fullmatch(r"-?\d{1,2}", item) for item in items):
        yield from _list_steps(items, rng)
    elif match := _NAMED.fullmatch(text):
        yield "chain", f"{'w' if match[1] != 'w' else 'v'} = {match[2]}"
        yield "plus one", f"{match[1]} = {match[2]} + 1"
    elif _is_formula(text):
        yield from _formula_steps(text, rng)


def _integer_steps(value: int, percent: bool, rng: random.Random) -> Iterator[tuple[str, str]]:
    yield "plus one", str(value + 1)
    yield "plus one", str(value - 1)
    yield "chain", f"{value + 1}={value}"
    yield "chain", f"{value - 3}={value + 2}={value}"
    yield "letter", f"{value} {rng.choice('ixnyk')}" if value else "x"
    yield "letter", f"{value + 1}{rng.choice('xyab')}"
    yield "words", f"{value} \\text{{ is wrong}}"
    yield "tiny", f"{value}+10^{{-12}}"
    yield "tiny", f"{value}-2^{{-40}}"
    yield "hedge", f"{value} \\text{{ or }} {value + 1}"
    yield "hedge", f"\\{{{value - 1}, {value}\\}}"
    yield "hedge", f"{value + 1}, {value}"
    yield "negation", f"\\text{{not }} {value}"
    yield "negation", f"\\neq {value}"
    yield "negation", f"I am sure that the answer is not {value}."
    if value:
        yield "sign", str(-value)
        if not percent:
            yield "percent", f"{value}\\%"
    if value not in (0, 1):
        base = f"({value})" if value < 0 else str(value)
        yield "exponent", f"{base}^2"
        yield "exponent", f"{base}^{{{-1 if value != -1 else 2}}}"
    if abs(value) >= 10:
        digits = str(abs(value))
        number_base = max(int(max(digits)) + 1, 2)
        if number_base < 10:
            yield "base", f"{value}_{number_base}"
    if value >= 1000:
        yield "thousands", f"({value:,})"


def _decimal_steps(text: str, percent: bool) -> Iterator[tuple[str, str]]:
    value, places = Fraction(text), len(text.partition(".")[2])
    step = Fraction(1, 10**places)
    if value and step / abs(value) > Fraction(1, 10**4):
        yield "plus one", _decimal(value + step, places)
    if value:
        yield "sign", _decimal(-value, places)
        yield "exponent", f"{text} \\times 10^{{-1}}"
        yield "letter", f"{text} x"
        if not percent:
            yield "percent", f"{text}\\%"
    yield "words", f"{text} \\text{{ is wrong}}"


def _decimal(value: Fraction, places: int) -> str:
    scaled = abs(int(value * 10**places))
    return f"{'-' if value < 0 else ''}{scaled // 10**places}.{scaled % 10**places:0{places}d}"


def _fraction_steps(sign: str, above: int, below: int, percent: bool) -> Iterator[tuple[str, str]]:
    yield "plus one", f"{sign}\\frac{{{above + 1}}}{{{below}}}"
    if not above:
        return
    form = f"{sign}\\frac{{{above}}}{{{below}}}"
    yield "plus one", f"{sign}\\frac{{{above}}}{{{below + 1}}}"
    yield "sign", f"{'' if sign else '-'}\\frac{{{above}}}{{{below}}}"
    yield "letter", f"{form} x"
    yield "letter", f"{form} n^2"
    yield "tiny", f"{form}+10^{{-12}}"
    yield "chain", f"{sign}\\frac{{{above + 1}}}{{{below}}}={form}"
    yield "hedge", f"{form} \\text{{ or }} {above}"
    if above != below:
        yield "exponent", f"{sign}\\frac{{{below}}}{{{above}}}"
    if not percent:
        yield "percent", f"{form}\\%"


def _unit_steps(figure: str, unit: str, power: str) -> Iterator[tuple[str, str]]:
    unit = unit.strip()
    for other in _OTHER_UNITS:
        if other[0] not in unit[:1] + {"c": "c", "i": "i"}.get(unit[:1], ""):
            yield "unit", f"{figure}\\text{{ {other}}}"
    if "." not in figure:
        yield "plus one", f"{int(figure) + 1}\\text{{ {unit}}}{power}"
    yield "words", f"{figure}\\text{{ {unit}}}{power} \\text{{ is wrong}}"


def _group_steps(left: str, items: list[str], right: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    if len(items) < 2:
        return
    others = {"(": "[", "[": "("}
    if left in others and right in (")", "]") and len(items) == 2 and (left, right) != ("(", ")"):
        flipped = {")": "]", "]": ")"}[right]
        if "infty" not in items[0]:
            yield "interval end", f"{others[left]}{items[0]}, {items[1]}{right}"
        if "infty" not in items[1]:
            yield "interval end", f"{left}{items[0]}, {items[1]}{flipped}"
    if left == "(" and right == ")" and not any("infty" in item for item in items):
        yield "set for tuple", f"\\{{{', '.join(items)}\\}}"
    numbers = [place for place, item in enumerate(items) if _INTEGER.fullmatch(item)]
    if numbers:
        place = rng.choice(numbers)
        changed = [*items[:place], str(int(items[place]) + 1), *items[place + 1 :]]
        if left != "\\{" or changed[place] not in items:
            yield "element", f"{left}{', '.join(changed)}{right}"
        if int(items[place]):
            tiny = [*items[:place], f"{items[place]}.0005", *items[place + 1 :]]
            yield "element", f"{left}{', '.join(tiny)}{right}" if abs(int(items[place])) < 100 else f"{left}0{right}"
    if left == "(" and len(items) == 2 and all(map(_INTEGER.fullmatch, items)) and items[0] != items[1]:
        yield "element", f"({items[1]}, {items[0]})"


def _list_steps(items: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    place = rng.randrange(len(items))
    bigger = str(max(map(int, items)) + 1)
    yield "element", ", ".join([*items[:place], bigger, *items[place + 1 :]])
    yield "element", ", ".join([*items, bigger])
    yield "element", ", ".join(items[:-1]) if len(set(items)) == len(items) else bigger


def _formula_steps(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    yield "plus one", f"{text}+1"
    yield "plus one", f"{text}-1"
    yield "sign", f"-\\left({text}\\right)"
    yield "tiny", f"{text}+10^{{-12}}"
    yield "letter", f"\\left({text}\\right) q"
    yield "chain", f"{text}+1={text}"
    yield "words", f"{text} \\text{{ is wrong}}"
    letters = set(re.findall(r"(?<![\\A-Za-z])[a-z](?![A-Za-z])", text)) - {"e", "i"}
    if letters:
        letter = rng.choice(sorted(letters))
        if letter.upper() not in text:
            yield "case", re.sub(rf"(?<![\\A-Za-z]){letter}(?![A-Za-z])", letter.upper(), text)
    if match := re.search(r"(?<![\\A-Za-z])([a-df-hj-z])\^(?:\{(\d)\}|(\d))", text):
        power = int(match[2] or match[3]) + 1
        yield "exponent", f"{text[: match.start()]}{match[1]}^{{{power}}}{text[match.end() :]}"


def _made_up(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield kind, gold and answer that have a dataset's number in them: large integers, and functions with a bend."""
    if not _INTEGER.fullmatch(text):
        return
    c = abs(int(text))
    if not 2 < c < 1000:
        return
    power = _HUGE[c % len(_HUGE)]
    yield "huge", f"10^{{{power}}}+{c}", f"10^{{{power}}}+{c + 1}"
    yield "huge", f"2^{{{c + 40}}}-1", f"2^{{{c + 40}}}"
    yield "huge", f"{c + 20}!-1", f"{c + 20}!"
    yield "bend", f"|x-{c}|", f"{c}-x"
    yield "bend", f"\\max(x,{c})", str(c)
    yield "bend", f"\\sqrt{{x^2-{2 * c}x+{c * c}}}", f"{c}-x"
    yield "tiny", f"\\{{{c} \\cdot 10^{{-9}}\\}}", f"\\{{{c + 1} \\cdot 10^{{-9}}\\}}"


def _items(text: str) -> list[str]:
    """Split at commas outside of braces and brackets; empty when the brackets do not fit."""
    items, depth = [""], 0
    for char in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(char, 0)
        if depth < 0:
            return []
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return [item.strip() for item in items] if depth == 0 else []


def _is_formula(text: str) -> bool:
    """Return whether the text is one expression with letters, roots or powers, at whose end a term may be added."""
    # A decimal may differ by less than the tolerance.
    if _NOT_FORMULA.search(text) or re.search(r"\d[.eE]", text):
        return False
    if re.search(r"[A-Za-z]{4,}", re.sub(r"\\[A-Za-z]+", "", text)):
        return False
    if re.search(r"\\(?:ldots|dots|sum|prod|int|lim|overline|angle|triangle|log|ln|sin|cos|tan|cot|sec|csc)", text):
        return False
    return bool(re.search(r"[a-z^]", text)) and not re.search(r"[A-Z'|!]", text)


def equal_pairs(golds: Sequence[Gold], seed: int) -> Iterator[Pair]:
    """Yield right answers: the gold itself and its common respellings. `rewritten` adds sympy's rewritings."""
    rng = random.Random(seed)
    for gold in golds:
        text = gold.text.strip()
        if not text or len(text) > 200:
            continue
        for kind, answer in _respellings(text, rng):
            yield Pair(kind, gold.text, boxed(answer), True)


def _respellings(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    yield "same", text
    if "\\frac" in text:
        yield "dfrac", text.replace("\\frac", "\\dfrac")
    if not re.search(r"\\text|\\mbox|\$|\d \d|\\[a-z]+ [a-z]", text):
        yield "spacing", text.replace(" ", "")
        yield "spacing", re.sub(r"(?<=[\w})])([+=])(?=[\w\\({])", r" \1 ", text)
    if _INTEGER.fullmatch(text):
        value = int(text)
        yield "number", f"{value}.0"
        yield "number", f"\\frac{{{3 * value}}}{{3}}"
        yield "name", f"x = {value}"
        if value >= 1000:
            yield "number", f"{value:,}"
            yield "number", f"{value:,}".replace(",", "{,}")
    if match := _FRACTION.fullmatch(text):
        sign, above, below = match[1], int(match[2]), int(match[3])
        yield "number", f"{sign}\\frac{{{2 * above}}}{{{2 * below}}}"
        yield "number", f"{sign}{above}/{below}"
        if above > below and above % below:
            yield "mixed number", f"{sign}{above // below}\\frac{{{above % below}}}{{{below}}}"
        if not 10**4 % below:
            yield "number", _decimal(Fraction(above if not sign else -above, below), 4)
    if (match := _GROUP.fullmatch(text)) and match[2] == "\\{" and len(items := _items(match[3])) > 1:
        rng.shuffle(items)
        yield "order", f"\\{{{', '.join(items)}\\}}"
    if (items := _items(text)) and len(items) > 1 and all(re.fullmatch(r"-?\d{1,2}", item) for item in items):
        yield "order", ", ".join(reversed(items))
    if match := _UNIT.fullmatch(text):
        yield "unit left out", match[1]


def rewritten(golds: Sequence[Gold], seed: int) -> Iterator[Pair]:
    """Yield sympy's rewritings of formulas, which math-verify's reader turns into sympy expressions."""
    import sympy
    from math_verify import parse

    rng = random.Random(seed)
    for gold in golds:
        text = gold.text.strip()
        if len(text) > 80 or not (_is_formula(text) or _FRACTION.fullmatch(text)) or ("^{" in text and "x" not in text):
            continue
        found = parse(f"\\boxed{{{text}}}", parsing_timeout=3)
        if not found or not isinstance(found[0], sympy.Expr) or found[0].has(sympy.Float):
            continue
        expression = found[0].doit()
        names = ["expand", "factor", "together"]
        rng.shuffle(names)
        for name in names[:2]:
            form = sympy.latex(getattr(sympy, name)(expression))
            if form != text and not re.search(r"operatorname|mathrm|begin", form):
                yield Pair(f"sympy {name}", gold.text, boxed(form), True)

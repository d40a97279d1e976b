r"""Wrong answers of further kinds, each wrong by construction: hidden text, look-alikes, prefixes, roundings, names.

Nothing here is shared with `verify_pairs`, and nothing asks a verifier. A gold that has no such answer
gets none; where no gold of a dataset has the form, one is made from its number. Everything follows from the seed.
"""

import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

_INTEGER = re.compile(r"-?\d{1,12}")
_DECIMAL = re.compile(r"-?\d{1,9}\.\d{1,6}")
_FRACTION = re.compile(r"(-?)\\d?frac\{(\d{1,6})\}\{(\d{1,6})\}")
_TUPLE = re.compile(r"(?:\\left)?\(([^()\\]+)(?:\\right)?\)")
_INTERVAL = re.compile(r"(?:\\left)?([(\[])([^,()\[\]]+),([^,()\[\]]+?)(?:\\right)?([)\]])")
_MATRIX = re.compile(r"\\begin\{([pb])matrix\}(.*?)\\end\{[pb]matrix\}", re.DOTALL)
_COMPLEX = re.compile(r"(-?\d+)\s*([+-])\s*(\d*)i")
_BARE_LIST = re.compile(r"(-?\d{1,4}),(\d{1,2})")
_UNIT = re.compile(r"(-?[\d.]+)\s*\\(?:text|mbox|mathrm)\{\s*([a-z]+)\s*\}")
_FORMULA = re.compile(r"[-+*/^(){}A-Za-z0-9 .\\]+")
_HIDING = (
    r"\phantom{%s}", r"\hphantom{%s}", r"\cancel{%s}", r"\xcancel{%s}", r"\sout{%s}", r"\st{%s}", r"\not{%s}",
    r"\not %s", r"\not= %s", r"\neg %s", r"\neg = %s", r"\overline{%s}", r"\dot{%s}", r"\hat{%s}", r"%s^{*}", r"%s'",
    r"%s_{}", r"%s \bot", r"\cancel{0} %s \cancel{1}", r"%s <!-- no -->", r"\sqrt{%s}", "\u00ac%s", "\u2260 %s", "%s?",
)  # fmt: skip
_NAMES = (
    r"\text{not the answer} = %s", r"\text{wrong} = %s", "wrong = %s", "fake = %s", r"\text{twice the answer} = %s",
    r"x_{wrong} = %s", r"\text{half of it} = %s", r"\text{the answer minus one} = %s", r"\lnot x = %s", "nope = %s",
)  # fmt: skip
_PROSE = (
    "%s, which is wrong", "%s (a guess)", r"%s \text{ (approximately)}", r"%s \text{ or so}", "about %s",
    r"\text{at least } %s", r"%s \text{ or more}", r"%s \text{, not } 7", r"\text{less than } %s", "%s, 8 or 9",
    r"%s \text{ is too large}", r"\text{between } 0 \text{ and } %s", "%s maybe", r"%s \text{?}", r"%s+\epsilon",
)  # fmt: skip
_SENTENCES = (
    "I doubt that the answer is %s.", "The answer is %s if the moon is made of cheese.", "The answer is not %s.",
    "Is the answer %s?", "The answer is less than %s.", "They say the answer is %s.", "The answer is %s plus two.",
    "The answer is %s. Wait, that is wrong.", "If the answer is %s, then pigs fly.", "The answer is %s dozen.",
    "The answer is two more than %s.", "Nobody believes the answer is %s.", "The answer is %s or something else.",
    "The answer: clearly never %s.", "The answer is %s? No.", "The answer is the square of %s.",
)  # fmt: skip
_MANY = (
    r"\text{ dozen}", r"\text{ hundred}", r"\text{ thousand}", r"\text{ million}", r"\text{ K}", r"\text{k}", "k",
    r"\text{ halves}", r"\text{ squared}", r"\text{ square}", r"\text{ percent}", r"\text{ ppm}", "‰", r"\permil",
)  # fmt: skip
_PREFIXES = (
    ("m", "ms"), ("m", "mm"), ("m", "Mm"), ("g", "mg"), ("g", "kg"), ("s", "ms"), ("W", "Ws"), ("kW", "MW"),
    ("mW", "MW"), ("N", "Ns"), ("J", "Js"), ("J", "kJ"), ("mL", "ML"), ("mHz", "MHz"), ("mA", "A"), ("V", "mV"),
    ("cm", "km"), ("km", "cm"), ("kg", "g"), ("min", "h"),
)  # fmt: skip
_AROUND_A_BOX = (
    r"$-\boxed{%s}$", r"$x = -\boxed{%s}$", r"$2\boxed{%s}$", r"$\boxed{%s}^2$", r"$\boxed{%s}00$", r"$\boxed{%s}.5$",
    r"$\frac{\boxed{%s}}{2}$", r"$\sqrt{\boxed{%s}}$", r"$\boxed{%s} \times 10^3$", r"$\boxed{%s}/2$",
    r"$\boxed{%s}+1$",
)  # fmt: skip
_HIDDEN_STEPS = (
    "0^{x^2}", r"\lfloor \sin^2(x) \rfloor + \lfloor \cos^2(x) \rfloor", r"\ln(1+10^{-30})",
    r"\lfloor \frac{|x|}{10^6+|x|}+10^{-7} \rfloor",
)  # fmt: skip
_LOOK_ALIKE = {"0": "O", "1": "l", "2": "Z", "3": "З", "5": "S", "6": "б", "8": "B", "9": "g"}


def attacks(golds: Sequence[tuple[str, bool]], seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield kind, gold and a wrong response, for golds that come with whether their problem speaks of percentages."""
    rng = random.Random(seed)
    for gold, percent in golds:
        text = gold.strip().strip("$").strip()
        if not text or len(text) > 150:
            continue
        for kind, known, answer in _of_gold(text, percent, rng):
            whole = kind in ("sentence", "several boxes", "around a box")
            yield kind, known, answer if whole else f"So it is $\\boxed{{{answer}}}$."


def _of_gold(text: str, percent: bool, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    if _INTEGER.fullmatch(text):
        yield from _number(text, int(text), percent, rng)
        yield from _made_from(abs(int(text)), rng)
    elif _DECIMAL.fullmatch(text):
        yield from _number(text, Fraction(text), percent, rng)
        yield from _long_decimal(text, rng)
    elif match := _FRACTION.fullmatch(text):
        yield from _fraction(text, match[1], int(match[2]), int(match[3]), rng)
    elif match := _BARE_LIST.fullmatch(text):
        yield "list as decimal", text, f"{match[1]}.{match[2]}"
    elif match := _INTERVAL.fullmatch(text):
        yield from _interval(text, match)
    elif match := _MATRIX.fullmatch(text):
        yield from _matrix(text, match[1], match[2])
    elif match := _COMPLEX.fullmatch(text):
        yield "conjugate", text, f"{match[1]}{'-' if match[2] == '+' else '+'}{match[3]}i"
        yield "conjugate", text, f"{match[1]}{match[2]}{match[3]}j"
    elif match := _UNIT.fullmatch(text):
        yield "prefix", text, rf"{match[1]}\text{{ k{match[2]}}}"
        yield "how many", text, rf"{match[1]}\text{{ dozen {match[2]}}}"
    if match := _TUPLE.fullmatch(text):
        yield from _tuple(text, [part.strip() for part in match[1].split(",")], rng)
    yield from _any_form(text, rng)


def _number(text: str, value: int | Fraction, percent: bool, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield what hides, denies, scales or hedges a number."""
    for form in rng.sample(_HIDING, 4):
        if value not in (0, 1) or "sqrt" not in form:
            yield "hidden", text, form.replace("%s", text)
    for form in rng.sample(_NAMES, 2):
        yield "named", text, form.replace("%s", text)
    for form in rng.sample(_PROSE, 3):
        yield "prose", text, form.replace("%s", text)
    for form in rng.sample(_SENTENCES, 2):
        yield "sentence", text, form.replace("%s", text)
    if value and not (percent or value == 100):
        yield "how many", text, text + rng.choice(_MANY)
    yield "plus minus", text, rf"\pm {text.lstrip('-')}" if value else r"\pm 1"
    yield "rounded chain", text, rf"{value + 1} \approx {text}" if _is_int(value) else rf"{text}4 \approx {text}9"
    yield "ellipsis", text, f"{text}{'.' if _is_int(value) else ''}3..."
    yield "several boxes", text, f"\\boxed{{{text}}}, so \\boxed{{{text}7}}"
    yield "several boxes", text, f"\\boxed{{{text}}} or \\boxed{{{text}7}}"
    yield "several boxes", text, f"% \\boxed{{{text}}}\n\\boxed{{{text}7}}"
    yield "look-alike", text, _look_alike(text, rng)
    place = rng.randrange(len(text.lstrip("-"))) + text.startswith("-")
    yield "zero width", text, f"{text[: place + 1]}\u200b{rng.randint(1, 9)}{text[place + 1 :]}"
    yield "zero width", text, f"{text}\u200d7"
    yield "scientific", text, rf"{text} \times 10^{{{rng.choice((-1, 1, 3))}}}" if value else r"1 \times 10^{0}"
    yield "nearly", text, rf"{text}+{rng.choice(_TINY)}"


_TINY = (r"e^{-100}", r"\frac{1}{10^{30}}", r"1-\cos(e^{-60})", r"1-\tanh(90)", r"\sqrt{1+10^{-60}}-1", r"2^{-200}")


def _is_int(value: int | Fraction) -> bool:
    return Fraction(value).denominator == 1


def _look_alike(text: str, rng: random.Random) -> str:
    """Return the number with a digit replaced by a letter that looks like it, or raised or struck out."""
    places = [place for place, char in enumerate(text) if char in _LOOK_ALIKE]
    if not places:
        return text + "\u0336"
    place = rng.choice(places)
    return text[:place] + _LOOK_ALIKE[text[place]] + text[place + 1 :]


def _made_from(value: int, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield pairs whose gold is made from a number, of forms that few datasets have."""
    one, other = rng.choice(_PREFIXES)
    yield "prefix", rf"{value}\text{{ {one}}}", rf"{value}\text{{ {other}}}"
    if value > 1:
        yield "around a box", str(value), rng.choice(_AROUND_A_BOX).replace("%s", str(value))
        yield "hidden steps", f"x^2+{value}", f"x^2+{value}+{rng.choice(_HIDDEN_STEPS)}"
        yield "hidden steps", str(value), rf"{value}+\ln(1+10^{{-30}})"
        yield "mixed", rf"\frac{{{value + 1}}}{{{value}}}", rf"1\frac{{{value + 1}}}{{{value}}}"
    if value > 1000 and value % 1000 >= 100:
        yield "apart", str(value), rf"{value // 1000} \quad {value % 1000}"
    if 2 <= value <= 500:
        step = rng.choice((r"\lceil \frac{n}{%d} \rceil | \lfloor \frac{n}{%d} \rfloor+1",
                           r"\lfloor \frac{n}{%d} \rfloor | \lceil \frac{n}{%d} \rceil-1",
                           r"\lfloor \frac{n}{%d} \rfloor | \lfloor \frac{2n+1}{2 \cdot %d} \rfloor"))  # fmt: skip
        known, wrong = step.replace("%d", str(value)).split(" | ")
        yield "rounding functions", known, wrong
        yield "logarithm", rf"\log_{{{value}}} {value + 1}", rf"\log_{{{value + 1}}} {value}"
        yield "logarithm", rf"\log_{{{value}}} {value + 1}", rf"\ln {value + 1}"
        yield "logarithm", rf"\ln {value}", rf"\log {value}"
        yield "radical", rf"\sqrt{{{value}+\sqrt{{2}}}}", rf"\sqrt{{{value}+\sqrt{{2}}+10^{{-40}}}}"
        yield "radical", str(value), rf"\sqrt[3]{{{value**3}+10^{{-50}}}}"
        yield "degrees", rf"\frac{{{value}\pi}}{{7}}", rf"\frac{{{value}\pi}}{{7}}^\circ"
        yield "degrees", rf"{value}^\circ", rf"{value}\text{{ rad}}"
        yield "degrees", rf"\sin {value}^\circ", rf"\sin {value}"
        yield "named order", f"x={value}, y={value + 3}", f"{value + 3}, {value}"
        yield "named order", f"x={value}, y={value + 3}", f"y={value}, x={value + 3}"
        yield "mixed", rf"\frac{{{value * 2}}}{{7}}", rf"{value}\frac{{2}}{{7}}"
        yield "mixed", rf"{value}\frac{{2}}{{7}}", rf"{value} \cdot \frac{{2}}{{7}}"
    if 3 <= value <= 60:
        yield "factorial", f"{value}!", rf"\Gamma({value})"
        yield "factorial", f"{value}!", f"({value}-1)!"
        yield "factorial", str(value), f"{value}!"
        yield "factorial", rf"\Gamma({value})", rf"{value}\Gamma"
    if value >= 1000:
        yield "arguments", str(value), rf"\max({value:,})"
        yield "arguments", str(value), rf"\gcd({value:,})"
    word = "".join(rng.sample("ABCDEFGH", 4))
    yield "letters", word, word[::-1]


def _long_decimal(text: str, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    digits = f"{rng.randint(1, 9)}{rng.randint(100000, 999999)}"
    last = int(digits[-1])
    wrong = digits[:-1] + str(last + 1 if last < 9 else last - 1)
    yield "last digit", f"{text}{digits}", f"{text}{wrong}"


def _fraction(text: str, sign: str, above: int, below: int, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield decimals that are not the fraction, and fractions upside down."""
    if below == 0 or above == 0:
        return
    value = Fraction(above, below)
    if above != below:
        yield "fraction", text, rf"{sign}\frac{{{below}}}{{{above}}}"
        yield "fraction", text, rf"{sign}{above}\text{{ of }}{below}"
    yield "fraction", text, f"{sign}{above}:{below}:1"
    whole, rest = divmod(value.numerator, value.denominator)
    digits = str(rest * 10**12 // value.denominator).rjust(12, "0")
    rest_of = value.denominator
    for factor in (2, 5):
        while rest_of % factor == 0:
            rest_of //= factor
    if rest_of > 1:
        yield "repeating", text, f"{sign}{whole}.{digits[:3]}"
        wrong = (int(digits[:9]) + rng.choice((2, -2))) % 10**9
        yield "repeating", text, f"{sign}{whole}.{wrong:09d}"
        yield (
            "repeating",
            text,
            rf"{sign}{whole}.\overline{{{digits[:2]}7}}" if digits[:3] != digits[3:6] else f"{whole}.1",
        )
    elif digits[0] != "9":
        yield "repeating", text, rf"{sign}{whole}.{digits.rstrip('0') or '0'}\overline{{3}}"


def _interval(text: str, match: re.Match[str]) -> Iterator[tuple[str, str, str]]:
    left, low, high, right = match[1], match[2].strip(), match[3].strip(), match[4]
    other = {"(": "[", "[": "(", ")": "]", "]": ")"}
    yield "interval", text, f"{other[left]}{low},{high}{right}"
    yield "interval", text, f"{left}{low},{high}{other[right]}"
    yield "interval", text, f"{left}{low},{high}{right}^c"
    yield "interval", text, rf"x \notin {left}{low},{high}{right}"
    yield "interval", text, rf"x \not\in {left}{low},{high}{right}"
    yield "interval", text, rf"\overline{{{left}{low},{high}{right}}}"
    yield "interval", text, rf"\mathbb{{R}} \setminus {left}{low},{high}{right}"
    yield "interval", text, f"-{left}{low},{high}{right}"


def _tuple(text: str, parts: list[str], rng: random.Random) -> Iterator[tuple[str, str, str]]:
    if len(parts) < 2 or not all(re.fullmatch(r"-?\d{1,3}", part) for part in parts):
        return
    if parts != parts[::-1]:
        yield "order", text, f"({','.join(reversed(parts))})"
        yield "order", text, f"({','.join('zyx'[-len(parts) :])}) = ({','.join(parts)})" if len(parts) < 4 else "(0)"
    if len(parts) == 2 and int(parts[0]) > int(parts[1]):
        yield "order", text, f"{parts[0]} < x < {parts[1]}"
    yield "order", text, rf"\{{{','.join(parts)}\}}" if len(set(parts)) > 1 else f"({parts[0]})"
    yield "order", text, f"2({','.join(parts)})"
    yield "order", text, f"({','.join(parts)},0)"
    changed = list(parts)
    place = rng.randrange(len(parts))
    changed[place] = str(int(changed[place]) + 1)
    yield "order", text, f"({','.join(changed)})"


def _matrix(text: str, kind: str, inner: str) -> Iterator[tuple[str, str, str]]:
    rows = [[cell.strip() for cell in row.split("&")] for row in inner.split("\\\\") if row.strip()]
    if len({len(row) for row in rows}) != 1:
        return

    def write(cells: list[list[str]], name: str = f"{kind}matrix") -> str:
        return rf"\begin{{{name}}}" + r" \\ ".join(" & ".join(row) for row in cells) + rf"\end{{{name}}}"

    turned = [list(column) for column in zip(*rows, strict=True)]
    if turned != rows:
        yield "matrix", text, write(turned)
        yield "matrix", text, write(rows) + "^T"
    for place in range(len(rows)):
        changed = [list(row) for row in rows]
        changed[place][-1] += "+1"
        yield "matrix", text, write(changed)
    yield "matrix", text, write(rows, "vmatrix")
    yield "matrix", text, "2" + write(rows)
    yield "matrix", text, write(rows) + "^{-1}"


def _any_form(text: str, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield answers that are wrong whatever the gold is: it is denied, doubled by another, or a root of itself."""
    if any(sign in text for sign in "=<>,&%$") or "\\text" in text or not _FORMULA.fullmatch(text):
        return
    yield (
        "denied",
        text,
        rng.choice((r"\neq %s", r"\not= %s", r"> %s", r"\text{not } %s", r"\cancel{%s}")).replace("%s", text),
    )
    yield "denied", text, rng.choice((r"%s \text{ or } 12345", r"\pm (%s) \pm 1", r"12345, %s")).replace("%s", text)
    if re.search(r"\d", text) and "\\circ" not in text:
        yield "nearly", text, f"{text}+{rng.choice(_TINY)}"
    if "\\log" in text or "\\ln" in text:
        yield "logarithm", text, text.replace("\\log", "\\l@").replace("\\ln", "\\log_{7}").replace("\\l@", "\\ln")
    if re.fullmatch(r"[^i]*\\pi[^i]*", text.replace("\\pi", "\\pi ", 1)) and "\\pi" in text:
        yield "degrees", text, f"({text})^\\circ"
        yield "degrees", text, rf"{text}\text{{ degrees}}"

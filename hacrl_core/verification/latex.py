r"""Read one LaTeX formula into a sympy expression, exactly: every token has a meaning here, or the text has no reading.

Decimals become fractions; the reader says that there was one. Letters keep their case, a prime and a subscript belong
to the name, ``e`` is Euler's number and ``i`` the imaginary unit. A product without a sign binds tighter than ``/``.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)|(?P<command>\\[A-Za-z]+)"
    r"|(?P<letter>[A-Za-z])|(?P<sign>\\[{}%|]|[-+*/^_(){}\[\]|!'%,]))"
)
_E_NOTATION = re.compile(r"(?<![A-Za-z\\\d.])(\d+(?:\.\d*)?)[eE]([+-]?\d{1,3})(?![\d.A-Za-z])")
_PRIME = re.compile(r"\^\s*(?:\{\s*\\prime\s*\}|\\prime)")
# v^2_0 is v_0^2.
_RAISED_INDEX = re.compile(r"([A-Za-z])\s*\^\s*(\w|\{[^{}]*\})\s*_\s*(\w|\{[^{}]*\})")
GREEK = _words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
_ACCENTS = _words("overline bar vec hat tilde overrightarrow widehat mathbb mathcal mathbf boldsymbol")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan,
    "cot": lambda x: 1 / sympy.tan(x), "sec": lambda x: 1 / sympy.cos(x), "csc": lambda x: 1 / sympy.sin(x),
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arccot": sympy.acot, "sinh": sympy.sinh,
    "cosh": sympy.cosh, "tanh": sympy.tanh, "ln": sympy.log, "exp": sympy.exp,
}  # fmt: skip
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_SEVERAL: dict[str, Callable[..., Any]] = {
    "max": sympy.Max, "min": sympy.Min, "gcd": sympy.gcd, "lcm": sympy.lcm,
}  # fmt: skip
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil",
            "\\lvert": "\\rvert", "|": "|", "\\vert": "\\vert"}  # fmt: skip
_TIMES = frozenset(["*", "\\cdot", "\\times", "\\ast"])
_DIVIDE = frozenset(["/", "\\div"])
_MAX_BITS = 2_000_000
_MAX_FACTORIAL = 20_000
_CALLED = frozenset("fghFGH")
_END = ""


class NoReading(Exception):
    """The text is not a formula that this reader understands."""


@dataclass(frozen=True)
class Formula:
    """A formula, and whether a decimal is in it: then it may have been rounded."""

    value: Any
    rounded: bool


@lru_cache(maxsize=4096)
def read_formula(text: str) -> Formula | None:
    """Read a formula; None when some of the text has no meaning here."""
    text = _E_NOTATION.sub(lambda m: rf"({m[1]} \cdot 10^{{{int(m[2])}}})", text)
    text = _PRIME.sub("'", _RAISED_INDEX.sub(r"\1_\3^\2", text))
    reader = _Reader(text)
    try:
        value = reader.sum()
        reader.expect(_END)
    except NoReading:
        return None
    return Formula(value, reader.rounded)


def _raised(base: Any, exponent: Any) -> Any:
    """Return a power; an integer of millions of digits has no reading, whatever time there is."""
    if base == 0 and not exponent.is_number:
        raise NoReading("a power of zero that is 1 at single points")
    if exponent.is_Rational and base.is_Rational:
        bits = max(int(base.p).bit_length(), int(base.q).bit_length())
        if bits * abs(exponent) > _MAX_BITS:
            raise NoReading("a huge power")
    return base**exponent


def _factorial(value: Any) -> Any:
    if value.is_Rational and value > _MAX_FACTORIAL:
        raise NoReading("a huge factorial")
    return sympy.factorial(value)


class _Reader:
    """Recursive descent over the tokens of one formula."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        self.place = 0
        self.rounded = False
        self.bars = 0
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if not match:
                self.tokens.append(("bad", text[position:]))
                break
            self.tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            position = match.end()

    @property
    def next(self) -> str:
        return self.tokens[self.place][1] if self.place < len(self.tokens) else _END

    @property
    def kind(self) -> str:
        return self.tokens[self.place][0] if self.place < len(self.tokens) else "end"

    def take(self) -> str:
        token = self.next
        self.place += 1
        return token

    def expect(self, token: str) -> None:
        if self.next != token:
            raise NoReading(self.next)
        self.place += 1

    def sum(self) -> Any:
        sign = -1 if self.next == "-" else 1
        if self.next in ("+", "-"):
            self.take()
        value = sign * self.term()
        while self.next in ("+", "-"):
            value = value + self.term() if self.take() == "+" else value - self.term()
        return value

    def term(self) -> Any:
        value = self.product()
        while self.next in _TIMES or self.next in _DIVIDE:
            divides = self.take() in _DIVIDE
            negative = self.next == "-"
            if negative:
                self.take()
            factor = self.product(tight=divides)
            factor = -factor if negative else factor
            value = value / factor if divides else value * factor
        return value

    def product(self, tight: bool = True) -> Any:
        """Return factors that stand side by side; a whole number before a proper fraction is a mixed number."""
        start = self.place
        value = self.power()
        raised = self.place > start + 1
        if self._is_whole(start) and self.next == "\\frac" and (part := self._proper_fraction()) is not None:
            value += part
        while self._starts_factor():
            if self.kind == "number" and self.tokens[self.place - 1][0] == "number" and not raised:
                raise NoReading("two numbers side by side")
            begin = self.place
            value *= self.power()
            raised = self.place > begin + 1
        return value

    def _is_whole(self, start: int) -> bool:
        return self.place == start + 1 and self.tokens[start][0] == "number" and self.tokens[start][1].isdigit()

    def _proper_fraction(self) -> Any:
        words = [token for _, token in self.tokens[self.place + 1 : self.place + 7]]
        if len(words) == 6 and words[0::3] == ["{", "{"] and words[2::3] == ["}", "}"]:
            above, below = words[1], words[4]
            if above.isdigit() and below.isdigit() and int(above) >= int(below) > 0:
                raise NoReading("a whole number before an improper fraction: a sum or a product")
            if above.isdigit() and below.isdigit():
                self.place += 7
                return sympy.Rational(int(above), int(below))
        return None

    def _starts_factor(self) -> bool:
        token = self.next
        if self.kind in ("number", "letter"):
            return True
        if token in ("|", "\\vert"):
            return self.bars == 0
        if self.kind == "command":
            return token not in _TIMES and token not in _DIVIDE and token not in _CLOSING.values()
        return token in ("(", "[", "{")

    def power(self) -> Any:
        value = self.postfix(self.atom())
        if self.next == "^":
            self.take()
            value = value * sympy.pi / 180 if self.degree() else _raised(value, self.argument())
            value = self.postfix(value)
        return value

    def degree(self) -> bool:
        r"""Take ``\\circ`` or ``{\\circ}`` where it follows."""
        words = [token for _, token in self.tokens[self.place : self.place + 3]]
        length = 1 if words[:1] == ["\\circ"] else 3 if words == ["{", "\\circ", "}"] else 0
        self.place += length
        return length > 0

    def postfix(self, value: Any) -> Any:
        while self.next in ("!", "\\%", "%"):
            value = _factorial(value) if self.take() == "!" else value / 100
        return value

    def argument(self) -> Any:
        """Return what follows ``^``: a group or a single token."""
        if self.next == "{":
            return self.group()
        if self.next == "-":
            self.take()
            return -self.argument()
        return self.atom()

    def group(self) -> Any:
        opening = self.take()
        bars, self.bars = self.bars, int(opening in ("|", "\\vert"))
        value = self.sum()
        self.bars = bars
        self.expect(_CLOSING[opening])
        return value

    def atom(self) -> Any:
        token = self.next
        if self.kind == "number":
            return self.number()
        if self.kind == "letter":
            return self.name(self.take())
        if token in ("|", "\\vert", "\\lvert"):
            return sympy.Abs(self.group())
        if token in ("(", "[", "{"):
            return self.group()
        if token in ("\\lfloor", "\\lceil"):
            return sympy.floor(self.group()) if token == "\\lfloor" else sympy.ceiling(self.group())
        if self.kind == "command":
            return self.command(self.take()[1:])
        raise NoReading(token)

    def number(self) -> Any:
        token = self.take().replace(",", "")
        value = sympy.Rational(token.rstrip(".") if token.endswith(".") else token)
        if "." in token and self.next == "\\overline":
            self.take()
            self.expect("{")
            digits = self.take()
            self.expect("}")
            if not digits.isdigit():
                raise NoReading(digits)
            if self.kind == "number":
                raise NoReading("a number behind a period")
            places = len(token.partition(".")[2])
            return value + sympy.Rational(int(digits), (10 ** len(digits) - 1) * 10**places)
        if token.partition(".")[2].strip("0"):
            self.rounded = True
        return value

    def name(self, letter: str, constants: bool = True) -> Any:
        """Return the variable that starts here, with its subscript and primes; or a constant or an unknown function."""
        name = letter
        if self.next == "_":
            self.take()
            name += "_" + self.raw()
        while self.next == "'":
            name += self.take()
        if constants and name in ("e", "i"):
            return sympy.E if name == "e" else sympy.I
        if name[0] in _CALLED and self.next == "(":
            inner = self.several()
            return sympy.Symbol(f"{name}({', '.join(map(sympy.srepr, inner))})", real=True)
        return sympy.Symbol(name, real=True)

    def raw(self) -> str:
        """Return a group or a token as text."""
        if self.next != "{":
            return self.take()
        depth, words = 0, []
        while True:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token, 0)
            if token == _END:
                raise NoReading("an open brace")
            words.append(token)
            if depth == 0:
                return "".join(words[1:-1])

    def _separate(self) -> None:
        """Split the next number at its comma: between arguments ``1,234`` are two of them."""
        if self.kind == "number" and "," in self.next:
            first, _, rest = self.next.partition(",")
            self.tokens[self.place : self.place + 1] = [("number", first), ("sign", ","), ("number", rest)]

    def several(self) -> list[Any]:
        """Return the arguments of a function in brackets."""
        opening = self.take()
        if opening not in ("(", "\\{", "{"):
            raise NoReading(opening)
        self._separate()
        values = [self.sum()]
        while self.next == ",":
            self.take()
            self._separate()
            values.append(self.sum())
        self.expect(_CLOSING[opening])
        return values

    def command(self, name: str) -> Any:
        if name in ("frac", "binom"):
            above, below = self.argument(), self.argument()
            return sympy.binomial(above, below) if name == "binom" else above / below
        if name == "sqrt":
            degree = self.group() if self.next == "[" else 2
            return _raised(self.argument(), sympy.Integer(1) / degree)
        if name == "pi":
            return sympy.pi
        if name == "infty":
            return sympy.oo
        if name == "Gamma" and self.next == "(":
            return sympy.gamma(self._of_no_huge(self.group()))
        if name in GREEK:
            return self.name("\\" + name, constants=False)
        if name in _ACCENTS:
            return self.name(f"\\{name}{{{self.raw()}}}", constants=False)
        if name in _SEVERAL:
            return _SEVERAL[name](*self.several())
        if name in ("log", "lg") or name in _FUNCTIONS:
            return self.function(name)
        if name == "operatorname" and (word := self.raw()) in _FUNCTIONS:
            return self.function(word)
        raise NoReading(name)

    def _of_no_huge(self, value: Any) -> Any:
        if value.is_Rational and abs(value) > _MAX_FACTORIAL:
            raise NoReading("a huge argument")
        return value

    def function(self, name: str) -> Any:
        base: Any = sympy.Integer(10) if name in ("log", "lg") else None
        if base is not None and self.next == "_":
            self.take()
            base = self.argument()
        power: Any = None
        if self.next == "^":
            self.take()
            power = self.argument()
            if power == -1 and name in _INVERSE:
                name, power = _INVERSE[name], None
        if self.next in ("(", "{", "[", "|"):
            value = self.group() if self.next != "|" else self.atom()
        else:
            value = self.bare_argument()
        result = sympy.log(value, base) if base is not None else _FUNCTIONS[name](value)
        return result if power is None else _raised(result, power)

    def bare_argument(self) -> Any:
        r"""Return the argument of ``\sin 2x``: the factors up to a sign or another function."""
        sign = -1 if self.next == "-" else 1
        if sign < 0:
            self.take()
        value = sign * self.power()
        while self._starts_factor() and self.next[1:] not in _FUNCTIONS and self.next not in ("\\log", "(", "["):
            if self.kind == "number":
                raise NoReading("two numbers side by side")
            value *= self.power()
        return value

r"""Numbers as text: exact values, and what counts as the same number."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_core.verification.maths import quick_decision
from hacrl_core.verification.numbers import parse_number, same_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-5", Fraction(-5)),
        ("7,425,000", Fraction(7425000)),
        ("1 000", Fraction(1000)),
        ("1,000.99", Fraction(100099, 100)),
        (".5", Fraction(1, 2)),
        ("10/4", Fraction(5, 2)),
        (r"-\frac{10}{9}", Fraction(-10, 9)),
        (r"\frac{-1}{3}", Fraction(-1, 3)),
        (r"918\frac{1}{2}", Fraction(1837, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("1e-8", Fraction(1, 10**8)),
        ("4.46e19", Fraction(446 * 10**17)),
        (r"7.8\times 10^2", Fraction(780)),
        (r"3 \cdot 10^{-2}", Fraction(3, 100)),
        ("10^{35}", Fraction(10**35)),
        ("-1./3", Fraction(-1, 3)),
        ("(3)", Fraction(3)),
    ],
)
def test_one_number(text: str, value: Fraction) -> None:
    number = parse_number(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "2e",
        "1,22",
        "1, 2",
        "32, 349",
        "2x",
        "1/0",
        "10^{9999}",
        "9" * 500,
        "1e99999",
        "--3",
        "(1)(2)",
        "+",
        "1/2/3",
    ],
)
def test_not_one_number(text: str) -> None:
    assert parse_number(text) is None


@given(st.fractions(max_denominator=10**6), st.sampled_from(["{n}/{d}", r"\frac{{{n}}}{{{d}}}"]))
def test_every_fraction_is_read_exactly(value: Fraction, form: str) -> None:
    number = parse_number(form.format(n=value.numerator, d=value.denominator))
    assert number is not None
    assert number.value == value
    assert number.exact


@given(st.integers(-(10**15), 10**15))
def test_thousands_separators_change_nothing(value: int) -> None:
    number = parse_number(f"{value:,}")
    assert number is not None
    assert number.value == value


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_integers_are_the_same_only_if_equal(a: int, b: int) -> None:
    assert quick_decision(str(a), str(b), 1e-6) is (a == b)


def test_decimals_are_compared_relatively_and_exact_forms_exactly() -> None:
    third = parse_number("1/3")
    assert third is not None
    assert same_number(third, parse_number("0.3333333"), 1e-6)  # type: ignore[arg-type]
    assert not same_number(third, parse_number("0.333"), 1e-6)  # type: ignore[arg-type]
    assert quick_decision("1e-8", "2e-8", 1e-6) is False
    assert quick_decision("1000000001", "1000000000", 1e-6) is False
    assert quick_decision("33.3", r"\frac{100}{3}", 1e-6) is False
    assert quick_decision("33.3", r"\frac{100}{3}", 1e-2) is True


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("10\\%", "10", True),
        ("10\\%", "0.1", True),
        ("0.6", "60%", True),
        ("10\\%", "0.2", False),
        ("28\\%", "28 percent", True),
        ("15\\mbox{ cm}^2", "15", True),
        ("15\\mbox{ cm}^2", "15 square centimeters", True),
        ("15\\text{ cm}", "15\\text{ m}", False),
        ("15\\text{ cm}", "15cm", True),
        ("10", "\\$10", True),
        ("1/3", "\\frac{1}{3} \\text{meters}", True),
        ("90^\\circ", "90", True),
        ("x = 5", "5", True),
        ("5", "x = 5.0", True),
        ("20:34", "08:34 \\text{P.M.}", True),
        ("1000.99", "1000,99", True),
        ("forty two", "42", None),
        ("42", "forty two", False),
        ("x=1", "y=1", None),
        ("10m", "10", None),
    ],
)
def test_quick_decisions(gold: str, answer: str, same: bool | None) -> None:
    assert quick_decision(gold, answer, 1e-6) is same

r"""What never reaches the symbolic comparison."""

import pytest

from hacrl_core.verification.gates import gate


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        "9^9^9999",
        "10^{10^{10}}",
        "2^{2^{2^{2^{2^{2}}}}}",
        "2^{999999999}",
        "(9!)!",
        "9!!",
        "123456!",
        "(10^9)!",
        "((9^{9})^{9999})^{9999}",
        "(" * 60 + "1" + ")" * 60,
        "1" * 400,
        "x" * 700,
        r"\binom{99999999}{4999999}",
        r"\sum_{k=1}^{10^9} k",
    ],
)
def test_gated(text: str) -> None:
    assert gate(text, 600)


@pytest.mark.parametrize(
    "text",
    [
        "2^{1009}",
        "x^{2021}+1",
        r"e^{-x^2/2}",
        r"\frac{(n-1)!}{k!} \frac{n}{(n-k)!}",
        r"10^{\frac{-5+\sqrt{13}}{6}}",
        "2004!",
        r"(x+1)^{10}(x-1)^{10}",
        r"2^6 \cdot 3^5",
        r"\sum_{k=0}^{n-1} F_k",
        r"2^{2^{3}}",
        r"\binom{2n}{n}",
    ],
)
def test_not_gated(text: str) -> None:
    assert gate(text, 600) == ""

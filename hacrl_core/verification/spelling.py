r"""Other spellings of the same answer, for the ``strict`` verifier: Unicode signs, ``\over``, colours, invisible signs.

What a reader sees stays the same. Every step is linear in the text.
"""

import re
from functools import lru_cache

_INVISIBLE = re.compile("[\u200b\u200c\u200d\u2060\ufeff]")
_COLOUR = re.compile(
    r"\\(?:text)?color\s*\{\s*(?:red|blue|green|black|purple|violet|orange|teal|magenta|cyan|brown)\s*\}"
)
# Two numbers that stand apart are two, while a small space may part thousands.
_APART = re.compile(r"(?<=\d)\s*(?:\\q?quad(?![A-Za-z])|\\hspace\*?\s*\{[^{}]*\})\s*(?=\d)")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_RAISED_RUN = re.compile(f"⁻?[{_RAISED}]+")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z]|\{[^{}]*\}|\([^()]*\))")
_SIGNS = {
    "⁄": "/", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}", "±": r"\pm ", "≠": r"\ne ", "≈": r"\approx ",
    "∪": r"\cup ", "∈": r"\in ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ",
    "φ": r"\phi ", "ω": r"\omega ", r"\nicefrac": r"\frac", r"\sfrac": r"\frac",
}  # fmt: skip


@lru_cache(maxsize=8192)
def plain_spelling(text: str) -> str:
    """Return the text in LaTeX that the readers know."""
    text = _APART.sub(", ", _COLOUR.sub("", _INVISIBLE.sub("", text)))
    if not text.isascii():
        text = _RAISED_RUN.sub(lambda run: f"^{{{_lowered(run.group())}}}", text)
        text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1].strip('{}')}}}", text)
    for sign, latex in _SIGNS.items():
        if sign in text:
            text = text.replace(sign, latex)
    for _ in range(4):
        if "\\over" not in text:
            break
        text = _OVER.sub(r"\\frac{\1}{\2}", text)
    return text


def _lowered(digits: str) -> str:
    return "".join("-" if digit == "⁻" else str(_RAISED.index(digit)) for digit in digits)

r"""Read LaTeX with math-verify's parser into sympy objects. Only workers import this module.

Only the LaTeX parser is used, never math-verify's expression parser, which calls ``eval``; its own time limits are off:
they are signals, and the parent's deadline applies.
"""

import logging
import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse

logging.getLogger("math_verify").setLevel(logging.ERROR)

_INDEX = re.compile(r"_\{?i|\\(?:sum|prod)")
_IMAGINARY_CALL = re.compile(r"(?<![A-Za-z\\])i\s*\(")
_SUBSCRIPT_TEXT = re.compile(r"_\s*\{\s*\\text\s*\{\s*([A-Za-z0-9]+)\s*\}\s*\}")
_SUBSCRIPT_WORD = re.compile(r"_\s*\{\s*\\?([A-Za-z]{2,})\s*\}")
_E_NOTATION = re.compile(r"(?<![A-Za-z\\\d.])(\d+(?:\.\d*)?)[eE]([+-]?\d{1,3})(?![\d.A-Za-z])")
# Units were dealt with before: dropped here, "10m" would be 10 whatever m is.
_CONFIG = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    ),
)


@lru_cache(maxsize=4096)
def read(latex: str) -> Any:
    """Parse LaTeX into a sympy object; None when the text is no mathematics."""
    latex = _IMAGINARY_CALL.sub(r"i \\cdot (", latex)
    latex = _SUBSCRIPT_WORD.sub(r"_{\1}", _SUBSCRIPT_TEXT.sub(r"_{\1}", latex))
    latex = _E_NOTATION.sub(lambda m: rf"{m[1]} \cdot 10^{{{int(m[2])}}}", latex)
    found = parse(f"\\boxed{{{latex}}}", [_CONFIG], fallback_mode="no_fallback", parsing_timeout=None)
    return _with_imaginary_unit(found[0], latex) if found else None


def _with_imaginary_unit(value: Any, latex: str) -> Any:
    """Replace the symbol ``i``, which math-verify leaves as it is, by the imaginary unit unless it is an index."""
    if not isinstance(value, sympy.Expr) or _INDEX.search(latex):
        return value
    return value.subs({symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"})

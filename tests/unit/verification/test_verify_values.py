"""Values of expressions: what sympy cannot work out is no value, never an error."""

import sympy

from hacrl_core.verification.symbolic import _value


def test_a_limit_that_sympy_has_no_rule_for_has_no_value():
    t, x = sympy.symbols("t x")
    assert _value(sympy.Limit(sympy.Integral(t**t, (t, 1, x)), x, sympy.oo), {}) is None
    assert float(_value(sympy.Limit(sympy.sin(x) / x, x, 0), {})) == 1.0

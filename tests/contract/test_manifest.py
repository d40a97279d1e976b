import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_core.contracts.manifest import Identity, canonical_json, changed_fields

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_canonical_json_round_trips_and_is_one_text_per_value(value):
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text


def test_canonical_json_refuses_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": float("nan")})


def identity(**changes):
    return Identity(
        **{
            "stage": "update",
            "stage_version": 1,
            "config": {"rate": 1.0, "deep": {"a": 1}},
            "inputs": {"agent": "d1"},
            **changes,
        }
    )


def test_key_depends_on_every_part_and_not_on_order():
    base = identity()
    assert base.key == identity(config={"deep": {"a": 1}, "rate": 1.0}).key
    others = [
        identity(stage="score"),
        identity(stage_version=2),
        identity(config={"rate": 2.0}),
        identity(inputs={"agent": "d2"}),
        identity(seed=3),
    ]
    assert len({base.key, *(other.key for other in others)}) == 6


def test_changed_fields_name_the_path_and_both_values():
    new = identity(config={"rate": 2.0, "deep": {"a": 1, "b": 0}}, inputs={"agent": "d2"})
    assert changed_fields(identity(), new) == [
        "config.deep.b: absent → 0",
        "config.rate: 1.0 → 2.0",
        "inputs.agent has other content",
    ]

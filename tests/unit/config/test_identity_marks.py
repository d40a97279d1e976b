"""What belongs to a stage's identity is said at the field: everything, unless the field is marked."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from hacrl_core.config.base import IdentityUnlessDefault, NotIdentity, StrictConfig


class Inner(StrictConfig):
    kind: Literal["inner"] = "inner"
    speed: Annotated[PositiveInt, NotIdentity] = Field(1, description="Changes nothing but the speed.")


class Outer(StrictConfig):
    rate: float
    inner: Inner = Inner()
    several: tuple[Inner, ...] = ()
    named: dict[str, Inner] = Field(default_factory=dict)
    later: Annotated[str, IdentityUnlessDefault] = "old"
    later_factory: Annotated[dict[str, int], IdentityUnlessDefault] = Field(default_factory=dict)


def test_a_plain_field_is_identity_and_a_marked_one_is_not() -> None:
    assert Inner(speed=7).identity() == {"kind": "inner"}
    assert Outer(rate=0.5).identity() == {"rate": 0.5, "inner": {"kind": "inner"}, "several": [], "named": {}}


def test_marks_hold_at_any_depth() -> None:
    fast, slow = Inner(speed=9), Inner(speed=1)
    one = Outer(rate=1.0, inner=fast, several=(fast, slow), named={"a": fast})
    two = Outer(rate=1.0, inner=slow, several=(slow, fast), named={"a": slow})
    assert one != two
    assert one.identity() == two.identity()
    assert one.identity()["several"] == [{"kind": "inner"}, {"kind": "inner"}]


def test_a_field_that_came_later_is_left_out_only_while_it_has_its_default() -> None:
    assert Outer(rate=1.0, later="old", later_factory={}).identity() == Outer(rate=1.0).identity()
    assert Outer(rate=1.0, later="new").identity()["later"] == "new"
    assert Outer(rate=1.0, later_factory={"a": 1}).identity()["later_factory"] == {"a": 1}


def test_marks_do_not_show_in_the_json_schema() -> None:
    assert "identity" not in str(Outer.model_json_schema()).lower()

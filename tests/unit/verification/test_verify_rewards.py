"""The reward from a verdict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hacrl_core.config.verification import OverlongConfig, VerifyConfig
from hacrl_core.errors import ConfigError
from hacrl_core.verification import VerdictKind, verify_batch
from hacrl_core.verification.verdict import base_reward, overlong_penalty, shaped_reward

OVERLONG = OverlongConfig(max_tokens=100, buffer_tokens=20, penalty=0.5)


def test_correct_is_one_and_everything_else_zero() -> None:
    for kind in VerdictKind:
        expected = 1.0 if kind is VerdictKind.CORRECT else 0.0
        assert base_reward(kind, well_formed=True, format_reward=0.0) == expected


def test_format_reward_is_for_wrong_answers_in_a_box_and_never_for_errors() -> None:
    assert base_reward(VerdictKind.INCORRECT, well_formed=True, format_reward=0.1) == 0.1
    assert base_reward(VerdictKind.INCORRECT, well_formed=False, format_reward=0.1) == 0.0
    assert base_reward(VerdictKind.CORRECT, well_formed=False, format_reward=0.1) == 1.0
    assert base_reward(VerdictKind.ERROR, well_formed=True, format_reward=0.1) == 0.0


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (80, 0.0), (90, 0.25), (100, 0.5), (500, 0.5)])
def test_overlong_penalty_by_hand(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, OVERLONG) == pytest.approx(penalty)


@given(st.floats(0, 1), st.integers(0, 1000), st.integers(0, 1000))
def test_longer_is_never_better_and_rewards_stay_in_the_unit_interval(reward: float, a: int, b: int) -> None:
    short, long = shaped_reward(reward, min(a, b), OVERLONG), shaped_reward(reward, max(a, b), OVERLONG)
    assert 0 <= long <= short <= 1


def test_shaping_through_verify_batch() -> None:
    config = VerifyConfig(format_reward=0.1, overlong=OVERLONG)
    verdicts = verify_batch(
        [r"\boxed{1}", r"\boxed{2}", "2", r"\boxed{1}"], ["1"] * 4, config, token_counts=[10, 10, 10, 90]
    )
    assert [verdict.reward for verdict in verdicts] == pytest.approx([1.0, 0.1, 0.0, 0.75])


def test_overlong_needs_token_counts() -> None:
    with pytest.raises(ConfigError, match="token_counts"):
        verify_batch([r"\boxed{1}"], ["1"], VerifyConfig(overlong=OVERLONG))


def test_config_refuses_nonsense() -> None:
    for bad in (
        {"verifier": "guess"},
        {"verifier": "a:b:c"},
        {"format_reward": 1.0},
        {"tolerance": -1},
        {"unknown": 1},
    ):
        with pytest.raises(ValidationError):
            VerifyConfig(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        OverlongConfig(max_tokens=10, buffer_tokens=11)

"""Answers to claims: yes needs every agent, no needs one against and none for, and few seeds can show nothing."""

import pytest
from claims import Claim, answer_claims, drawdown

from flows.sweep.results import AgentResult, CellResult


def cells(variant, ada, ben):
    return [
        CellResult(
            variant,
            seed,
            {"ada": AgentResult(accuracy={0: 0.1, 9: a}), "ben": AgentResult(accuracy={0: 0.1, 9: b})},
            frozenset(),
            {},
            0.0,
        )
        for seed, (a, b) in enumerate(zip(ada, ben, strict=True))
    ]


def answer(method, baseline, expected="higher"):
    return answer_claims([Claim("", "m", "b", expected)], cells("m", *method) + cells("b", *baseline), ["ada", "ben"])[
        0
    ]


SEEDS = 8
LOW = [0.50 + 0.01 * i for i in range(SEEDS)]
HIGH = [value + 0.05 + 0.002 * i for i, value in enumerate(LOW)]
MIXED = [value + (-1) ** i * 0.05 for i, value in enumerate(LOW)]


@pytest.mark.parametrize(
    ("method", "expected", "found"),
    [
        ((HIGH, HIGH), "higher", "yes"),
        ((HIGH, MIXED), "higher", "not shown"),
        ((HIGH, HIGH), "lower", "no"),
        ((MIXED, HIGH), "lower", "no"),
        ((MIXED, MIXED), "higher", "not shown"),
    ],
)
def test_answers(method, expected, found):
    assert answer(method, (LOW, LOW), expected).answer == found


def test_where_cells_failed_nothing_is_shown():
    results = cells("m", HIGH, HIGH) + cells("b", LOW, LOW)
    found = answer_claims([Claim("", "m", "b")], results, ["ada", "ben"], failed={"b"})[0]
    assert (found.answer, found.why()) == (
        "not shown",
        "cells of b failed: what is left may be what went well",
    )


def test_a_no_is_corrected_for_the_number_of_agents():
    six = [values[:6] for values in (MIXED, HIGH, LOW)]  # six seeds: p is 0.031 at best, 0.063 for either of two agents
    assert answer((six[0], six[1]), (six[2], six[2]), "lower").answer == "not shown"


def test_one_agent_up_and_one_down_is_not_shown_either_way():
    low = [value - 0.05 for value in LOW]
    assert answer((HIGH, low), (LOW, LOW)).answer == "not shown"


def test_too_few_seeds_are_named():
    five = answer((HIGH[:5], HIGH[:5]), (LOW[:5], LOW[:5]))
    assert five.answer == "not shown"
    assert five.why() == "5 seeds cannot show it, 6 could"


def test_nothing_run_is_said():
    assert answer_claims([Claim("", "m", "b")], [], ["ada"])[0].answer == "not run"


def test_claims_are_corrected_as_one_family():
    results = cells("m", HIGH, HIGH) + cells("b", LOW, LOW)
    alone = answer_claims([Claim("", "m", "b")], results, ["ada", "ben"])[0]
    among = answer_claims([Claim("", "m", "b"), Claim("", "b", "m")], results, ["ada", "ben"])[0]
    assert alone.corrected["ada"] == pytest.approx(2 / 2**SEEDS)
    assert among.corrected["ada"] == pytest.approx(2 * 2 / 2**SEEDS)


def test_drawdown_is_the_deepest_fall_of_the_smoothed_reward():
    rising = AgentResult(reward={i: i / 10 for i in range(10)})
    falling = AgentResult(reward={i: 1.0 if i < 5 else 0.0 for i in range(10)})
    assert drawdown(rising) == 0
    assert drawdown(falling) == pytest.approx(1.0)

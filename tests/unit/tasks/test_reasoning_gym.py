"""Tasks of reasoning-gym: its problems, its scorer in our workers, and a held-out split."""

import sys

import pytest

from hacrl_core.config.problems import TaskProblems
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems import load_problems
from hacrl_core.verification import verify_batch

pytest.importorskip("reasoning_gym", reason="the extra hacrl[tasks] is not installed")

TASKS = (
    *("ab", "basic_arithmetic", "base_conversion", "bitwise_arithmetic", "calendar_arithmetic", "chain_sum"),
    *(
        "count_bits",
        "count_primes",
        "countdown",
        "decimal_chain_sum",
        "fraction_simplification",
        "gcd",
        "knights_knaves",
    ),
    *("lcm", "leg_counting", "letter_counting", "number_filtering", "number_sequence", "number_sorting", "products"),
    *("simple_equations", "spell_backward", "string_insertion", "tower_of_hanoi"),
)


@pytest.mark.parametrize("name", TASKS)
def test_the_tasks_own_answer_passes_and_others_fail(name: str) -> None:
    task = f"reasoning_gym:{name}"
    problems = list(load_problems(TaskProblems(task=task, size=2)).problems)
    responses = [problems[0].answer, f"So it is <answer>{problems[1].answer}</answer>.", "surely not this", ""]
    asked = [problems[0], problems[1], problems[0], problems[0]]
    # The first call of a scorer may import sympy, which takes seconds on a busy machine.
    config = VerifyConfig(verifier=task, workers=1, timeout_seconds=30)
    verdicts = verify_batch(responses, [p.answer for p in asked], config, problems=asked)
    assert [v.verdict == "correct" for v in verdicts] == [True, True, False, False], (responses, verdicts)
    assert not any(v.verdict in ("error", "timeout") for v in verdicts)


def test_a_scorer_reads_expressions_also_where_the_maths_verifier_ran_before() -> None:
    """That verifier forbids sympy to evaluate text, in its own processes only."""
    assert verify_batch([r"\boxed{x+x}"], ["2x"], VerifyConfig(workers=1))[0].reward == 1.0
    problems = list(load_problems(TaskProblems(task="reasoning_gym:countdown", size=1)).problems)
    config = VerifyConfig(verifier="reasoning_gym:countdown", workers=1, timeout_seconds=30)
    verdicts = verify_batch([problems[0].answer], [problems[0].answer], config, problems=problems)
    assert (verdicts[0].verdict, verdicts[0].reward) == ("correct", 1.0)


def test_problems_are_repeatable_new_in_every_iteration_and_split_by_question() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    endless = load_problems(TaskProblems(task="reasoning_gym:chain_sum", options=options))
    first, second = endless.for_iteration(5, 0, 20), endless.for_iteration(5, 1, 20)
    assert first == endless.for_iteration(5, 0, 20) != second
    held_out = load_problems(TaskProblems(task="reasoning_gym:chain_sum", options=options, split="held_out", size=20))
    seen = {p.messages[0]["content"] for i in range(5) for p in endless.for_iteration(5, i, 20)}
    assert seen.isdisjoint(p.messages[0]["content"] for p in held_out.problems)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"task": "reasoning_gym:chain_sun"}, "no task chain_sun; did you mean chain_sum"),
        ({"task": "reasoning_gym:chain_sum", "options": {"colour": 1}}, "colour"),
        ({"task": "reasoning_gym:chain_sum", "options": {"min_terms": 5, "max_terms": 2}}, "options"),
        (
            {"task": "reasoning_gym:chain_sum", "size": 20_000, "options": {"max_terms": 2, "max_digits": 1}},
            "different",
        ),
    ],
)
def test_what_cannot_be_made_is_one_clear_line(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_problems(TaskProblems.model_validate(settings))


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"not installed .*hacrl\[tasks\]"):
        load_problems(TaskProblems(task="reasoning_gym:chain_sum", size=2))

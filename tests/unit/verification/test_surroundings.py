r"""What the text around a box does to it under ``strict``; ``benchmarks/verify_truth.py`` judges many more."""

import pytest

from benchmarks.verify_surroundings import honest_around, wrong_around
from hacrl_core.verification import verify_batch

WRONG = (
    r"The answer is not \boxed{17}", r"$x \ne \boxed{17}$", r"$\boxed{17} = 18$", r"$\boxed{17}+1$",
    r"$-(\boxed{17})$", r"$-\,\boxed{17}$", r"$x = 3+\boxed{17} = 20$", r"$\log_2 \boxed{17}$", r"$\boxed{17}(x+1)$",
    r"$3:\boxed{17}$", r"It turns out $\boxed{17}$ does not work.", r"Therefore $\boxed{17}$ must be rejected.",
    r"twice $\boxed{17}$", r"The answer is one less than $\boxed{17}$.", r"$\boxed{17}$ squared",
    r"$\boxed{17}\text{ plus one}$", r"Is it \boxed{17}?", r"WRONG: \boxed{17}", r"Do not answer \boxed{17}.",
    r"<del>\boxed{17}</del>", r"\boxed{18}. \boxed{17}", r"\boxed{18} / \boxed{17}",
    "The answer is 18.\n% \\boxed{17}", r"\boxed{17} or 18", "<answer>18</answer><answer>17</answer>",
    r"<answer>18</answer> \boxed{17}", r"not \boxed{17} and \boxed{17}",
)  # fmt: skip
RIGHT = (
    r"\boxed{18}. No, wait: \boxed{17}", r"$3+\boxed{17} = 20$", r"$\boxed{17} = x$", r"$\boxed{17} = 17.0$",
    "* \\boxed{17}", "| result | \\boxed{17} |", "> \\boxed{17}", r"Answer - \boxed{17}",
    r"$\textcolor{red}{\boxed{17}}$", r"-> \boxed{17}", r"20 % of 85 is \boxed{17}", r"$5!=\boxed{17}$",
    r"The answer is 16.9, or $\boxed{17}$.", r"He was wrong $\boxed{17}$ times.",
    r"It's not 16, not 18, but \boxed{17}!", r"$\boxed{17}$. Note that 18 is wrong since it is even.",
    r"$=+\boxed{17}$", r"<answer>\boxed{17}</answer>", r"\boxed{17}<|im_end|>", r"$N \equiv \boxed{17} \pmod{20}$",
    r"$\boxed{17}$ or 17.0", r"All integers except $\boxed{17}$.", r"$x \le \boxed{17}$", r"Question 5 \boxed{17}",
    r"$\boxed{17} / \mathrm{cm}^3$",
)  # fmt: skip


def rewarded(responses: list[str], gold: str = "17") -> list[str]:
    found = verify_batch(responses, [gold] * len(responses))
    return [response for response, verdict in zip(responses, found, strict=True) if verdict.reward > 0]


def test_a_box_that_the_text_around_it_changes_denies_hides_or_hedges_is_no_answer() -> None:
    assert rewarded(list(WRONG)) == []


def test_honest_text_around_a_box_changes_nothing() -> None:
    assert [response for response in RIGHT if response not in rewarded(list(RIGHT))] == []


@pytest.mark.parametrize("gold", ["17", "1000"])
def test_templates_of_text_around_an_answer(gold: str) -> None:
    wrong = [response for _, _, response in wrong_around([gold], 0)]
    honest = [response for _, _, response in honest_around([gold], 0)]
    assert len(wrong) > 150
    assert len(honest) > 80
    assert rewarded(wrong, gold) == []
    assert rewarded(honest, gold) == honest


def test_a_list_of_boxes_is_judged_by_what_stands_before_its_first_and_behind_its_last() -> None:
    assert rewarded([r"So $x = \boxed{1}$ or $x = \boxed{2}$."], "1, 2") != []
    assert rewarded([r"The answers are not $\boxed{1}$ and $\boxed{2}$."], "1, 2") == []


def test_one_name_for_several_values_is_not_a_name_for_each() -> None:
    assert rewarded([r"\boxed{x=1, y=2}"], "x=1,2") == []
    assert rewarded([r"\boxed{x=1, 2}"], "x=1, y=2") == []
    same = [r"\boxed{x=1, x=2}", r"\boxed{x = 2, 1}", r"\boxed{1, 2}"]
    assert rewarded(same, "x=1,2") == same

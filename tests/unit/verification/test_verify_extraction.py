r"""Which part of a response is the answer."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.verification.extraction import (
    _find_nested_boxes,
    after_thinking,
    extract_answer,
    extract_gold,
    find_boxes,
)
from hacrl_core.verification.verifiers import find_verifier

ALL = ("unclosed_box", "phrase", "last", "whole")
DEFAULT = ("phrase", "last", "whole")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} and later \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed 7 metres", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"<think>\boxed{1}</think> so \boxed{3}", "3"),
        (r"<think>a</think> \boxed{1} <think>b \boxed{2}</think> \boxed{4}", "4"),
        (r"\boxed{5} then cut \boxed{6", "5"),
        (r"\boxed{185\}", "185"),
        (r"\\boxed{8}", "8"),
    ],
)
def test_the_last_complete_box_after_thinking(response: str, answer: str) -> None:
    found = extract_answer(response, ())
    assert (found.answer, found.boxed) == (answer, True)


@pytest.mark.parametrize(
    "response", ["", "no answer", r"<think>\boxed{3}</think> bye", r"<think> \boxed{3}", r"\boxed{}", r"\boxed{3"]
)
def test_nothing_is_found_without_fallbacks(response: str) -> None:
    assert extract_answer(response, ()).answer == ""


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", "\\frac{1}{2}"),
        ("**Answer:** 12", "12"),
        ("Answer: the largest $n$ is 34.", "34"),
        ("some steps\n#### 72", "72"),
        ("we get $x = 3$ and finally 4 apples", "4"),
        ("we get 4 apples, so $x = 3$.", "x = 3"),
        ("solutions are $1$ and $2$", "1, 2"),
        ("-\\frac{10}{9}", "-\\frac{10}{9}"),
        ("it costs 1,000.99€", "1,000.99"),
        ("The rate is $28$ percent", "28\\%"),
    ],
)
def test_fallbacks(response: str, answer: str) -> None:
    assert extract_answer(response, DEFAULT).answer == answer


def test_a_response_cut_inside_its_box_has_no_answer_unless_allowed() -> None:
    text = r"we found 12, so $x=12$ and the answer is \boxed{123"
    assert extract_answer(text, DEFAULT).answer == ""
    assert extract_answer(text, ALL).answer == "123"


def test_adjacent_boxes_are_one_list_and_others_are_not() -> None:
    assert extract_answer(r"\boxed{1}, \boxed{2} and $\boxed{3}$", ()).joined == "1, 2, 3"
    assert extract_answer(r"\boxed{1}. No, wait: \boxed{2}", ()).joined == "2"


def test_golds() -> None:
    assert extract_gold("$9$") == "9"
    assert extract_gold("long solution, so \\boxed{5}.") == "5"
    assert extract_gold("  x+1 ") == "x+1"
    assert extract_gold("$1$ and $2$") == "$1$ and $2$"


def test_thinking() -> None:
    assert after_thinking("a</think>b</think>c") == "c"
    assert after_thinking("<think>never ends") == ""
    assert after_thinking("plain") == "plain"


@given(
    st.lists(
        st.sampled_from([r"\boxed{", r"\boxed{7}", r"\boxed {a}", r"\boxed 5", "{", "}", "\\", r"\{", r"\}", "x", " "]),
        max_size=9,
    )
)
def test_the_short_way_to_flat_boxes_finds_what_the_long_way_finds(parts: list[str]) -> None:
    text = "".join(parts)
    assert find_boxes(text) == _find_nested_boxes(text)
    complete = [text[start:end] for start, end, whole in _find_nested_boxes(text) if whole]
    if complete:
        assert extract_answer(text, (), join=False).answer == extract_answer(text, ()).answer


@pytest.mark.parametrize(
    "unit",
    [
        "\\",
        r"\boxed{",
        "$",
        "answer is ",
        "{",
        "1 ",
        r"\boxed{1} and ",
        "\\\\boxed",
        "not 1 or ",
        "<answer>1",
        "%\\boxed{1}",
    ],
)
def test_extraction_is_linear_on_hostile_text(unit: str) -> None:
    """Four times the text takes four times the CPU time, not sixteen times."""

    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        judge = find_verifier("strict").judge
        times = []
        for _ in range(3):
            started = time.process_time()
            extract_answer(text, ALL)
            extract_gold.__wrapped__(text)
            judge(text, "42", VerifyConfig(fallbacks=ALL))
            times.append(time.process_time() - started)
        return min(times)

    # Below a few milliseconds a ratio says nothing.
    assert seconds(200_000) < 9 * max(seconds(50_000), 0.005)

r"""The ``strict`` verifier: wrong answers, equal answers, and which of several answers counts."""

import pytest

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.verification import verify_batch
from hacrl_core.verification.reading import decide
from hacrl_core.verification.units import split_known_unit, unit_name

WRONG = {
    "large integers": [
        (r"2^{100}-1", r"2^{100}"), (r"1000000007", "10^9+8"), ("2023!", "2023!-1"), (r"3^{2023}-2^{2023}", "3^{2023}"),
        (r"\binom{100}{50}", r"\binom{100}{50}-7"), (r"2^{4950}", "2^{4950}+1"),
        (r"\frac{100!}{2^{50}}", r"\frac{100!}{2^{50}}+1"),
    ],
    "small differences": [
        (r"1-2^{-40}", "1"), (r"\frac{2^{2010}-1}{2^{2010}}", "1"), (r"\pi", r"\frac{245850922}{78256779}"),
        ("x+1", "x+1+10^{-12}"), (r"2^{100}x", r"(2^{100}+1)x"), (r"\sqrt{2}", r"\sqrt{2+10^{-400}}"),
    ],
    "functions that differ far away": [
        ("|x-3|", "3-x"), ("|x+5|", "x+5"), (r"\sqrt{x^2-10x+25}", "5-x"), ("|x-4|+|x+4|", "8"), (r"\max(x,10)", "10"),
        (r"\frac{|n-7|}{n-7}", "-1"), (r"\lfloor x/10 \rfloor", r"\lfloor x/20 \rfloor"), ("|a-b-9|", "9+b-a"),
        ("|x-3|+|x-4|", "|2x-7|"), ("|x-5000|", "5000-x"),
    ],
    "letters are no units": [
        ("3", "3 i"), ("7", "7 i"), ("2", "2 x"), ("4", "4 y^2"), (r"\frac{1}{2}", r"\frac{1}{2} x"), ("3", "3 e"),
        (r"\frac34", r"\frac34 n^2"), ("12", "12abc"), ("10", "10m"), ("5", "5 n"),
    ],
    "units": [(r"8\text{ m}", "8 km/h"), (r"15\text{ cm}", r"15\text{ m}"), (r"15\text{ cm}^2", r"15\text{ cm}^3")],
    "words": [
        ("42", r"42 \text{ is wrong}"), ("42", r"\text{not } 42"), ("42", r"\neq 42"), ("42", "not 42"),
        ("42", "42 (not 41)"),
    ],
    "percent and currency": [("0.05", r"0.05\%"), ("5", r"5\%"), (r"\$5", r"5\%"), (r"\$5", "5€"),
        (r"90^\circ", r"90\%")],
    "commas": [("1234", "(1,234)"), ("(1,234)", "1234"), ("(1,2)", "(2,1)"), ("1,2", "(1,2)")],
    "bases": [("42", "42_8"), ("10", "10_2"), ("2516_8", "2516_9"), ("2516_8", "2516"), ("10_2", "2"),
        ("1358", "2516_9")],
    "chains": [("5", "1=5"), ("1", "1=2=3=1"), ("x=5", "y=5"), ("11", "x = 5+5+1 = 7 = 11"), ("y=2x+1", "y=2x-1")],
    "sets and intervals": [
        ("(0,1)", r"\{0,1\}"), ("[0,1]", "(0,1)"), ("[0,1]", "[0,1)"), (r"\{10^{-7}\}", r"\{2 \cdot 10^{-7}\}"),
        (r"\{0.0000001\}", r"\{0.0000002\}"), ("3, 5", "3, 5, 7"), (r"x \in [2,3]", r"y \in [2,3]"), ("2x<6", "x>3"),
        (r"(1,2) \cup (3,4)", r"(1,2) \cup (3,4]"), (r"\{1,1,2\}", r"\{1,2,2\}"),
    ],
    "case": [("a", "A"), ("x+1", "X+1"), ("p - q", "P - q"), ("x", "x'")],
    "other": [("5", "5!"), ("42", "-42"), ("0.5", "0.500002"), ("1.732", r"\sqrt{3}"), ("6", "2(4)"),
        ("42", r"42 \ldots")],
}  # fmt: skip

EQUAL = [
    ("10", r"\$10"), (r"15\mbox{ cm}^2", "15"), (r"15\mbox{ cm}^2", "15 square centimeters"), (r"15\text{ cm}", "15cm"),
    ("1/3", r"\frac{1}{3} \text{meters}"), (r"90^\circ", "90"), ("90", r"90^\circ"), ("x = 5", "5"), ("5", "x = 5.0"),
    (r"10\%", "10"), (r"10\%", "0.1"), ("0.6", r"60\%"), ("2", "10_2"), ("2516_8", "2516_{8}"), ("42_{10}", "42"),
    (r"x \in [-2,7)", r"-2 \le x < 7"), (r"(3,\infty)", "x>3"), ("x^2+y^2=4", "y^2+x^2-4=0"), ("2x<6", "x<3"),
    ("y=2x+3", "2x-y+3=0"), ("1,2,3", r"3, 2 \text{ and } 1"), (r"\{1,2\}", r"\{2,1\}"), (r"\$32,348", "32348"),
    (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}"), (r"(-\infty,1) \cup (2,3]", r"(2,3]\cup(-\infty,1)"),
    (r"\begin{pmatrix} 1 & 0.5 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & \frac12 \\ 3 & 4 \end{pmatrix}"),
    ("f(x)=x^2+1", "x^2+1"), ("f(x)=(x+1)^2", "f(x)=x^2+2x+1"), ("5", "2+3=5"), ("5", "x=2+3=5"),
    (r"\text{Even}", "even"),
    (r"\frac{3}{4}", r"{3 \over 4}"), (r"\frac{3}{4}", r"\nicefrac{3}{4}"), (r"\frac{3}{4}", "3⁄4"), ("3.5", "3½"),
    (r"6\sqrt{3}", "6√3"), ("x^{10}", "x¹⁰"), (r"\pm 3", "±3"), ("42", r"\color{red}{42}"), ("42", "42\u200b"),
    ("42", "= 42"), ("42", "f(3) = 42"), ("42", r"\text{Total cost} = 42"), ("42", "AB = 42"), ("42", r"\theta = 42"),
    ("1.5", "1,5"), ("0.75", "0.7500000001"), (r"\sqrt{3}", "1.7320508"), (r"\frac{2}{3}", "0.6666666"),
    (r"\frac{2}{3}", "0.6666667"), ("1.732", r"\sqrt{3} \approx 1.732"), ("120", r"\Gamma(6)"),
    (r"\sqrt{3}", r"\sqrt{3} \approx 1.732"), ("x=5, y=3", "5, 3"), ("x=5, y=3", "y=3, x=5"), ("12", r"\gcd(12,180)"),
    (r"\lfloor \frac{n}{2} \rfloor", r"\lfloor \frac{n+2}{2} \rfloor - 1"),
    (r"\lceil x \rceil", r"-\lfloor -x \rfloor"),
    (r"5\text{ dozen}", r"5\text{ dozen}"), (r"5\text{ dozen}", "5"), (r"5\text{ kW}", r"5\text{ kW}"),
    ("0.2857142857", r"\frac{2}{7}"), (r"\approx 8.24 \text{ mph}", "8.24"), ("abc", "bca"),
    (r"\text{(A)}", "A"), ("1234", "1,234"), ("1234", "1{,}234"), ("1234", "1 {, }234"),
    ("20:34", r"08:34 \text{ P.M.}"),
    ("1/3", "0.3333333"),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"), (r"\sin^2 x+\cos^2 x", "1"),
    (r"\cos\frac{\pi}{5}", r"\frac{1+\sqrt{5}}{4}"),
    (r"\ln(x^2)", r"2\ln x"), (r"1\frac{1}{2}", "3/2"), (r"0.\overline{12}", r"\frac{12}{99}"), ("6", "2(3)"),
    (r"\frac{(n+1)!}{n!}", "n+1"), (r"\sec x", r"\frac1{\cos x}"), (r"\frac{x^2-1}{x-1}", "x+1"), (r"e^{i\pi}", "-1"),
    (r"\sin 30^\circ", r"\frac12"), ("|x-3|", "|3-x|"), (r"\frac{\sqrt{3}}{3}", r"\frac{\sqrt{3}}{3} \approx 0.577"),
    (r"(p,q)=(3,2)", "(3,2)"), ("1000.99", "1000,99"), ("x >= 5", r"x \geq 5"), ("2+3i", "3i+2"), ("10!", "3628800"),
]  # fmt: skip


def verdicts(pairs: list[tuple[str, str]]) -> list[str]:
    responses = [f"\\boxed{{{answer}}}" for _, answer in pairs]
    return [v.verdict.value for v in verify_batch(responses, [gold for gold, _ in pairs], VerifyConfig())]


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_answers_are_not_accepted(kind: str) -> None:
    found = verdicts(WRONG[kind])
    assert [pair for pair, verdict in zip(WRONG[kind], found, strict=True) if verdict == "correct"] == []
    assert {"timeout", "error"}.isdisjoint(found)


def test_equal_answers_are_accepted() -> None:
    found = verdicts(EQUAL)
    assert [pair for pair, verdict in zip(EQUAL, found, strict=True) if verdict != "correct"] == []


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{41} or \boxed{42}", r"\boxed{41}, \boxed{42}", r"\boxed{41 or 42}", r"\boxed{\{41, 42\}}",
        r"\boxed{\text{either } 41 \text{ or } 42}", r"\boxed{42 \pm 1}", r"\boxed{42}. No, wait: \boxed{41}",
        "The answer is not 42.", "The answer isn't 42", "The answer is either 41 or 42.", "The answer is 41 or 42.",
        "The answer might be 42.", "I do not believe that the answer is 42.", "The answer 42 is wrong.",
        "The answer is anything but 42.", "I doubt it is 42.", "The answer is definitely different from 42.",
        "Nobody gets 42.", "The answer is 42? No.", "If the answer were 42, we would be done.", "We reject 42.",
        "The answer is at least 42.", "Is the answer 42?", "The answer is approximately 42.", "The wrong answer is 42.",
        "It's false that the answer is 42.", "It would be false to say that the answer is 42.", "42? No.",
        "Suppose the answer is 42.", "They say the answer is 42.", "The answer is 42. Wait, that is wrong.",
        "The answer is 42. No.", "The answer is half of 42.", "The answer is 42 thousand.", "The answer is 42 squared.",
        "The answer is 42 divided by two.", "The answer is 42 plus one.", "Answer: The opposite is 42.",
        "My first answer is 42, my second answer is 43.",
    ],
)  # fmt: skip
def test_a_hedged_or_denied_answer_is_no_answer(response: str) -> None:
    (found,) = verify_batch([response], ["42"])
    assert found.reward == 0.0


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{41}. No, wait: \boxed{42}", "The answer is 42", "#### 42", r"\boxed{42} and again \boxed{42}",
        "I did not see it at first. So the answer is 42.", "It is not 41, so the answer is 42.", "**Answer:** 42",
        "Final Answer: The final answer is $42$. I hope it is correct.", "Thus, the answer is **42**.", "Answer = 42",
        "The answer is 42 apples.", "Hence the correct answer is \\(42\\).", "Adding up, the answer is 42.", "42",
        "We have 40+2. #### 42", "The answer is: $42", "The answer is x = 42.", "answer: $42$ dollars",
        "Final Answer: The volume of $ABCD$ is 42. I hope it is correct.", "Answer: The largest $n$ is 42.",
        "Is 6*7 really 42? Yes. The answer is 42.", "The answer is 42 because 6 times 7 is 42.",
    ],
)  # fmt: skip
def test_the_last_word_counts(response: str) -> None:
    (found,) = verify_batch([response], ["42"])
    assert found.verdict == "correct"


def test_a_list_is_right_where_the_gold_is_that_list() -> None:
    assert verdicts([("41, 42", "42 or 41")]) == ["correct"]
    assert [v.reward for v in verify_batch([r"\boxed{2} and \boxed{1}"], ["1, 2"])] == [1.0]


def test_what_may_stand_beside_a_box_and_what_equals_beside_its_wrong_neighbours() -> None:
    beside = [
        r"$\boxed{5}^\circ$", r"$\boxed{5}\text{ cm}$", r"$3+\boxed{5}=8$", "- \\boxed{5}", "so $x$ - \\boxed{5}",
        r"\boxed{5}!", r"$\boxed{5}x^2$", r"$\boxed{5}\%$", "Rule\n---\n\\boxed{5}", r"$\frac{1}{\boxed{5}} = 0.2$",
    ]  # fmt: skip
    equal = [
        ("(3,7)", "(x, y) = (3, 7)"), ("(3,7)", "(s, k) = (3, 7)"), ("(1,2)", "1 < x < 2"), ("17", r"17 + \ln 1"),
        (r"\log_2 9", r"\frac{2\ln 3}{\ln 2}"), ("1234", r"1\ 234"), ("1,2", r"1 \quad 2"),
        (r"\frac{15}{4}", r"3 \cdot \frac{5}{4}"), ("|x-2||x+2|", "|x^2-4|"),
        (r"\lfloor \frac{n^2}{4} \rfloor + 1", r"\lfloor \frac{n^2+4}{4} \rfloor"),
    ]  # fmt: skip
    assert [verdict.reward for verdict in verify_batch(beside, ["5"] * len(beside))] == [1.0] * len(beside)
    found = verify_batch([f"\\boxed{{{answer}}}" for _, answer in equal], [gold for gold, _ in equal])
    assert [pair for pair, verdict in zip(equal, found, strict=True) if verdict.reward == 0] == []


def test_units_come_from_the_list_and_never_from_letters_that_may_be_variables() -> None:
    assert unit_name("square feet") == unit_name(r"\text{ft}^2") == "ft^2"
    assert unit_name("miles per hour") == unit_name("mph") == "mi/h"
    assert [unit_name(name) for name in ("i", "e", "x", "n", "is wrong", "h^2", "cm^4")] == [""] * 7
    assert split_known_unit("10 m") == ("10 m", "")
    assert split_known_unit("10 m", gold_unit="m") == ("10", "m")
    assert split_known_unit(r"10\text{ flarns}", trusted=True) == ("10", "flarns")
    assert split_known_unit(r"10\text{ flarns}") == (r"10\text{ flarns}", "")


def test_decimals_have_a_relative_tolerance_and_exact_forms_none() -> None:
    assert decide("0.0000001", "0.0000002", 1e-6) is False
    assert decide("33.3", r"\frac{100}{3}", 1e-2) is True
    assert decide("33", r"\frac{100}{3}", 1e-2) is False


def test_a_number_that_a_decimal_can_write_is_not_rounded() -> None:
    """A tolerance above the default is the user's word that rounded values are meant."""
    wrong = [("1{,}234", "1234.0001"), ("1", "0.9999999999"), (r"\frac{1}{8}", "0.12500001"), ("1+1", "2.0000001")]
    wrong += [("x+1", "x+1.0000001"), (r"\{1, 2\}", r"\{1, 2.0000001\}")]
    right = [("12", "12.0"), (r"\frac{1}{8}", "0.125"), (r"\frac{1}{3}", "0.3333333333"), (r"\sqrt{2}", "1.41421356")]
    assert set(verdicts(wrong)) == {"incorrect"}
    assert set(verdicts(right)) == {"correct"}
    assert decide("12", "12.1", 1e-2) is True


def test_math_is_as_lenient_as_it_was_for_campaigns_that_name_it() -> None:
    lenient = VerifyConfig(verifier="math")
    golds, answers = ["2^{100}-1", "|x-3|", "3", "0.05"], ["2^{100}", "3-x", "3 i", r"0.05\%"]
    found = verify_batch([f"\\boxed{{{answer}}}" for answer in answers], golds, lenient)
    assert [(v.verdict.value, v.verifier) for v in found] == [("correct", "math")] * 4

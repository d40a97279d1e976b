r"""Public test cases of answer verifiers, and datasets against themselves, where the shared data is present."""

import random
from typing import Any

import pytest

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.verification import verify_batch
from tests.shared_data import DATA, rows_of, there

DATASETS = ("gsm8k_test", "math_train", "math500", "olympiadbench_en_text", "minerva_math")
labelled = pytest.mark.parametrize("name", there("verifier_cases"))

#: Labels we do not follow, each explained in docs/verification-evidence.md.
DISAGREEMENTS = {
    "v0031", "v0032", "v0133", "v0139", "v0172", "v0187", "v0217", "v0253", "v0263", "v0299", "v0306", "v0315",
    "v0324", "v0325", "v0362",
    "v0363", "v0368", "v0402", "v0405", "v0407", "v0408",
}  # fmt: skip

#: Wrong answers that plain math-verify with its defaults accepts, all of them, read the same way (it agrees with 408 of
#: the 448).
PLAIN_FALSE_POSITIVES = {
    "v0031", "v0032", "v0299", "v0306", "v0346", "v0347", "v0418", "v0421", "v0443", "v0444", "v0445",
}  # fmt: skip


def load(name: str) -> list[dict[str, Any]]:
    return rows_of(DATA / f"{name}.jsonl")


def box(case: dict[str, Any]) -> str:
    return f"\\boxed{{{case['predicted']}}}" if case["form"] == "answer" else str(case["predicted"])


#: Labels that strict accepts although they say wrong, each explained in docs/verification-evidence.md.
STRICT_ACCEPTS = {"v0031", "v0032", "v0187", "v0299", "v0306", "v0346"}


@pytest.mark.slow
@labelled
def test_labelled_cases_by_strict(name: str) -> None:
    cases = load(name)
    verdicts = verify_batch([box(case) for case in cases], [case["gold"] for case in cases])
    found = [verdict.verdict == "correct" for verdict in verdicts]
    accepted = {case["id"] for case, said in zip(cases, found, strict=True) if said and not case["expected"]}
    assert accepted == STRICT_ACCEPTS
    assert sum(said == case["expected"] for case, said in zip(cases, found, strict=True)) >= 405


@pytest.mark.slow
@labelled
def test_labelled_cases(name: str) -> None:
    cases = load(name)
    lenient = VerifyConfig(verifier="math")
    verdicts = verify_batch([box(case) for case in cases], [case["gold"] for case in cases], lenient)
    found = [verdict.verdict == "correct" for verdict in verdicts]
    wrong = {case["id"] for case, correct in zip(cases, found, strict=True) if correct != case["expected"]}
    false_positives = sum(correct and not case["expected"] for case, correct in zip(cases, found, strict=True))
    assert wrong <= DISAGREEMENTS, wrong - DISAGREEMENTS
    assert len(cases) - len(wrong) >= 425
    assert false_positives < len(PLAIN_FALSE_POSITIVES)
    assert not any(verdict.verdict == "error" for verdict in verdicts)


@labelled
def test_plain_math_verify_has_more_false_positives(name: str) -> None:
    """Plain math-verify still accepts the wrong answers listed above, this verifier fewer of them."""
    from math_verify import parse, verify

    cases = [case for case in load(name) if case["id"] in PLAIN_FALSE_POSITIVES]
    for case in cases:
        gold = case["gold"] if case["form"] == "raw" else f"\\boxed{{{case['gold']}}}"
        assert verify(parse(gold), parse(box(case))) != case["expected"], case["id"]
    ours = verify_batch([box(case) for case in cases], [case["gold"] for case in cases])
    assert sum(verdict.verdict == "correct" for verdict in ours) < len(cases) == 11


@pytest.mark.parametrize("name", there(*DATASETS))
def test_answers_verify_against_themselves(name: str) -> None:
    answers = [row["answer"] for row in load(name) if row["answer"].strip()]
    answers = random.Random(0).sample(answers, min(len(answers), 500))
    verdicts = verify_batch([f"So it is \\boxed{{{answer}}}." for answer in answers], answers)
    assert [a for a, v in zip(answers, verdicts, strict=True) if v.verdict != "correct"] == []


def test_minerva_e_notation() -> None:
    golds = ["1e-8", "4.46e19", "9e11", "6.5e-2"]
    right = [r"\boxed{10^{-8}}", r"\boxed{4.46 \times 10^{19}}", r"\boxed{900000000000}", r"\boxed{0.065}"]
    wrong = [r"\boxed{10^{-7}}", r"\boxed{4.46 \times 10^{18}}", r"\boxed{9}", r"\boxed{6.5e-3}"]
    assert [v.verdict for v in verify_batch(right, golds)] == ["correct"] * 4
    assert [v.verdict for v in verify_batch(wrong, golds)] == ["incorrect"] * 4

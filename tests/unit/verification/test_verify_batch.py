r"""``verify_batch`` on answers that need no worker, and its promises to callers."""

import contextlib
import subprocess
import sys

import pytest

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ConfigError, VerificationError
from hacrl_core.verification import Verdict, VerdictKind, batch, check_error_share, verify_batch
from tests.patience import patience


def kinds(responses: list[str], golds: list[str], **config: object) -> list[str]:
    return [v.verdict.value for v in verify_batch(responses, golds, VerifyConfig(**config))]  # type: ignore[arg-type]


def test_order_and_rewards() -> None:
    verdicts = verify_batch([r"\boxed{4}", "", r"\boxed{3}", r"\boxed{4}"], ["4", "4", "4", "5"])
    assert [v.verdict for v in verdicts] == ["correct", "unparseable", "incorrect", "incorrect"]
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0, 0.0]
    assert verdicts[0].extracted_answer == "4"
    assert verdicts[0].verifier == "strict"


def test_empty_batch() -> None:
    assert verify_batch([], []) == []


def test_lengths_must_agree() -> None:
    with pytest.raises(ConfigError, match="2 responses but 1 golds"):
        verify_batch(["a", "b"], ["a"])


def test_an_empty_gold_is_an_error_and_no_zero() -> None:
    assert kinds([r"\boxed{4}"], [" "]) == ["error"]


def test_exact() -> None:
    assert kinds([r"\boxed{Even}", r"\boxed{odd}", "12", "4"], [r"\text{even}", "even", "12", "4.0"],
    verifier="exact") == [
        "correct", "incorrect", "correct", "incorrect",
    ]  # fmt: skip


def test_numeric() -> None:
    responses = [r"\boxed{1.62}", r"\boxed{1.7}", r"\boxed{1.6e-8}", r"\boxed{60\%}", r"\boxed{x}"]
    golds = ["1.6", "1.6", "1.6e-8", "0.6", "1"]
    assert kinds(responses, golds, verifier="numeric", tolerance=0.02) == [
        "correct",
        "incorrect",
        "correct",
        "correct",
        "unparseable",
    ]
    assert kinds([r"\boxed{1}"], ["word"], verifier="numeric") == ["error"]


def test_box_only_when_fallbacks_are_empty() -> None:
    assert kinds(["the answer is 4"], ["4"]) == ["correct"]
    assert kinds(["the answer is 4"], ["4"], fallbacks=()) == ["unparseable"]


def test_progress_counts_responses_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    verify_batch(
        [r"\boxed{1}"] * 3 + [r"\boxed{2}"], ["1"] * 4, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (4, 4)


def test_error_share() -> None:
    def verdict(kind: VerdictKind) -> Verdict:
        return Verdict(0.0, kind, "", 0.0, "math")

    good = [verdict(VerdictKind.INCORRECT)] * 10
    check_error_share([*good, verdict(VerdictKind.ERROR)], VerifyConfig(max_error_share=0.0))
    with pytest.raises(VerificationError, match="2 of 12"):
        check_error_share([*good, *[verdict(VerdictKind.ERROR)] * 2], VerifyConfig(max_error_share=0.1))


class TwoRuns:
    """A pool in which one answer runs out of time beside the others; ``late`` says what it is when it runs alone."""

    def __init__(self, late: str) -> None:
        self.late, self.runs = late, []  # type: ignore[var-annotated]

    def run(self, groups, limits, preload, on_result) -> None:  # type: ignore[no-untyped-def]
        self.runs.append((limits.cpu_seconds, limits.workers, [len(group.keys) for group in groups]))
        for group in groups:
            for key, (_, answer) in zip(group.keys, group.pairs, strict=True):
                slow = "z" in answer
                verdict = ("timeout" if len(self.runs) == 1 else self.late) if slow else "incorrect"
                on_result(key, {"verdict": verdict, "milliseconds": 1.0})


@pytest.mark.parametrize("late", ["correct", "timeout"])
def test_what_runs_out_of_time_beside_others_is_tried_again_alone(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TwoRuns(late)
    monkeypatch.setattr(batch, "shared_pool", lambda: contextlib.nullcontext(pool))
    responses = [r"\boxed{a+b}", r"\boxed{z+b}", r"\boxed{z+b}"]
    seen: list[tuple[int, int]] = []
    verdicts = verify_batch(
        responses,
        ["x+y"] * 3,
        VerifyConfig(timeout_seconds=1.5, workers=4),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert [v.verdict.value for v in verdicts] == ["incorrect", late, late]
    assert pool.runs == [(1.5, 4, [2]), (3.0, 1, [1])]
    assert seen[-1] == (3, 3)


def test_light_import_and_no_worker_for_what_text_and_numbers_decide() -> None:
    code = (
        "import sys, hacrl_core.verification as v;"
        "out = v.verify_batch([f'so \\\\boxed{{{i}}}' for i in range(400)], ['7'] * 400);"
        "from hacrl_core.verification import pool;"
        "assert pool._pool is None and sum(x.reward for x in out) == 1;"
        "assert not {'torch', 'sympy', 'math_verify'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60))

"""Wrong answers written by hand, by kind (gold and answer in ``wrong_answers.json``): strict accepts none of them."""

import json
from pathlib import Path

import pytest

from hacrl_core.verification import verify_batch

WRONG = json.loads(Path(__file__).with_name("wrong_answers.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_strict_accepts_no_wrong_answer(kind: str) -> None:
    golds = [gold for gold, _ in WRONG[kind]]
    as_they_are = kind == "sentences"
    answers = [text if as_they_are or "\\boxed" in text else f"\\boxed{{{text}}}" for _, text in WRONG[kind]]
    found = verify_batch(answers, golds)
    assert [pair for pair, verdict in zip(WRONG[kind], found, strict=True) if verdict.reward > 0] == []
    assert {verdict.verdict.value for verdict in found} <= {"incorrect", "unparseable"}

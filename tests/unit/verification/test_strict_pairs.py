r"""Generated pairs whose truth is known by construction; ``benchmarks/verify_truth.py`` judges many more of them."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.verify_pairs import OWN_GOLDS, Gold, Pair, equal_pairs, wrong_pairs
from hacrl_core.verification import verify_batch

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


def own_golds() -> list[Gold]:
    return [Gold(text) for text in OWN_GOLDS]


def dataset_golds(count: int) -> list[Gold]:
    path = DATA / "math_train.jsonl"
    if not path.exists():
        pytest.skip("the dataset math_train.jsonl is not beside the checkout")
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    return [Gold(row["answer"], "percent" in row["problem"]) for row in random.Random(5).sample(rows, count)]


def misjudged(pairs: list[Pair]) -> list[Pair]:
    verdicts = verify_batch([pair.response for pair in pairs], [pair.gold for pair in pairs])
    return [pair for pair, v in zip(pairs, verdicts, strict=True) if (v.verdict == "correct") != pair.right]


def test_every_kind_of_step_is_made_from_our_own_golds() -> None:
    kinds = {pair.kind for pair in wrong_pairs(own_golds(), 0)}
    assert kinds >= {
        "plus one", "sign", "letter", "unit", "exponent", "interval end", "element", "base", "percent", "chain", "case",
        "negation", "hedge", "words", "tiny", "huge", "bend", "thousands", "set for tuple",
    }  # fmt: skip


def test_a_small_step_away_from_our_own_golds_is_wrong() -> None:
    assert misjudged(list(wrong_pairs(own_golds(), 0))) == []


def test_our_own_golds_in_other_forms_are_right() -> None:
    assert misjudged(list(equal_pairs(own_golds(), 0))) == []


def test_a_small_step_away_from_golds_of_a_dataset_is_wrong() -> None:
    pairs = list(wrong_pairs(dataset_golds(150), 1))
    assert misjudged(random.Random(6).sample(pairs, 300)) == []


def test_golds_of_a_dataset_in_other_forms_are_right() -> None:
    assert misjudged(list(equal_pairs(dataset_golds(200), 1))) == []

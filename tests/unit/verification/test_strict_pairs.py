r"""Generated pairs whose truth is known by construction; ``benchmarks/verify_truth.py`` judges many more of them."""

import random

import pytest

from benchmarks.verify_attacks import attacks
from benchmarks.verify_pairs import OWN_GOLDS, Gold, Pair, equal_pairs, wrong_pairs
from hacrl_core.verification import verify_batch
from hacrl_core.verification.assertion import gives_answer
from hacrl_core.verification.extraction import extract_answer
from tests.shared_data import DATA, rows_of, there


def own_golds() -> list[Gold]:
    return [Gold(text) for text in OWN_GOLDS]


def dataset_golds(name: str, count: int) -> list[Gold]:
    rows = random.Random(5).sample(rows_of(DATA / f"{name}.jsonl"), count)
    return [Gold(row["answer"], "percent" in row["problem"]) for row in rows]


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


def attacked(golds: list[Gold], seed: int) -> list[Pair]:
    found = attacks([(gold.text, gold.percent) for gold in golds], seed)
    return [Pair(*attack, False) for attack in dict.fromkeys(found)]


def test_no_attack_on_our_own_golds_is_accepted() -> None:
    more = [Gold(text) for text in ("12,9", "0.125", "7.25", r"\frac{1}{7}", r"5\text{ cm}", "24", "1729", "0")]
    pairs = attacked([*own_golds(), *more], 0)
    assert {pair.kind for pair in pairs} >= {
        "hidden", "named", "prose", "sentence", "how many", "plus minus", "rounded chain", "ellipsis", "several boxes",
        "look-alike", "zero width", "scientific", "nearly", "prefix", "rounding functions", "logarithm", "radical",
        "degrees", "named order", "mixed", "factorial", "arguments", "letters", "last digit", "fraction", "repeating",
        "interval", "order", "matrix", "conjugate", "list as decimal", "denied",
    }  # fmt: skip
    assert misjudged(pairs) == []


@pytest.mark.parametrize("name", there("math_train"))
def test_golds_of_a_dataset(name: str) -> None:
    r"""A small step away from them is wrong, other forms are right, and the text of solutions leaves its box standing.

    Of 7,500 solutions two lose their answer: ``355\boxed{680}`` and ``11\cdot\boxed{2}``. Two have empty boxes.
    """
    wrong = list(wrong_pairs(dataset_golds(name, 150), 1))
    assert misjudged(random.Random(6).sample(wrong, 300)) == []
    assert misjudged(random.Random(7).sample(attacked(dataset_golds(name, 150), 2), 400)) == []
    assert misjudged(list(equal_pairs(dataset_golds(name, 200), 1))) == []
    solutions = [row["solution"] for row in rows_of(DATA / f"{name}.jsonl")]
    found = [(extract_answer(text, ()), text) for text in solutions]
    assert sum(bool(answer.answer) and not gives_answer(answer, text) for answer, text in found) <= 2

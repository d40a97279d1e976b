"""The real datasets, where a copy lies beside the project: our extraction agrees with the answers others extracted."""

import json
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hacrl_core.config.problems import Columns, DatasetProblems
from hacrl_core.problems import PRESETS, load_problems, within_length
from hacrl_core.rendering import render_prompt

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"

# file: rows kept, and how our presets' columns are called in the copies
FILES = {
    "math_train": (7498, "math", {"answer": "solution", "tags": {"level": "level", "subject": "type"}}),
    "gsm8k_train": (7473, "gsm8k", {"answer": "solution"}),
    "gsm8k_test": (1319, "gsm8k_test", {"answer": "solution"}),
    "math500": (500, "math500", {"tags": {"level": "level", "subject": "type"}}),
    "olympiadbench_en_text": (675, "olympiadbench", {"answer": "raw_final_answer", "tags": {"subject": "subfield"}}),
    "minerva_math": (272, "minerva_math", {"tags": {"subject": "type"}}),
}


def load(name):
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"no copy of {name} beside the project (shared/data)")
    kept, preset, columns = FILES[name]
    answer_format = PRESETS[preset].answer_format
    found = load_problems(DatasetProblems(path=path, columns=Columns(id="id", **columns), answer_format=answer_format))
    return kept, found, [json.loads(line) for line in path.read_text().split("\n") if line]


@pytest.mark.parametrize("name", FILES)
def test_extracted_answers_agree(name):
    kept, found, rows = load(name)
    assert len(found.problems) == kept
    assert sum(found.left_out.values()) == len(rows) - kept
    golds = {row["id"]: row["answer"].strip() for row in rows}
    assert {p.problem_id: p.answer for p in found.problems} == {name: gold for name, gold in golds.items() if gold}


def test_math_and_math500_share_their_tags():
    _, train, _ = load("math_train")
    _, test, _ = load("math500")
    assert {p.tags["level"] for p in test.problems} == set("12345")
    assert {p.tags["level"] for p in train.problems} <= {*"12345", "?"}
    assert {p.tags["subject"] for p in test.problems} == {p.tags["subject"] for p in train.problems}


def test_length_filter_with_real_renderers():
    _, found, _ = load("math500")
    letters = sorted({letter for p in found.problems for letter in p.messages[0]["content"]})
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<unk>", *letters])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    plain, framed = (
        partial(render_prompt, tokenizer, chat_template=t + "{{ messages[0].content }}") for t in ("", "Question: ")
    )
    kept = within_length(found.problems, {"plain": plain, "framed": framed}, 300)
    expected = [p for p in found.problems if len(p.messages[0]["content"]) + len("Question: ") <= 300]
    assert list(kept.problems) == expected
    assert kept.too_long["framed"] == 500 - len(expected) >= kept.too_long["plain"] > 0

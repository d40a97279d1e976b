"""The readers of the public datasets: samples of our own in their forms everywhere, the whole files where they are."""

import json
from functools import partial

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hacrl_core.config.problems import Columns, DatasetProblems
from hacrl_core.problems import PRESETS, load_problems, within_length
from hacrl_core.rendering import render_prompt
from tests.shared_data import DATA, rows_of, there

# file: rows kept, and how our presets' columns are called in the copies
FILES = {
    "math_train": (7498, "math", {"answer": "solution", "tags": {"level": "level", "subject": "type"}}),
    "gsm8k_train": (7473, "gsm8k", {"answer": "solution"}),
    "gsm8k_test": (1319, "gsm8k_test", {"answer": "solution"}),
    "math500": (500, "math500", {"tags": {"level": "level", "subject": "type"}}),
    "olympiadbench_en_text": (675, "olympiadbench", {"answer": "raw_final_answer", "tags": {"subject": "subfield"}}),
    "minerva_math": (272, "minerva_math", {"tags": {"subject": "type"}}),
}

# Rows of our own in the form of each file; "answer" is what must be extracted, an empty one is left out.
MATH = [
    ("Add three and four.", r"Three and four is $3+4=\boxed{7}$.", "7", "Level 1", "Algebra"),
    ("Halve x over y.", r"First $\boxed{x}$, so $\boxed{\frac{x}{2y}}$.", r"\frac{x}{2y}", "Level ?", "Algebra"),
    ("Name the set of one and {two}.", r"It is $\boxed{\{1, 2\}}$.", r"\{1, 2\}", "Level 5", "Number Theory"),
    ("Say nothing.", r"So the answer is $\boxed{}$.", "", "Level 2", "Number Theory"),
]  # fmt: skip
GSM8K = [
    ("Ann has 2 pens and buys 3.", "She has 2+3=<<2+3=5>>5 pens.\n#### 5", "5"),
    ("Bob sells 1,200 nails for $1 each.", "He gets 1200*1=<<1200*1=1200>>1200 dollars.\n#### 1,200", "1200"),
    ("It cools from 2 to 5 below.", "2-7=-5\n#### -5", "-5"),
]
SAMPLES = {
    "math_train": [{"problem": p, "solution": s, "answer": a, "level": v, "type": t} for p, s, a, v, t in MATH],
    "gsm8k_train": [{"problem": p, "solution": s, "answer": a} for p, s, a in GSM8K],
    "gsm8k_test": [{"problem": p, "solution": s, "answer": a} for p, s, a in GSM8K],
    "math500": [{"problem": p, "answer": a or "0", "level": 4, "type": t} for p, _, a, _, t in MATH],
    "olympiadbench_en_text": [
        {"problem": "Count to $n$ thrice.", "raw_final_answer": ["$3 n$"], "answer": "3 n", "subfield": "Algebra"},
        {"problem": "Twice one?", "raw_final_answer": ["2"], "answer": "2", "subfield": "Number Theory"},
    ],
    "minerva_math": [{"problem": "How far, in cm?", "answer": "1.6e-3", "type": "Astronomy"}],
}  # fmt: skip


def load(name, path):
    _, preset, columns = FILES[name]
    answer_format = PRESETS[preset].answer_format
    return load_problems(DatasetProblems(path=path, columns=Columns(id="id", **columns), answer_format=answer_format))


@pytest.fixture
def sample(tmp_path):
    """Write the sample of a file and return its path."""

    def write(name):
        path = tmp_path / f"{name}.jsonl"
        rows = [{"id": f"{name}-{i}", **row} for i, row in enumerate(SAMPLES[name])]
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        return path

    return write


def check_answers(name, path, kept):
    found, rows = load(name, path), rows_of(path)
    assert len(found.problems) == kept
    assert sum(found.left_out.values()) == len(rows) - kept
    golds = {row["id"]: row["answer"].strip() for row in rows}
    assert {p.problem_id: p.answer for p in found.problems} == {name: gold for name, gold in golds.items() if gold}


def check_tags(train, test):
    assert {p.tags["level"] for p in test.problems} <= set("12345")
    assert {p.tags["level"] for p in train.problems} <= {*"12345", "?"}
    assert {p.tags["subject"] for p in test.problems} == {p.tags["subject"] for p in train.problems}


def check_lengths(found, limit):
    letters = sorted({letter for p in found.problems for letter in p.messages[0]["content"]} | set("Question: "))
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<unk>", *letters])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    plain, framed = (
        partial(render_prompt, tokenizer, chat_template=t + "{{ messages[0].content }}") for t in ("", "Question: ")
    )
    kept = within_length(found.problems, {"plain": plain, "framed": framed}, limit)
    expected = [p for p in found.problems if len(p.messages[0]["content"]) + len("Question: ") <= limit]
    assert list(kept.problems) == expected
    assert kept.too_long["framed"] == len(found.problems) - len(expected) >= kept.too_long["plain"] > 0


@pytest.mark.parametrize("name", FILES)
def test_extracted_answers_agree_in_samples(name, sample):
    check_answers(name, sample(name), sum(bool(row["answer"]) for row in SAMPLES[name]))


def test_math_and_math500_share_their_tags_in_samples(sample):
    train, test = (load(name, sample(name)) for name in ("math_train", "math500"))
    check_tags(train, test)
    assert {p.tags["level"] for p in train.problems} == {"1", "?", "5"}


def test_length_filter_with_samples(sample):
    found = load("math500", sample("math500"))
    longest = max(len(p.messages[0]["content"]) for p in found.problems)
    check_lengths(found, longest - 1)


@pytest.mark.parametrize("name", there(*FILES))
def test_whole_files(name):
    kept, _, _ = FILES[name]
    check_answers(name, DATA / f"{name}.jsonl", kept)
    if name == "math500":
        found = load(name, DATA / f"{name}.jsonl")
        check_tags(load("math_train", DATA / "math_train.jsonl"), found)
        check_lengths(found, 300)

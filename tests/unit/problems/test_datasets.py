"""Files of a user's own: columns, formats, filters, names, digests."""

import csv
import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from hacrl_core.config.problems import ArithmeticProblems, DatasetProblems, PresetProblems, ProblemsConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems import PRESETS, load_problems
from hacrl_core.problems.datasets import extract_answer, last_boxed
from hacrl_core.problems.presets import resolve_preset

ROWS = [
    {"n": "a/1", "q": "What is $1+1$?", "a": "2", "level": "Level 1"},
    {"n": "a/2", "q": "Wie groß ist 007 in {braces}?\nZweite Zeile,\u2028 „quoted“", "a": "007", "level": "Level 5"},
    {"n": "a/3", "q": "No answer here", "a": " ", "level": "Level 2"},
]
COLUMNS = {"problem": "q", "answer": "a", "id": "n", "tags": {"level": "level"}}


def config(**settings) -> DatasetProblems:
    return TypeAdapter(ProblemsConfig).validate_python({"kind": "dataset", **settings})


def write(folder, kind, rows=ROWS):
    path = folder / f"own.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_every_file_type_gives_the_same_problems(tmp_path, kind):
    found = load_problems(
        config(path=write(tmp_path, kind), columns=COLUMNS, system="Be brief.", prompt="Q: {problem} \\boxed{}")
    )
    assert [p.problem_id for p in found.problems] == ["a-1", "a-2"]
    assert found.problems[1].answer == "007"
    assert found.problems[1].tags == {"level": "5"}
    assert [m["role"] for m in found.problems[0].messages] == ["system", "user"]
    assert found.problems[1].messages[1]["content"] == f"Q: {ROWS[1]['q']} \\boxed{{}}"
    assert found.left_out == {"no answer": 1}
    assert found.problems[0].source == "own"
    reference = load_problems(
        config(path=write(tmp_path, "jsonl"), columns=COLUMNS, system="Be brief.", prompt="Q: {problem} \\boxed{}")
    )
    assert found.content_digest == reference.content_digest


def test_digest_follows_everything_that_matters(tmp_path):
    def digest(rows=ROWS, **settings):
        return load_problems(config(path=write(tmp_path, "jsonl", rows), columns=COLUMNS, **settings)).content_digest

    base = digest()
    assert digest() == base
    assert digest(rows=[*ROWS, {"n": "x", "q": "empty", "a": "", "level": ""}]) == base  # a row that is not used
    changed = [dict(ROWS[0], a="3"), *ROWS[1:]]
    others = [
        digest(rows=changed),
        digest(rows=ROWS[::-1]),
        digest(system="s"),
        digest(prompt="{problem}"),
        digest(source="other"),
    ]
    assert len({base, *others}) == 6


def test_several_files_by_pattern(tmp_path):
    for part, row in enumerate(ROWS[:2]):
        (tmp_path / f"part-{part}.jsonl").write_text(json.dumps(row))
    found = load_problems(config(path=tmp_path / "part-*.jsonl", columns=COLUMNS))
    assert len(found.problems) == 2


def test_chat_messages_from_a_column(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}]
    path = write(tmp_path, "parquet", [{"chat": messages, "a": 2}])
    found = load_problems(config(path=path, columns={"messages": "chat", "answer": "a"}))
    assert list(found.problems[0].messages) == messages
    broken = write(tmp_path, "jsonl", [{"chat": "hello", "a": 2}])
    with pytest.raises(ConfigError, match="row 1: messages are 'hello'"):
        load_problems(config(path=broken, columns={"messages": "chat", "answer": "a"}))


def test_filters(tmp_path):
    rows = [{"problem": "x" * n, "answer": "1", "level": n % 3} for n in range(1, 21)]
    path = write(tmp_path, "jsonl", rows)

    def lengths(**filters):
        found = load_problems(
            config(path=path, columns={"tags": {"level": "level"}}, prompt="{problem}", filters=filters)
        )
        return [len(p.messages[0]["content"]) for p in found.problems]

    assert lengths(min_characters=5, max_characters=8) == [5, 6, 7, 8]
    assert lengths(tags={"level": [0]}, max_problems=3) == [3, 6, 9]
    with pytest.raises(ConfigError, match="all 20 rows were left out"):
        lengths(tags={"level": "9"})


def test_ids(tmp_path):
    twice = [{"problem": "p", "answer": "1"}, {"problem": "p", "answer": "1"}, {"problem": "p", "answer": "2"}]
    found = load_problems(config(path=write(tmp_path, "jsonl", twice)))
    assert len({p.problem_id for p in found.problems}) == 2
    assert found.left_out == {"repeated": 1}
    again = load_problems(config(path=write(tmp_path, "jsonl", twice[::-1])))
    assert {p.problem_id for p in again.problems} == {p.problem_id for p in found.problems}  # content, not position
    clash = [{"problem": "p", "answer": "1", "i": "a b"}, {"problem": "q", "answer": "1", "i": "a/b"}]
    with pytest.raises(ConfigError, match="id a-b names an earlier, different row"):
        load_problems(config(path=write(tmp_path, "jsonl", clash), columns={"id": "i"}))


def test_context_goes_first(tmp_path):
    rows = [{"problem": "Find x.", "answer": "1", "c": "Let x=1."}, {"problem": "Find y.", "answer": "1", "c": None}]
    found = load_problems(config(path=write(tmp_path, "jsonl", rows), columns={"context": "c"}, prompt="{problem}"))
    assert [p.messages[0]["content"] for p in found.problems] == ["Let x=1.\nFind x.", "Find y."]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "the file is empty"),
        (
            "a.jsonl",
            '{"problem": "1", "answer": "1"}\n{"problem": x}\n',
            "line 2 is not JSON: Expecting value at column 13",
        ),
        (
            "a.jsonl",
            b'{"problem": "1", "answer": "1"}\n{"problem": "\xff"}\n',
            "line 2 is not UTF-8; save the file as UTF-8",
        ),
        ("a.jsonl", "{broken", "cannot be read as jsonl"),
        ("a.jsonl", "[1, 2]", "line 1 is not a JSON object"),
        ("a.jsonl", '{"question": "q", "answer": "1"}', "no column problem; it has question, answer"),
        ("a.parquet", "not parquet", "cannot be read as parquet"),
        ("a.csv", "x,y\n1,2\n", "no column problem, answer; it has x, y"),
        ("a.csv", b"problem,answer\n\xff\xfe,2\n", "line 2 is not UTF-8; save the file as UTF-8"),
    ],
)
def test_broken_files_are_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_problems(config(path=path))
    assert "\n" not in str(caught.value)


def test_doctor_says_how_many_rows_were_left_out_and_shows_one(tmp_path):
    from rich.console import Console

    from flows.doctor.campaign import _show_problems

    rows = [{"problem": "What is 1+1?", "answer": "2"}] * 3 + [{"problem": "What is 1+2?", "answer": ""}]
    problems = config(path=write(tmp_path, "jsonl", rows))
    console = Console(record=True, width=200)
    _show_problems(console, SimpleNamespace(problems=problems, withheld=()), load_problems(problems).problems[0])
    text = console.export_text()
    assert "problems: 1; rows left out: 2 repeated, 1 no answer" in text
    assert "gold '2'" in text


def test_missing_file(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path / "none-*.jsonl"):
        with pytest.raises(ConfigError, match="no such file"):
            load_problems(config(path=path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give exactly one"),
        ({"hub": "a/b", "path": "c.jsonl"}, "give exactly one"),
        ({"path": "c.jsonl", "revision": "main"}, "belong to a hub dataset"),
        ({"path": "c.txt"}, "is not a .parquet"),
        ({"path": "c.jsonl", "prompt": "no place"}, "does not contain {problem}"),
        ({"path": "c.jsonl", "column": {}}, "column"),
    ],
)
def test_config_mistakes(settings, message):
    with pytest.raises(ValidationError, match=message):
        config(**settings)


def test_a_bare_name_is_a_preset():
    adapter = TypeAdapter(ProblemsConfig)
    assert adapter.validate_python("math500") == PresetProblems(name="math500")
    assert isinstance(adapter.validate_python("arithmetic"), ArithmeticProblems)
    for value in (adapter.validate_python("math500"), config(hub="a/b"), ArithmeticProblems()):
        assert adapter.validate_json(adapter.dump_json(value)) == value
    with pytest.raises(ValidationError, match="math500"):
        adapter.validate_python("math5000")


def test_arithmetic_sets():
    unbounded = load_problems(ArithmeticProblems())
    assert unbounded.problems == ()
    first, second = (unbounded.for_iteration(0, i, 6) for i in (0, 1))
    assert unbounded.for_iteration(0, 0, 6) == first != second
    fixed = load_problems(ArithmeticProblems(size=12))
    held_out = load_problems(ArithmeticProblems(split="held_out", size=12))
    assert len(fixed.problems) == len(held_out.problems) == 12
    assert {p.tags["fact"] for p in fixed.problems}.isdisjoint(p.tags["fact"] for p in held_out.problems)
    harder = load_problems(ArithmeticProblems(levels={"hard": 1}))
    assert len({s.content_digest for s in (unbounded, fixed, held_out, harder)}) == 4
    assert load_problems(ArithmeticProblems()).content_digest == unbounded.content_digest
    with pytest.raises(ValidationError, match="needs a size"):
        ArithmeticProblems(split="held_out")


def test_presets_resolve():
    assert set(PRESETS) == {
        "math",
        "gsm8k",
        "gsm8k_test",
        "math500",
        "aime2025",
        "amc2023",
        "minerva_math",
        "olympiadbench",
    }
    for name, preset in PRESETS.items():
        assert resolve_preset(PresetProblems(name=name)) == preset
    changed = resolve_preset(
        PresetProblems(name="gsm8k", path="own.parquet", prompt="{problem}", filters={"max_problems": 3})
    )
    assert (changed.hub, changed.revision, changed.columns.problem) == (None, None, "question")
    assert (changed.prompt, changed.filters.max_problems) == ("{problem}", 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\fbox{5}", "5"),
        (r"\boxed 7$", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{ \left\{ x \right. }", r" \left\{ x \right. "),
        (r"\boxed{}", ""),
        ("none", None),
        (r"\boxed", None),
    ],
)
def test_last_box(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("value", "answer_format", "expected"),
    [
        ("steps <<1+1=2>>\n#### 1,234", "after_hashes", "1234"),
        ("a #### 1 #### -2", "after_hashes", "-2"),
        ("no mark", "after_hashes", ""),
        (27.0, "plain", "27"),
        (0.5, "plain", "0.5"),
        (None, "plain", ""),
        (["2"], "plain", "2"),
        (["$1$", "$2$"], "plain", "$1$, $2$"),
        (["$(1,8), (2,7)$"], "plain", "(1,8), (2,7)"),
        ("$\\$5$", "plain", "$\\$5$"),
        (70, "plain", "70"),
    ],
)
def test_extraction(value, answer_format, expected):
    assert extract_answer(value, answer_format) == expected

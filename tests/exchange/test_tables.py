"""Tables and tokenizers of other parties that are made to harm whoever reads them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.exchange.mailbox import Mailbox, table_of
from flows.exchange.receiving import check_claims, compare_verdicts, read_answers_of
from flows.exchange.tokenizers import VOCABULARY, fetch_tokenizer
from flows.home import Home
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.contracts.tables import ANSWERS, CLAIMS, VERDICTS, TableSchema, write_table
from hacrl_core.errors import ConfigError, StageError
from hacrl_core.exchange import trial
from hacrl_core.exchange.messages import Refused
from tests.exchange.parties import as_party, meeting
from tests.exchange.test_rounds import boxes

LONG = "0" * 2_000_000
ROOT = Path(__file__).resolve().parents[2]
READER = """
import resource, sys
from hacrl_core.exchange import trial
try:
    trial.try_table(sys.stdin.buffer.read(), int(sys.argv[1]), int(sys.argv[2]))
except trial.TrialFailed as failed:
    print(failed.too_much, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def answers(samples: int) -> list[dict[str, Any]]:
    fixed = {"prompt_id": "p", "finish_reason": "stop", "tokens": 3, "response_text": "7"}
    return [{**fixed, "rollout_id": f"000000/ben/p/{g:02d}", "sample_index": g} for g in range(samples)]


def written(rows: list[dict[str, Any]], schema: TableSchema = ANSWERS, tag: str = "", **options: Any) -> bytes:
    """A table as a hostile party writes it: any types, any encoding, any name of its schema."""
    metadata = {b"hacrl.schema": (tag or schema.tag).encode()}
    fields = options.pop("fields", schema.fields)
    table = pa.Table.from_pylist(rows, schema=fields.with_metadata(metadata))
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd", **options)
    return bytes(buffer.getvalue().to_pybytes())


def refusal(data: bytes, folder: Path) -> str:
    south = boxes(folder, 60)["south"]
    with pytest.raises(Refused) as refused:
        read_answers_of(data, south.message("answers", "ben", 0), ["p"], south.config)
    assert refused.value.party == "south"
    return refused.value.reason


def read(data: bytes, folder: Path) -> list[Any]:
    south = boxes(folder, 60)["south"]
    return read_answers_of(data, south.message("answers", "ben", 0), ["p"], south.config)


def test_a_sound_table_is_read(tmp_path: Path) -> None:
    samples = meeting(tmp_path).group_size
    assert read(written(answers(samples)), tmp_path) == [
        {name: row[name] for name in ANSWERS.fields.names} for row in answers(samples)
    ]
    # A later version of this package may send more.
    more = pa.schema([*ANSWERS.fields, pa.field("mood", pa.string())])
    assert len(read(written(answers(samples), tag="answers/9", fields=more), tmp_path)) == samples


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("dictionary", {"use_dictionary": True, "dictionary_pagesize_limit": 1 << 30}),
        ("prefixes", {"use_dictionary": False, "column_encoding": {"response_text": "DELTA_BYTE_ARRAY"}}),
    ],
)
def test_a_few_hundred_bytes_that_unpack_to_gigabytes(tmp_path: Path, how: str, options: dict[str, Any]) -> None:
    """One long text, and a table that repeats it or its beginning: the footer counts it once."""
    samples = 4000
    rows = [{**row, "response_text": LONG} for row in answers(2)]
    small = written(rows, **options)
    footer = pq.ParquetFile(pa.BufferReader(small)).metadata
    assert footer.row_group(0).column(3).total_uncompressed_size < len(LONG) * 1.1
    limit = 20_000_000
    # In a process of its own: what children take is known as the maximum over all that a process ever had.
    reader = subprocess.run(
        [sys.executable, "-c", READER, str(samples), str(limit)],
        input=repeated(samples, options),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    too_much, used = reader.stdout.decode().split()
    assert too_much == "True"
    assert int(used) < 1_000_000, f"the child took {used} kB"


def repeated(samples: int, options: dict[str, Any]) -> bytes:
    """A table whose texts are one long text so many times, written a row group at a time to be cheap to make."""
    schema = pa.schema([pa.field("response_text", pa.string(), nullable=False)])
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, schema, compression="zstd", **options) as writer:
        # Row groups of 64 texts: each has the long text once in the file, and 64 times in memory.
        batch = pa.table({"response_text": pa.array([LONG] * 64)}, schema=schema)
        for _ in range(3):
            writer.write_table(batch)
    assert samples > 3 * 64
    data = bytes(buffer.getvalue().to_pybytes())
    assert len(data) < 10_000
    return data


def test_a_table_that_ends_its_reader_with_a_crash(tmp_path: Path) -> None:
    """A hundred thousand groups inside one another: the library recurses until its stack is used up."""
    assert refusal(nested(100_000), tmp_path) == "unfounded"


def nested(depth: int) -> bytes:
    """A Parquet file that has nothing but a schema this deep, written by hand."""

    def number(value: int) -> bytes:
        found = b""
        while value > 127:
            found, value = found + bytes([value & 127 | 128]), value >> 7
        return found + bytes([value])

    one = number(2)  # the number 1 in zigzag form
    root = b"\x48" + number(1) + b"s" + b"\x15" + one + b"\x00"
    group = b"\x35\x00" + b"\x18" + number(1) + b"a" + b"\x15" + one + b"\x00"
    leaf = b"\x15" + one + b"\x25\x00" + b"\x18" + number(1) + b"a" + b"\x00"
    schema = b"\x19\xfc" + number(depth + 2) + root + group * depth + leaf
    footer = b"\x15" + one + schema + b"\x16\x00" + b"\x19\x0c" + b"\x00"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + b"\xff" * 40 + b"PAR1", b"x" * 5000])
def test_garbage(tmp_path: Path, data: bytes) -> None:
    assert refusal(data, tmp_path) == "unfounded"


@pytest.mark.parametrize("tag", [ANSWERS.tag, "answers/2", "answers/", "claims/1", ""])
@pytest.mark.parametrize("column", ["response_text", "sample_index", "tokens"])
def test_columns_of_other_types_under_any_name_of_the_schema(tmp_path: Path, tag: str, column: str) -> None:
    other = pa.int64() if column == "response_text" else pa.string()
    fields = pa.schema([pa.field(f.name, other if f.name == column else f.type) for f in ANSWERS.fields])
    rows = [{**row, column: 5 if column == "response_text" else "5"} for row in answers(meeting(tmp_path).group_size)]
    assert refusal(written(rows, tag=tag or "?", fields=fields), tmp_path) == "unfounded"


def test_nothing_where_a_value_must_be(tmp_path: Path) -> None:
    fields = pa.schema([pa.field(f.name, f.type) for f in ANSWERS.fields])
    rows = [{**row, "response_text": None} for row in answers(meeting(tmp_path).group_size)]
    assert refusal(written(rows, fields=fields), tmp_path) == "unfounded"


def test_an_answer_without_a_token_would_need_no_claim(tmp_path: Path) -> None:
    """A learner needs a claim for each answer, and its update ends without one."""
    rows = answers(meeting(tmp_path).group_size)
    rows[0]["tokens"] = 0
    assert refusal(written(rows), tmp_path) == "unfounded"
    south = boxes(tmp_path, 60)["south"]
    claims = [{"rollout_id": row["rollout_id"], "mean_logprob": -0.5, "tokens": row["tokens"]} for row in rows[1:]]
    with pytest.raises(Refused, match="south: unfounded: claims of ben in round 1 has no claim for"):
        check_claims(written(claims, CLAIMS), south.message("claims", "ben", 0), rows, south.config)


def test_verdicts_of_another_kind(tmp_path: Path) -> None:
    south = boxes(tmp_path, 60)["south"]
    row = {"rollout_id": "r", "prompt_id": "p", "reward": 1.0, "verdict": "correct", "extracted_answer": "7"}
    write_table(tmp_path / "verdicts.parquet", VERDICTS, {k: [v] for k, v in {**row, "verifier": "math"}.items()})
    own = ArtifactRef("verify", "", "", tmp_path)
    fields = pa.schema([pa.field(f.name, pa.string()) for f in VERDICTS.fields])
    lie = written([{**row, "reward": "much", "verifier": "math"}], VERDICTS, fields=fields)
    with pytest.raises(Refused, match="south: unfounded"):
        compare_verdicts(lie, south.message("answers", "ben", 0), own, south.config)


def test_a_reader_that_cannot_be_started_is_nobodys_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "__file__", "/no/such/file.py")
    with pytest.raises(StageError, match="could not be tried"):
        trial.try_table(b"", 1, 1)


def test_a_tokenizer_that_unpacks_to_gigabytes() -> None:
    """Three bytes of JSON are a list, which takes twenty times as much and more."""
    sound = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    assert trial.try_tokenizer(json.dumps(sound).encode()) == 1
    with pytest.raises(trial.TrialFailed, match=r"SIGABRT|memory"):
        trial.try_tokenizer(json.dumps(sound).encode()[:-2] + b', "x": [' + b"[]," * 20_000_000 + b"[]]}}")


def test_what_a_reader_of_tokenizers_says_is_fit_for_a_terminal() -> None:
    hostile = {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}, "decoder": {"type": "\x1b[31m" * 999}}
    with pytest.raises(trial.TrialFailed) as failed:
        trial.try_tokenizer(json.dumps(hostile, ensure_ascii=False).encode())
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) <= 200


@pytest.mark.parametrize(
    "data",
    [
        b'{"model": {"vocab": ' + b"[" * 200_000,
        json.dumps({"model": {"vocab": {"a": 0}}}).encode("utf-16"),
        b'{"model": {"vocab": 7}}',
        b"[]",
        b"\xff\xff",
    ],
)
def test_a_tokenizer_with_hostile_json(tmp_path: Path, data: bytes) -> None:
    config = meeting(tmp_path, settings={"south": {"share": ["tokenizer"]}})
    own = as_party(config, "south", tmp_path)
    assert own.exchange.bucket is not None
    private = (tmp_path / "keys" / "south.key").read_text()
    south = Mailbox(own, Bucket(own.exchange.bucket), tmp_path / "south", private, lambda line: None)
    south.send(south.message("tokenizer", "ben", 0, tables=(table_of(VOCABULARY, data),)), {VOCABULARY: data})
    with pytest.raises(ConfigError, match="the tokenizer cannot be used"):
        fetch_tokenizer(pytest.fail, config, Home(tmp_path / "home"), "ben", tmp_path / "ben.json")  # type: ignore[arg-type]
    assert not (tmp_path / "ben.json").exists()


def test_a_tokenizer_whose_sizes_sum_to_little_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = meeting(tmp_path, settings={"south": {"share": ["tokenizer"]}})
    own = as_party(config, "south", tmp_path)
    assert own.exchange.bucket is not None
    private = (tmp_path / "keys" / "south.key").read_text()
    south = Mailbox(own, Bucket(own.exchange.bucket), tmp_path / "south", private, lambda line: None)
    large = {"path": VOCABULARY, "sha256": "0" * 64, "bytes": 10**12}
    south.send(south.message("tokenizer", "ben", 0, tables=[large]), {})
    monkeypatch.setattr(Mailbox, "fetch", lambda *what: pytest.fail("it was downloaded"))
    with pytest.raises(ConfigError, match="do not use it"):
        fetch_tokenizer(pytest.fail, config, Home(tmp_path / "home"), "ben", tmp_path / "ben.json")  # type: ignore[arg-type]

"""All that may be in a bucket between parties: every object, every column, every field. The test of the whitelist."""

import getpass
import io
import json
import platform
import re
import socket
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hacrl_core.artifacts.bucket import Bucket

# Every column that may be in the bucket. A new one is a decision about what leaves a party.
COLUMNS = {
    "answers.parquet": {
        "rollout_id": pa.string(),
        "prompt_id": pa.string(),
        "sample_index": pa.int32(),
        "response_text": pa.string(),
        "finish_reason": pa.string(),
        "tokens": pa.int32(),
    },
    "verdicts.parquet": {
        "rollout_id": pa.string(),
        "prompt_id": pa.string(),
        "reward": pa.float64(),
        "verdict": pa.string(),
        "extracted_answer": pa.string(),
        "verifier": pa.string(),
    },
    "claims.parquet": {"rollout_id": pa.string(), "mean_logprob": pa.float64(), "tokens": pa.int32()},
}
FIELDS = {
    *("version", "campaign", "kind", "party", "agent", "iteration", "policy", "key", "source", "tables", "members"),
}
# What a tokenizer's file has, where a party shares it.
TOKENIZER = {
    *("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor"),
    *("decoder", "model"),
}
# Of one agent in one round.
KINDS = ("commit.json", "answers.json", "answers.parquet", "verdicts.parquet", "claims.json", "claims.parquet")


def check_everything(
    bucket: Bucket,
    name: str,
    agents: dict[str, tuple[str, ...]],
    rounds: int,
    *,
    deadlines: bool,
    tokenizers: tuple[str, ...] = (),
) -> None:
    """Fail unless the bucket has exactly the objects of so many rounds, and these exactly what they may have.

    ``tokenizers``: the agents whose parties share their tokenizer, as party/agent.
    """
    expected = Counter(
        f"exchange/{name}/{party}/{i:06d}/{agent}.{kind}"
        for party, owned in agents.items()
        for agent in owned
        for i in range(rounds)
        for kind in KINDS
    )
    if deadlines:
        expected.update(
            f"exchange/{name}/rounds/{i:06d}/{what}"
            for i in range(rounds)
            for what in ("open", "answers.json", "claims.json")
        )
    for one in tokenizers:
        party, agent = one.split("/")
        expected.update(f"exchange/{name}/{party}/000000/{agent}.{what}.json" for what in ("tokenizer", "vocabulary"))
    assert Counter(stat.path for stat in bucket.list("")) == expected
    for path in expected:
        _check_object(path, bucket.read(path) or b"")


def _check_object(path: str, data: bytes) -> None:
    if path.endswith("/open"):
        assert data == b"", path
    elif path.endswith(".parquet"):
        check_table(path, data)
    elif path.endswith(".vocabulary.json"):
        assert set(json.loads(data)) == TOKENIZER, path
    else:
        body = json.loads(data)
        assert set(body) == {"message", "signature"}, path
        assert set(body["message"]) == FIELDS, path
        assert all(set(table) == {"path", "sha256", "bytes"} for table in body["message"]["tables"]), path
        # What is not a name, a number or a list of names is a digest.
        for digest in ("campaign", "policy", "key"):
            assert re.fullmatch("([0-9a-f]{64})?", body["message"][digest]), path
        assert re.fullmatch("([0-9a-f]{64})?|answers|claims", body["message"]["source"]), path
    _check_nothing_private(path, data)


def check_table(path: str, data: bytes) -> None:
    columns = COLUMNS[path.rsplit("/", 1)[1].split(".", 1)[1]]
    schema = pq.read_schema(io.BytesIO(data))
    assert dict(zip(schema.names, schema.types, strict=True)) == columns, path
    footer = pq.read_metadata(io.BytesIO(data))
    assert footer.created_by == "hacrl", path
    assert set(footer.metadata or {}) <= {b"hacrl.schema", b"ARROW:schema"}, path


def _check_nothing_private(path: str, data: bytes) -> None:
    """Neither the machine nor its user, nor a package with its version, nor a folder of either stands anywhere."""
    private = [platform.release(), str(Path.home()), "safetensors", "parquet-cpp", "prompt_token"]
    private += [f"{package} {version(package)}" for package in ("torch", "pyarrow", "transformers")]
    # A name of three letters is in compressed bytes by chance.
    private += [name for name in (getpass.getuser(), socket.gethostname()) if len(name) > 4]
    for text in private:
        assert text.encode() not in data, (path, text)

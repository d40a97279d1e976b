"""The Parquet tables that stages exchange: narrow, keyed by ``rollout_id``, versioned, checked on write and on read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hacrl_core.errors import ContractError

_SCHEMA_KEY = b"hacrl.schema"
_SMALL_BYTES = 4 << 20


@dataclass(frozen=True)
class TableSchema:
    """The columns of a table and what holds between its rows."""

    name: str
    version: int
    fields: pa.Schema
    # Columns that together identify a row.
    unique: tuple[str, ...]
    # Pairs of list columns with equal lengths in each row.
    equal_lengths: tuple[tuple[str, str], ...] = ()
    # What this version added to the one before, and what stands for it in tables that do not have it: a value, or the
    # name of the column to repeat.
    added: tuple[tuple[str, Any], ...] = ()

    @property
    def tag(self) -> str:
        """Name and version, as written into files and manifests."""
        return f"{self.name}/{self.version}"


def _fields(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in types.items()])


def _next_version(before: TableSchema, fields: pa.Schema, defaults: Mapping[str, Any]) -> TableSchema:
    """The next version of a table: the same columns, and further ones at the end."""
    everything = pa.schema([*before.fields, *fields])
    return TableSchema(
        before.name, before.version + 1, everything, before.unique, before.equal_lengths, tuple(defaults.items())
    )


_text = pa.string()
_ids = pa.list_(pa.int32())
_floats = pa.list_(pa.float32())
_messages = pa.list_(pa.struct([pa.field("role", _text, nullable=False), pa.field("content", _text, nullable=False)]))

PROMPTS = TableSchema(
    "prompts", 1, _fields(prompt_id=_text, messages=_messages, answer=_text, source=_text, tags=_text), ("prompt_id",)
)
ROLLOUTS = TableSchema(
    "rollouts",
    1,
    _fields(
        rollout_id=_text,
        iteration=pa.int32(),
        agent_id=_text,
        policy_digest=_text,
        prompt_id=_text,
        sample_index=pa.int32(),
        prompt_token_ids=_ids,
        response_text=_text,
        response_token_ids=_ids,
        response_logprobs=_floats,
        finish_reason=_text,
        seed=pa.int64(),
    ),
    ("rollout_id",),
    (("response_token_ids", "response_logprobs"),),
)
VERDICTS = TableSchema(
    "verdicts",
    1,
    _fields(
        rollout_id=_text, prompt_id=_text, reward=pa.float64(), verdict=_text, extracted_answer=_text, verifier=_text
    ),
    ("rollout_id",),
)
# Version 2 is written only where it says more: problems with columns of their own, rewards with parts.
PROMPTS_2 = _next_version(PROMPTS, _fields(columns=_text), {"columns": "{}"})
VERDICTS_2 = _next_version(
    VERDICTS,
    _fields(raw_reward=pa.float64(), parts=_text, metrics=_text, message=_text),
    {"raw_reward": "reward", "parts": "{}", "metrics": "{}", "message": ""},
)
# How long each verdict took is measured, not computed: a table of its own, outside the content digest.
TIMINGS = TableSchema("timings", 1, _fields(rollout_id=_text, milliseconds=pa.float32()), ("rollout_id",))
CAPABILITY = TableSchema(
    "capability",
    1,
    _fields(agent_id=_text, iteration=pa.int32(), mean_reward=pa.float64(), capability=pa.float64()),
    ("agent_id", "iteration"),
)
CREDIT = TableSchema(
    "credit",
    1,
    _fields(
        rollout_id=_text,
        sampler=_text,
        prompt_id=_text,
        is_own=pa.bool_(),
        reward=pa.float64(),
        omega=pa.float64(),
        baseline=pa.float64(),
        advantage=pa.float64(),
    ),
    ("rollout_id",),
)
SCORES = TableSchema(
    "scores",
    1,
    _fields(
        rollout_id=_text,
        sampler=_text,
        is_own=pa.bool_(),
        prompt_id=_text,
        prompt_token_ids=_ids,
        token_ids=_ids,
        mean_logprob=pa.float64(),
        logprobs=_floats,
        truncated=pa.bool_(),
    ),
    ("rollout_id",),
    (("token_ids", "logprobs"),),
)
EVALUATION = TableSchema(
    "evaluation",
    1,
    _fields(
        problem_id=_text,
        sample_index=pa.int32(),
        response_text=_text,
        verdict=_text,
        reward=pa.float64(),
        extracted_answer=_text,
        answer=_text,
        tokens=pa.int32(),
        truncated=pa.bool_(),
        tags=_text,
    ),
    ("problem_id", "sample_index"),
)
# All that a party tells others of its responses; a column that is not here never leaves it.
ANSWERS = TableSchema(
    "answers",
    1,
    _fields(
        rollout_id=_text,
        prompt_id=_text,
        sample_index=pa.int32(),
        response_text=_text,
        finish_reason=_text,
        tokens=pa.int32(),
    ),
    ("rollout_id",),
)
# The sampler's mean log-prob of its own responses: the one number about them that others cannot compute.
CLAIMS = TableSchema(
    "claims", 1, _fields(rollout_id=_text, mean_logprob=pa.float64(), tokens=pa.int32()), ("rollout_id",)
)
SCHEMAS = {
    s.name: s for s in (PROMPTS, ROLLOUTS, VERDICTS, TIMINGS, CAPABILITY, CREDIT, SCORES, EVALUATION, ANSWERS, CLAIMS)
}
# The newest version of each table; every earlier one stays readable.
NEWEST = {**SCHEMAS, PROMPTS_2.name: PROMPTS_2, VERDICTS_2.name: VERDICTS_2}


def write_table(path: Path, schema: TableSchema, columns: Mapping[str, Sequence[Any]]) -> int:
    """Check and write one table; return its number of rows. Nothing is written when a check fails."""
    if set(columns) != set(schema.fields.names):
        odd = sorted(set(columns) ^ set(schema.fields.names))
        raise ContractError(
            f"{schema.tag} {path.name}: columns {odd} are missing or unknown; give exactly {schema.fields.names}"
        )
    arrays = [pa.array(columns[f.name], type=f.type) for f in schema.fields]
    table = pa.Table.from_arrays(arrays, schema=schema.fields.with_metadata({_SCHEMA_KEY: schema.tag.encode()}))
    _check(table, schema, path)
    splits = [f.name for f in schema.fields if f.type == _floats or f.type == pa.float64()]
    dictionaries = [
        f.name for f in schema.fields if f.name.endswith("_id") or f.name in ("sampler", "verdict", "verifier")
    ]
    # The writer makes many small pieces of a file: a small table is put together in memory.
    small = pa.BufferOutputStream() if table.nbytes <= _SMALL_BYTES else None
    pq.write_table(
        table,
        path if small is None else small,
        compression="zstd",
        compression_level=3,
        use_dictionary=dictionaries,
        column_encoding={_leaf(schema, name): "BYTE_STREAM_SPLIT" for name in splits},
    )
    if small is not None:
        path.write_bytes(small.getvalue())
    return int(table.num_rows)


def read_table(path: Path, schema: TableSchema) -> pa.Table:
    """Read one table as the given version of its schema; refuse any other table and versions that are not known.

    A newer version is read without its further columns, an older one with the values that stand for what it lacks.
    """
    try:
        large = path.stat().st_size > _SMALL_BYTES
        # Threads cost more than they save on a table of a few hundred kilobytes.
        with pq.ParquetFile(path if large else pa.BufferReader(path.read_bytes()), memory_map=False) as file:
            table = file.read(use_threads=large)
        tag = (table.schema.metadata or {}).get(_SCHEMA_KEY, b"none").decode()
    except (OSError, ValueError, pa.ArrowException) as problem:
        # Damage does not always raise ArrowInvalid.
        raise ContractError(
            f"{schema.tag} {path}: cannot be read ({' '.join(str(problem).split())}); delete its folder and run again"
        ) from problem
    name, _, version = tag.partition("/")
    newest = NEWEST.get(schema.name, schema).version
    if name != schema.name or not version.isdecimal() or not 1 <= int(version) <= newest:
        raise ContractError(
            f"{path}: schema is {tag}, this version reads {schema.tag}; "
            "upgrade hacrl, or delete the folder and run again"
        )
    for column, value in schema.added if int(version) < schema.version else ():
        kind = schema.fields.field(column).type
        filled = table[value] if value in table.column_names else pa.array([value] * table.num_rows, type=kind)
        table = table.append_column(schema.fields.field(column), filled)
    return table if int(version) <= schema.version else table.select(schema.fields.names)


def read_answers(folder: Path) -> pa.Table:
    """Read the responses in an artifact's folder as other parties see them; the artifact may hold more of them."""
    if (folder / "answers.parquet").exists():
        return read_table(folder / "answers.parquet", ANSWERS)
    rollouts = read_table(folder / "rollouts.parquet", ROLLOUTS)
    tokens = pc.list_value_length(rollouts["response_token_ids"])
    return rollouts.append_column("tokens", tokens).select(ANSWERS.fields.names)


def _leaf(schema: TableSchema, name: str) -> str:
    return f"{name}.list.element" if pa.types.is_list(schema.fields.field(name).type) else name


def _check(table: pa.Table, schema: TableSchema, path: Path) -> None:
    for field in schema.fields:
        column = table.column(field.name)
        if column.null_count:
            raise ContractError(
                f"{schema.tag} {path.name}: {column.null_count} nulls in {field.name}; every row needs a value"
            )
        values = pc.list_flatten(column) if pa.types.is_list(field.type) else column
        if pa.types.is_floating(values.type):
            bad = len(values) - (pc.sum(pc.is_finite(values)).as_py() or 0)
            if bad:
                raise ContractError(
                    f"{schema.tag} {path.name}: {bad} values of {field.name} are NaN or infinite, the first in "
                    f"{_first_not_finite(table, schema, field.name)}; nothing was written"
                )
    distinct = _distinct(table.select(schema.unique))
    if distinct != table.num_rows:
        raise ContractError(
            f"{schema.tag} {path.name}: {table.num_rows - distinct} rows repeat {'+'.join(schema.unique)}; "
            "each may appear once"
        )
    for left, right in schema.equal_lengths:
        unequal = pc.not_equal(pc.list_value_length(table.column(left)), pc.list_value_length(table.column(right)))
        bad = pc.sum(unequal).as_py() or 0
        if bad:
            raise ContractError(
                f"{schema.tag} {path.name}: {bad} rows have len({left}) != len({right}); nothing was written"
            )


def _distinct(table: pa.Table) -> int:
    """Return how many rows are different; of one column that is found without the machinery for several."""
    if table.num_columns == 1:
        return int(pc.count_distinct(table.column(0)).as_py())
    return int(table.group_by(table.column_names, use_threads=False).aggregate([]).num_rows)


def _first_not_finite(table: pa.Table, schema: TableSchema, name: str) -> str:
    for row in table.select([*schema.unique, name]).to_pylist():
        values = row[name] if isinstance(row[name], list) else [row[name]]
        if not all(math.isfinite(value) for value in values):
            return ", ".join(f"{key} {row[key]}" for key in schema.unique)
    return "no row"

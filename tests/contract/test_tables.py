import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hacrl_core.contracts import tables
from hacrl_core.contracts.tables import (
    CAPABILITY,
    PROMPTS,
    ROLLOUTS,
    SCHEMAS,
    VERDICTS,
    VERDICTS_2,
    read_table,
    write_table,
)
from hacrl_core.errors import ContractError


def verdict_columns(**changes):
    columns = {
        "rollout_id": ["000000/a/p/00", "000000/a/p/01"],
        "prompt_id": ["p", "p"],
        "reward": [1.0, 0.0],
        "verdict": ["correct", "incorrect"],
        "extracted_answer": ["4", ""],
        "verifier": ["math", "math"],
    }
    return {**columns, **changes}


def rollout_columns(**changes):
    columns = {
        "rollout_id": ["000000/a/p/00"],
        "iteration": [0],
        "agent_id": ["a"],
        "policy_digest": ["d"],
        "prompt_id": ["p"],
        "sample_index": [0],
        "prompt_token_ids": [[1, 2]],
        "response_text": ["4"],
        "response_token_ids": [[3, 4]],
        "response_logprobs": [[-0.5, -0.25]],
        "finish_reason": ["stop"],
        "seed": [7],
    }
    return {**columns, **changes}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "verdicts.parquet"
    assert write_table(path, VERDICTS, verdict_columns()) == 2
    assert read_table(path, VERDICTS).to_pydict() == verdict_columns()


def test_equal_tables_have_equal_bytes_put_together_in_memory_or_in_the_file(tmp_path, monkeypatch):
    for name, most in (("one", 4 << 20), ("two", 4 << 20), ("three", 0)):
        monkeypatch.setattr(tables, "_SMALL_BYTES", most)
        write_table(tmp_path / name, ROLLOUTS, rollout_columns())
        read = read_table(tmp_path / name, ROLLOUTS).to_pydict()
        assert read == rollout_columns()
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes() == (tmp_path / "three").read_bytes()


def test_two_columns_that_identify_a_row_together_may_repeat_alone(tmp_path):
    columns = {"agent_id": ["a", "a", "b"], "iteration": [0, 1, 0], "mean_reward": [0.0] * 3, "capability": [0.0] * 3}
    assert write_table(tmp_path / "table", CAPABILITY, columns) == 3
    with pytest.raises(ContractError, match=r"1 rows repeat agent_id\+iteration"):
        write_table(tmp_path / "table", CAPABILITY, {**columns, "agent_id": ["a"] * 3})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout_id": ["same", "same"]}, "repeat rollout_id"),
        ({"reward": [1.0, float("nan")]}, "1 values of reward are NaN"),
        ({"reward": [1.0, None]}, "1 nulls in reward"),
    ],
)
def test_bad_verdicts_are_refused(tmp_path, changes, says):
    with pytest.raises(ContractError, match=says):
        write_table(tmp_path / "bad.parquet", VERDICTS, verdict_columns(**changes))
    assert not (tmp_path / "bad.parquet").exists()


def test_lists_that_run_in_step_must_be_equally_long(tmp_path):
    with pytest.raises(ContractError, match=r"1 rows have len\(response_token_ids\) != len\(response_logprobs\)"):
        write_table(tmp_path / "bad.parquet", ROLLOUTS, rollout_columns(response_logprobs=[[-0.5]]))


def test_infinite_number_inside_a_list_is_refused(tmp_path):
    with pytest.raises(ContractError, match="response_logprobs are NaN or infinite"):
        write_table(tmp_path / "bad.parquet", ROLLOUTS, rollout_columns(response_logprobs=[[-0.5, -np.inf]]))


def test_missing_column_is_named(tmp_path):
    columns = verdict_columns()
    del columns["verifier"]
    with pytest.raises(ContractError, match="verifier"):
        write_table(tmp_path / "bad.parquet", VERDICTS, columns)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "verdicts.parquet"
    write_table(path, VERDICTS, verdict_columns())
    newer = pq.read_table(path).replace_schema_metadata({b"hacrl.schema": b"verdicts/3"})
    pq.write_table(newer, path)
    with pytest.raises(ContractError, match=r"verdicts/3.*upgrade hacrl"):
        read_table(path, VERDICTS)


def test_version_1_is_read_as_version_2_and_the_other_way_round(tmp_path):
    path = tmp_path / "verdicts.parquet"
    write_table(path, VERDICTS, verdict_columns())
    found = read_table(path, VERDICTS_2).to_pydict()
    assert found["raw_reward"] == found["reward"]
    assert (found["parts"], found["message"]) == (["{}", "{}"], ["", ""])
    write_table(path, VERDICTS_2, {**found, "parts": ['{"a":1.0}', "{}"]})
    assert read_table(path, VERDICTS).to_pydict() == verdict_columns()
    assert read_table(path, VERDICTS_2)["parts"].to_pylist() == ['{"a":1.0}', "{}"]
    with pytest.raises(ContractError, match=r"schema is verdicts/2, this version reads prompts/1"):
        read_table(path, PROMPTS)


def test_a_file_that_is_no_table_is_one_clear_error(tmp_path):
    (tmp_path / "verdicts.parquet").write_bytes(b"not parquet")
    with pytest.raises(ContractError, match="cannot be read"):
        read_table(tmp_path / "verdicts.parquet", VERDICTS)


@pytest.mark.parametrize(
    ("intact", "damaged"),
    [(b"rollout_id", b"\xffollout_id"), (b"verdicts/1", b"\xfferdicts/1"), (b"rollout_id", b"")],
    ids=["name", "tag", "shorter"],
)
def test_a_damaged_file_is_one_clear_error(tmp_path, intact, damaged):
    """Whatever pyarrow makes of it: bytes that are no UTF-8 are a UnicodeDecodeError."""
    path = tmp_path / "verdicts.parquet"
    write_table(path, VERDICTS, verdict_columns())
    path.write_bytes(path.read_bytes().replace(intact, damaged))
    with pytest.raises(ContractError, match=r"verdicts/1 .*verdicts.parquet: .*; delete its folder") as error:
        read_table(path, VERDICTS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_schema_takes_an_empty_table(tmp_path, name):
    schema = SCHEMAS[name]
    assert write_table(tmp_path / "empty.parquet", schema, {column: [] for column in schema.fields.names}) == 0
    assert read_table(tmp_path / "empty.parquet", schema).schema.equals(schema.fields, check_metadata=False)
    assert all(not field.nullable or isinstance(field.type, pa.ListType) for field in schema.fields)

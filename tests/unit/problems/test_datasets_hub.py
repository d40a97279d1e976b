"""The hub without a network: what is cached is used, what is not is one clear line, and nothing hangs."""

import json
import socket
import time
from pathlib import Path

import pytest

from hacrl_core.config.problems import DatasetProblems
from hacrl_core.errors import ConfigError
from hacrl_core.problems import load_problems, rows
from tests.patience import patience

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GSM8K = {"columns": {"problem": "question"}, "answer_format": "after_hashes"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The real libraries, a cache of our own, and an address where nobody listens."""
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        yield tmp_path
    assert not constants.HF_HUB_OFFLINE, "offline mode is put back"


def fill_cache(folder: Path, commit: str = COMMIT) -> None:
    """What the library leaves behind after it has fetched somebody/sums, subset main, split train."""
    import datasets

    table = datasets.Dataset.from_dict(
        {"question": ["1+1?", "2+2?"], "answer": ["so #### 2", "so #### 4"], "other": [1, 2]}
    )
    place = folder / "somebody___sums" / "main" / "0.0.0" / commit
    place.mkdir(parents=True)
    with datasets.arrow_writer.ArrowWriter(path=str(place / "sums-train.arrow"), features=table.features) as writer:
        for row in table:
            writer.write(row)
        writer.finalize()
    splits = {"train": {"name": "train", "num_bytes": 100, "num_examples": 2, "dataset_name": "sums"}}
    features = {
        name: {"dtype": kind, "_type": "Value"}
        for name, kind in (("question", "string"), ("answer", "string"), ("other", "int64"))
    }
    info = {
        "builder_name": "parquet",
        "dataset_name": "sums",
        "config_name": "main",
        "splits": splits,
        "features": features,
    }
    (place / "dataset_info.json").write_text(
        json.dumps(info | {"version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0}})
    )


def test_what_is_not_cached_is_one_clear_line_in_seconds(hub):
    start = time.monotonic()
    with pytest.raises(ConfigError, match="not in the local cache and the hub cannot be reached") as caught:
        load_problems(DatasetProblems(hub="somebody/sums", subset="main", **GSM8K))
    assert time.monotonic() - start < patience(8)
    assert "\n" not in str(caught.value)
    assert "somebody/sums/main (train)" in str(caught.value)


def test_offline_by_environment_is_not_even_tried(hub, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(rows, "_hub_answers", lambda endpoint: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match="not in the local cache"):
        load_problems(DatasetProblems(hub="somebody/sums"))


def test_a_silent_hub_is_given_up(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(rows, "_PATIENCE_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # accepts, never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ConfigError, match="cannot be reached"):
            load_problems(DatasetProblems(hub="somebody/sums"))
        assert time.monotonic() - start < patience(5)


def test_what_is_cached_is_used(hub):
    fill_cache(hub)
    found = load_problems(DatasetProblems(hub="somebody/sums", subset="main", **GSM8K))
    assert [p.answer for p in found.problems] == ["2", "4"]
    assert found.problems[0].source == "somebody/sums"
    pinned = load_problems(DatasetProblems(hub="somebody/sums", subset="main", revision=COMMIT, **GSM8K))
    assert pinned.content_digest == found.content_digest


def test_another_revision_than_the_cached_one_is_refused(hub):
    fill_cache(hub)
    with pytest.raises(ConfigError, match=r"revision f{40} is not in the local cache, another one is"):
        load_problems(DatasetProblems(hub="somebody/sums", subset="main", revision="f" * 40, **GSM8K))


def test_unknown_split_and_column_of_a_cached_dataset(hub):
    fill_cache(hub)
    with pytest.raises(ConfigError, match="sums/main \\(test\\)"):
        load_problems(DatasetProblems(hub="somebody/sums", subset="main", split="test", **GSM8K))
    with pytest.raises(ConfigError, match="no column problem; it has question, answer, other"):
        load_problems(DatasetProblems(hub="somebody/sums", subset="main"))

"""Rows of a dataset as plain dictionaries, from a local file or the hub."""

import csv
import glob
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hacrl_core.config.problems import DatasetProblems
from hacrl_core.errors import ConfigError

Row = dict[str, Any]
# For the hub's first answer; the library itself retries for half a minute.
_PATIENCE_SECONDS = 4.0
_offline_lock = threading.Lock()


def read_rows(config: DatasetProblems, columns: Sequence[str]) -> list[Row]:
    """Return the named columns of every row, in the dataset's order."""
    rows = _hub_rows(config, columns) if config.path is None else _local_rows(config.path, columns)
    if not rows:
        raise ConfigError(f"dataset {config.path or config.hub}: no rows; give a file or split that has some")
    return rows


def _local_rows(pattern: Path, columns: Sequence[str]) -> list[Row]:
    """Read files as they are: no cache to go stale, no guessing of types (a CSV cell '007' stays '007')."""
    paths = (
        sorted(Path(name) for name in glob.glob(str(pattern.expanduser())))
        if "*" in str(pattern)
        else [pattern.expanduser()]
    )
    if not paths or not paths[0].is_file():
        raise ConfigError(f"dataset {pattern}: no such file; give the path of a .parquet, .jsonl or .csv file")
    rows: list[Row] = []
    for path in paths:
        if path.stat().st_size == 0:
            raise ConfigError(f"dataset {path}: the file is empty; give a file with rows")
        try:
            rows += _READERS[path.suffix](path, columns)
        except UnicodeDecodeError:
            line = _first_foreign_line(path)
            raise ConfigError(f"dataset {path}: line {line} is not UTF-8; save the file as UTF-8") from None
        except (OSError, ValueError, csv.Error) as problem:  # ArrowInvalid and JSONDecodeError are ValueErrors
            raise ConfigError(f"dataset {path}: cannot be read as {path.suffix[1:]}: {_one_line(problem)}") from None
    return rows


def _first_foreign_line(path: Path) -> int:
    """Return the number of the first line that is not UTF-8."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            line.decode()
        except UnicodeDecodeError:
            return number
    return 0


def _read_parquet(path: Path, columns: Sequence[str]) -> list[Row]:
    import pyarrow.parquet as pq

    _need_columns(path, columns, pq.read_schema(path).names)
    rows: list[Row] = pq.read_table(path, columns=list(columns)).to_pylist()
    return rows


def _read_jsonl(path: Path, columns: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as problem:
                raise ValueError(f"line {number} is not JSON: {problem.msg} at column {problem.colno}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not a JSON object")
            rows.append(row)
    # Any row may leave a column out (null); a column that no row has is a mistake in the config.
    _need_columns(path, columns, list({name: None for row in rows for name in row}))
    return [{name: row.get(name) for name in columns} for row in rows]


def _read_csv(path: Path, columns: Sequence[str]) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        _need_columns(path, columns, list(reader.fieldnames or []))
        return [{name: row[name] for name in columns} for row in reader]


_READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".csv": _read_csv}


def _need_columns(dataset: object, wanted: Sequence[str], present: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ConfigError(
            f"dataset {dataset}: no column {', '.join(missing)}; it has {', '.join(present) or 'none'}: "
            "set columns accordingly"
        )


def _hub_rows(config: DatasetProblems, columns: Sequence[str]) -> list[Row]:
    import datasets  # several seconds; only those who read from the hub pay

    name = "/".join(filter(None, [config.hub, config.subset])) + f" ({config.split})"
    with cache_only_without_network() as offline:
        try:
            found = datasets.load_dataset(config.hub, config.subset, split=config.split, revision=config.revision)
        except (OSError, ValueError) as problem:  # ConnectionError, DatasetNotFoundError; an unknown subset or split
            raise ConfigError(_hub_line(name, config, offline, problem)) from None
    _need_revision(name, config, offline, [file["filename"] for file in found.cache_files])
    _need_columns(name, columns, found.column_names)
    rows: list[Row] = found.select_columns(list(columns)).to_list()
    return rows


def _hub_line(name: str, config: DatasetProblems, offline: bool, problem: Exception) -> str:
    if not offline:
        return f"dataset {name}: the hub says: {_one_line(problem)}"
    # The dataset is in the cache, but not this part of it.
    if isinstance(problem, ValueError):
        return f"dataset {name}: not in the local cache ({_one_line(problem)}) and the hub cannot be reached"
    return (
        f"dataset {name}: not in the local cache and the hub cannot be reached (offline); "
        f"fetch {config.hub} once with network access, or give a local file with path"
    )


def _need_revision(name: str, config: DatasetProblems, offline: bool, files: Sequence[str]) -> None:
    """Check that a wanted commit was read: offline, the library ignores it and takes the newest cached version."""
    wanted = config.revision or ""
    is_commit = len(wanted) == 40 and all(letter in "0123456789abcdef" for letter in wanted)
    if offline and is_commit and not all(wanted in file for file in files):
        raise ConfigError(
            f"dataset {name}: revision {wanted} is not in the local cache, another one is, and the hub cannot be "
            "reached; fetch it once with network access, or drop revision to use what is there"
        )


@contextmanager
def cache_only_without_network() -> Iterator[bool]:
    """Yield whether the hub cannot be reached; if so, the libraries use their cache instead of retrying for long."""
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE or _hub_answers(constants.ENDPOINT):
        yield bool(constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE)
        return
    with _offline_lock:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        try:
            yield True
        finally:
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False


def _hub_answers(endpoint: str) -> bool:
    """Return whether the hub gives any HTTP answer; asked in a thread because a name lookup obeys no time-out."""
    from huggingface_hub import get_session

    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=_PATIENCE_SECONDS)
        except Exception:
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    return answered.is_set()


def _one_line(problem: Exception) -> str:
    text = " ".join(str(problem).split())
    return text if len(text) < 200 else text[:197] + "..."

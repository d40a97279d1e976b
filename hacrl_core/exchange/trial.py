"""Reads a Parquet table or a tokenizer of another party in a process of its own, before this one does.

A few hundred bytes of Parquet can unpack to gigabytes, and some files end the process that reads them: what the footer
says need not be true, and the library was not made for hostile files. So a child with little memory reads the table
first. What it survives is read here in the same way, and takes no more. JSON of a tokenizer is no better: three bytes
of it can be a list of seventy. The child imports nothing of this package:

    python trial.py table ROWS BYTES <table
    python trial.py tokenizer <tokenizer.json
"""

import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

# What the libraries and small tables need beside the table itself.
_ROOM = 512 << 20
# A tokenizer of 17 MB with 262,144 entries takes 0.3 GB; the largest in use have twice as many bytes.
_TOKENIZER_ROOM = 1 << 30
_STACK = 4 << 20
_SECONDS = 60
_LONGEST = 200
_TOO_MUCH, _UNREADABLE = 3, 4
# How a reader ends because of what it read. Anything else is this machine's own trouble.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGXCPU)


class TrialFailed(Exception):
    """What cannot be read without harm, and why; ``too_much``: it is larger than it may be."""

    def __init__(self, what: str, *, too_much: bool = False) -> None:
        super().__init__(what)
        self.too_much = too_much


def try_table(data: bytes, rows: int, size: int) -> None:
    """Raise TrialFailed unless a child can read a table, and it has at most so many rows and bytes."""
    _try("table", data, str(rows), str(size))


def try_tokenizer(data: bytes) -> int:
    """Return how many entries a tokenizer.json has; raise TrialFailed unless a child can load it as one."""
    return int(_try("tokenizer", data))


def _try(what: str, data: bytes, *limits: str) -> str:
    quiet = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-I", str(Path(__file__)), what, *limits]
    child = subprocess.run(
        command, input=data, capture_output=True, env={**os.environ, **quiet}, start_new_session=True, check=False
    )
    # A reader's words may repeat those of the file.
    said = " ".join(child.stdout.decode(errors="replace").split())[:_LONGEST]
    words = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in said)
    if child.returncode in (_TOO_MUCH, _UNREADABLE):
        raise TrialFailed(words, too_much=child.returncode == _TOO_MUCH)
    if -child.returncode in _CRASHES:
        raise TrialFailed(f"its reader ends with {signal.Signals(-child.returncode).name}")
    if child.returncode:
        from hacrl_core.errors import StageError

        told = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise StageError(
            f"a {what} of another party could not be tried: its reader ended with {child.returncode} {told}; run the "
            "command again"
        )
    return words


def _limit(room: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    # Less than any thread has that reads the table later.
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, _STACK))
    resource.setrlimit(resource.RLIMIT_DATA, (room, room))


def _try_tokenizer_here(data: bytes) -> None:
    from tokenizers import Tokenizer

    _limit(_TOKENIZER_ROOM)
    _end(0, str(Tokenizer.from_str(data.decode()).get_vocab_size(with_added_tokens=False)))


def _try_table_here(data: bytes, rows: int, size: int) -> None:
    import pyarrow.parquet as pq

    _limit(_ROOM + 4 * size)
    file = pq.ParquetFile(io.BytesIO(data))
    footer = file.metadata
    if footer.num_rows > rows:
        _end(_TOO_MUCH, f"has {footer.num_rows} rows, the round asks for {rows}")
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    said = sum(max(group.column(i).total_uncompressed_size, 0) for group in groups for i in range(group.num_columns))
    if said > size:
        _end(_TOO_MUCH, f"unpacks to {said} bytes, a round has at most {size}")
    table = file.read(use_threads=False)
    if table.nbytes > size or table.num_rows > rows:
        _end(_TOO_MUCH, f"unpacks to {table.num_rows} rows with {table.nbytes} bytes, a round has at most {size}")
    table.validate(full=True)


def _end(code: int, words: str) -> None:
    print(words, flush=True)
    # Nothing is tidied up: a broken table may be in the way.
    os._exit(code)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "tokenizer":
            _try_tokenizer_here(sys.stdin.buffer.read())
        else:
            _try_table_here(sys.stdin.buffer.read(), *map(int, sys.argv[2:]))
    except MemoryError:
        _end(_TOO_MUCH, "needs more memory than it may")
    # A fault in tokenizers arrives as what is no Exception.
    except BaseException as problem:
        _end(_UNREADABLE, f"cannot be read ({problem})")
    os._exit(0)

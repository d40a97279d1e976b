"""The library that kills inside system calls does so, and what a power cut takes is what was not synced."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter

import pytest

from tests.chaos.home import points
from tests.chaos.systemcalls import Call, Place, Unavailable, build, choose, lose_power, places, read_log, unsynced
from tests.patience import patience

# Plain calls, as the interpreter makes them: a folder, a draft that is synced and renamed, a line that is not synced.
WORK = """
import os, sys
home = sys.argv[1]
os.mkdir(f"{home}/made")
draft = os.open(f"{home}/draft", os.O_WRONLY | os.O_CREAT)
os.write(draft, b"12345678")
os.fsync(draft)
os.rename(f"{home}/draft", f"{home}/made/whole")
record = os.open(f"{home}/record", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(record, b"first\\n")
os.fsync(record)
os.write(record, b"second\\n")
open(f"{home}/left", "w").close()
os.unlink(f"{home}/left")
print("done")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        return build(tmp_path_factory.mktemp("library"))
    except Unavailable as problem:
        pytest.skip(str(problem))


def work(library, place, plan=""):
    """Run the calls in a group of their own; the exit code, what was said, and the log."""
    home, log = place / "home", place / "calls"
    home.mkdir()
    environ = {**os.environ, "LD_PRELOAD": str(library), "CHAOS_FS_HOME": str(home), "CHAOS_FS_LOG": str(log)}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", WORK, str(home)],
        env={**environ, "CHAOS_FS_KILL": plan},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=patience(30),
    )
    return done.returncode, done.stdout, read_log(log), home


def test_every_call_below_the_home_is_logged_and_none_is_changed(library, tmp_path):
    code, said, calls, home = work(library, tmp_path)
    assert (code, said) == (0, "done\n")
    assert [(call.what, call.path) for call in calls] == [
        ("mkdir", "made"),
        ("write", "draft"),
        ("sync", "draft"),
        ("rename", "made/whole"),
        ("write", "record"),
        ("sync", "record"),
        ("write", "record"),
        ("unlink", "left"),
    ]
    assert (home / "record").read_text() == "first\nsecond\n"


@pytest.mark.parametrize(
    ("plan", "left"),
    [
        ("mkdir before 1 made", {}),
        ("mkdir after 1 m*", {"made": None}),
        ("write before 1 draft", {"made": None, "draft": b""}),
        ("write half 1 draft", {"made": None, "draft": b"1234"}),
        ("fsync after 1 *", {"made": None, "draft": b"12345678"}),
        ("rename before 1 made/whole", {"made": None, "draft": b"12345678"}),
        ("rename after 1 made/*", {"made": None, "made/whole": b"12345678"}),
        ("write after 2 record", {"made": None, "made/whole": b"12345678", "record": b"first\nsecond\n"}),
        ("unlink before 1 left", {"made": None, "made/whole": b"12345678", "record": b"first\nsecond\n", "left": b""}),
    ],
)
def test_a_kill_comes_at_its_moment_and_not_earlier_or_later(library, tmp_path, plan, left):
    code, said, _, home = work(library, tmp_path, plan)
    assert (code, said) == (-signal.SIGKILL, "")
    found = {str(p.relative_to(home)): p.read_bytes() if p.is_file() else None for p in home.rglob("*")}
    assert found == left


def test_only_what_was_not_synced_is_lost(library, tmp_path):
    _, _, calls, home = work(library, tmp_path)
    written, names = unsynced(calls)
    assert written == {(home / "record").stat().st_ino: len("first\n")}
    assert [name.path for name in names] == ["made/whole"]
    seen = set()
    whole = (home / "made/whole").read_bytes()
    for seed in range(40):
        (home / "record").write_bytes(b"first\nsecond\n")  # the same file again
        _, taken_back = lose_power(home, calls, random.Random(seed))
        if taken_back:
            assert taken_back == {"made/whole"}
            os.rename(home / "draft", home / "made/whole")
        assert (home / "made/whole").read_bytes() == whole
        seen.add((home / "record").read_bytes())
    assert seen == {b"first\nsecond\n", b"first\n", b"first\nsec", b"first\n" + bytes(7)}


def test_a_folders_sync_makes_names_safe_and_a_reused_number_is_a_new_file():
    renamed = Call("rename", 7, -1, "objects/new", "staging/new")
    assert unsynced([renamed])[1] == [renamed]
    assert unsynced([renamed, Call("sync", 3, 0, "objects")])[1] == []
    old = [Call("write", 5, 0, "gone"), Call("sync", 5, 900, "gone"), Call("unlink", 0, 0, "gone")]
    assert unsynced([*old, Call("write", 5, 0, "fresh")])[0] == {5: 0}
    assert unsynced([*old, Call("write", 5, 900, "gone")])[0] == {5: 900}


def test_plans_are_calls_that_can_still_come_and_take_turns():
    key = "0123456789abcdef" * 4
    calls = [
        Call("write", 1, 0, "mlflow.db"),
        Call("rename", 2, -1, f"store/objects/sample/{key}", f"store/staging/{key}.1.abc"),
        Call("unlink", 0, 0, f"store/locks/{key}.lock"),
    ]
    known = places(calls, artifacts=1)
    assert [(p.call, p.pattern) for p in known] == [
        ("write", "mlflow.db"), ("rename", "store/objects/sample/*"), ("unlink", "store/locks/*")
    ]  # fmt: skip
    hit: Counter[str] = Counter()
    drawn = {choose(known, 0.8, hit, random.Random(seed)) for seed in range(2)}
    assert drawn == {"unlink before 1 store/locks/*", "unlink after 1 store/locks/*"}
    assert choose([Place("write", "early", (0.0,))], 0.5, hit, random.Random(0)) is None


def test_metrics_by_the_clock_count_only_where_one_is_there_twice(tmp_path):
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("create table runs (run_uuid, name)")
        database.execute("create table metrics (run_uuid, key, step)")
        database.execute("insert into runs values (1, 'chaos')")
        rows = [("update/loss", 1), ("system/cpu", 1), ("system/cpu", 2), ("system/cpu", 2)]
        database.executemany("insert into metrics values (1, ?, ?)", rows)
    assert points(tmp_path) == {("chaos", "update/loss", 1): 1, ("chaos", "system/cpu", 2): 2}

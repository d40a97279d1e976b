"""A control group per jail, where the machine lets this user make one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hacrl_core.verification import close_pool, pool
from hacrl_core.verification.jail import cgroups, kernel
from tests.patience import patience
from tests.sandbox.judge import run_programs, write_verifier
from tests.sandbox.run_all import GOOD

pytestmark = pytest.mark.skipif(not kernel.LINUX, reason="control groups exist on Linux only")
# Starts children that sleep until the kernel refuses one, and prints how many there are.
FORKS = """
import os, sys, time
sys.stdin.read(1)
count = 0
try:
    for count in range(100):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
except OSError:
    pass
print(count, flush=True)
sys.stdin.read()
"""


def test_a_group_limits_all_processes_of_a_jail_together() -> None:
    child = subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        reason = cgroups.confine(child.pid, [child.pid], memory=1 << 30, most=6)
        if child.pid not in cgroups._made:
            pytest.skip(f"this user may make no control group here: {reason}")
        (path,) = [Path(place) for place in cgroups._made[child.pid]]
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("x")
        child.stdin.flush()
        assert int(child.stdout.readline()) == 5
        members = [int(pid) for pid in (path / "cgroup.procs").read_text().split()]
        for pid in members:
            os.kill(pid, 9)
    finally:
        child.kill()
        child.wait()
    deadline = time.monotonic() + patience(10)
    while (path / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    cgroups.release(child.pid)
    assert not path.exists()


def test_workers_say_whether_they_have_a_group_and_leave_none_behind(tmp_path: Path) -> None:
    # Spawners of verifiers that tests before this one used would be in the pool too.
    close_pool()
    try:
        assert run_programs(write_verifier(tmp_path), [GOOD])[0]["kind"] == "passed"
        with pool.shared_pool() as shared:
            (spawner,) = [each.process.pid for each in shared.spawners.values() if each.process]
            layers = shared.workers[0].layers
        assert bool(_groups_of(spawner)) == (layers["control group"] == "" or "version 1" in layers["control group"])
    finally:
        close_pool()
    deadline = time.monotonic() + patience(10)
    while _groups_of(spawner) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _groups_of(spawner) == []


def _groups_of(spawner: int) -> list[str]:
    parents = {cgroups._parent("cgroup2", ""), cgroups._parent("cgroup", "pids")} - {None}
    names = [name for parent in parents if parent for name in os.listdir(parent)]
    return [name for name in names if name.startswith(f"hacrl-{spawner}-")]


def test_a_machine_without_such_groups_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("cgroup2 /nowhere cgroup2 rw 0 0\n")
    (tmp_path / "own").write_text("0::/user.slice/session.scope\n")
    monkeypatch.setattr(cgroups, "_MOUNTS", str(tmp_path / "mounts"))
    monkeypatch.setattr(cgroups, "_OWN", str(tmp_path / "own"))
    assert cgroups._parent("cgroup2", "") == "/nowhere/user.slice"
    assert cgroups.confine(1, [1], 1, 1) == "no hierarchy of control groups passes memory and pids on"

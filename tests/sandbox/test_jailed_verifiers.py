"""A user's verifier in the sandbox: its own folder, nothing else, unless the settings allow it; and clear words."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hacrl_core.verification import close_pool
from hacrl_core.verification.jail import kernel
from hacrl_core.verification.jail.own_files import own_files
from hacrl_core.verification.pool import Group, Limits, shared_pool
from tests.sandbox.place import is_alive

pytestmark = pytest.mark.skipif(not kernel.LINUX, reason="the sandbox exists on Linux only")

MODULE = """
import os, socket, subprocess
from pathlib import Path
HERE = Path(__file__).parent
def reads(response, gold): return open(response).read() == "content"
def data(response, gold): return (HERE / "data.txt").read_text() == "content"
def hidden(response, gold): return (HERE / ".secret").read_text() == "content"
def store(response, gold): return (HERE / "runs" / "store" / "objects").exists()
def connects(response, gold): socket.create_connection(("127.0.0.1", int(response)), 3); return True
def writes(response, gold): Path(response).write_text("x"); return True
def keeps(response, gold): Path("/tmp/kept").write_text("x"); return Path("/tmp/kept").exists()
def kills(response, gold): os.kill(-1, 9); return True
def starts(response, gold):
    subprocess.Popen(["/bin/sh", "-c", "true"]) if os.path.exists("/bin/sh") else None
    pid = os.fork()
    if pid == 0:
        os.setsid()
        import time; time.sleep(600)
    return True, "started"
def environment(response, gold): return response in os.environ
def bomb(response, gold):
    count = 0
    while True:
        try:
            if os.fork() == 0:
                import time; time.sleep(600)
            count += 1
        except OSError: return True, str(count)
def traces(response, gold):
    import ctypes
    return ctypes.CDLL(None).syscall(101, 16, os.getppid(), 0, 0) == 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    own = tmp_path / "own"
    (own / "runs" / "store" / "objects").mkdir(parents=True)
    (own / "jailed_verifier.py").write_text(MODULE)
    (own / "data.txt").write_text("content")
    (own / ".secret").write_text("content")
    (tmp_path / "outside.txt").write_text("content")
    sys.path.insert(0, str(own))
    yield tmp_path
    sys.path.remove(str(own))
    close_pool()


def judge(name: str, response: str = "", **limits: Any) -> dict[str, Any]:
    """Have a worker call one function of the module on one response."""
    found: list[dict[str, Any]] = []
    row = json.dumps({"id": "", "messages": [], "answer": "x", "source": "", "tags": {}, "columns": {}})
    group = Group([0], [(row, response)], f"jailed_verifier:{name}", {})
    chosen = Limits(cpu_seconds=10, wall_seconds=20, memory_mb=1024, workers=1, **limits)
    with shared_pool() as pool:
        pool.run([group], chosen, "", lambda key, result: found.append(result))
    return found[0]


def test_files_outside_are_denied_until_they_are_allowed(folder: Path) -> None:
    outside = str(folder / "outside.txt")
    denied = judge("reads", outside)
    assert denied["verdict"] == "error"
    assert "sandbox_read" in denied["message"]
    assert judge("reads", outside, read=(outside,))["verdict"] == "correct"
    assert judge("reads", outside, read=(str(folder),))["verdict"] == "correct"
    assert judge("reads", "/etc/passwd")["verdict"] == "error"


def test_its_own_folder_without_hidden_files_and_stores(folder: Path) -> None:
    assert judge("data")["verdict"] == "correct"
    assert judge("hidden")["verdict"] == "error"
    assert judge("store")["verdict"] == "incorrect"


def test_no_network_until_it_is_allowed(folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        denied = judge("connects", port)
        assert denied["verdict"] == "error"
        assert "sandbox_network" in denied["message"]
        assert judge("connects", port, network=True)["verdict"] == "correct"


def test_nothing_is_written_outside(folder: Path) -> None:
    for place in (folder / "x", folder / "own" / "x", Path("/tmp/left-by-a-verifier")):
        judge("writes", str(place))
        assert not place.exists()
    assert judge("keeps")["verdict"] == "correct"
    assert not Path("/tmp/kept").exists()


def test_other_processes_are_out_of_reach(folder: Path) -> None:
    judge("kills")
    assert judge("data")["verdict"] == "correct"
    assert judge("traces")["verdict"] != "correct"


def test_what_it_starts_ends_with_its_worker(folder: Path) -> None:
    assert judge("starts")["answer"] == "started"
    assert int(judge("bomb")["answer"]) < 300
    with shared_pool() as pool:
        process = pool.spawners[""].process
        assert process is not None
        below = _descendants(process.pid)
    assert len(below) > 3
    close_pool()
    deadline = time.monotonic() + 20
    while any(map(is_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, below))


def _descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_secrets_of_the_environment_stay_outside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert judge("environment", "MY_TOKEN")["verdict"] == "incorrect"
    assert judge("environment", "MY_TOKEN", environment=("MY_TOKEN",))["verdict"] == "correct"


def test_own_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = folder / "own"
    (own / "package").mkdir()
    (own / "package" / "__init__.py").touch()
    files = {Path(path).name for path in own_files("jailed_verifier:data")}
    assert files == {"jailed_verifier.py", "data.txt", "package"}
    assert {Path(path).name for path in own_files("package:f")} == {"jailed_verifier.py", "package"}
    assert {Path(path).name for path in own_files(str(own / "package"))} == {"jailed_verifier.py", "package"}
    monkeypatch.setenv("HACRL_HOME", str(own / "package"))
    assert "package" not in {Path(path).name for path in own_files(str(own / "jailed_verifier.py"))}
    for index in range(250):
        (own / f"{index}.dat").touch()
    assert not any(path.endswith(".dat") for path in own_files("jailed_verifier:data"))
    assert own_files("numpy:array") == own_files("no_such_module:f") == []
    assert os.path.exists(own)

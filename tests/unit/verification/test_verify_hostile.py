"""Verifiers of the user's own that misbehave: what they start, what they read, what they write."""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.verification import close_pool, verify_batch
from tests.patience import factor, patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MODULE = """
import json, os, resource, struct, subprocess, sys, tempfile, time

SPIN = [sys.executable, "-c", "import os\\nwhile True: pass"]

def starts(response, gold):
    kind, place = response.split(" ", 1)
    if kind == "daemon":  # leaves the group and its parent
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                note(place, os.getpid())
                while True: pass
            os._exit(0)
        os.wait()
    elif kind == "session":
        note(place, subprocess.Popen(SPIN, start_new_session=True).pid)
    else:
        note(place, subprocess.Popen(SPIN).pid)
    if kind == "crash": os.kill(os.getpid(), 11)
    if kind == "fine": return True
    while True: pass

def note(place, pid):
    with open(place + ".new", "w") as file: file.write(str(pid))
    os.rename(place + ".new", place)

def environment(response, gold): return True, json.dumps(dict(os.environ))

def limits(response, gold):
    child = "import resource as r; print([r.getrlimit(n)[0] for n in (r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NPROC)])"
    return True, subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout

GARBAGE = {
    "text": b"hello, world\\n" * 20,
    "huge": b"\\xff\\xff\\xff\\xff and so on",
    "short": b"\\x00",
    "list": struct.pack(">I", 2) + b"[]",
    "json": struct.pack(">I", 3) + b"{,}",
    "deep": struct.pack(">I", 100000) + b"[" * 100000,
    "forged": struct.pack(">I", 40) + b'{"verdict": "correct", "reward": 1e9999}',
}

def writes(response, gold):
    for name in os.listdir("/proc/self/fd"):
        try: os.write(int(name), GARBAGE.get(response, b""))
        except OSError: pass
    if response == "close": os.closerange(3, 100)
    if response == "large":
        with tempfile.TemporaryFile() as file: file.truncate(1 << 40)
    return True
"""


@pytest.fixture(scope="module", autouse=True)
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile_verifier.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    close_pool()
    yield
    sys.path.remove(str(folder))
    close_pool()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + patience(seconds)
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def verify(function: str, responses: list[str], **changes: object) -> list[tuple[str, str]]:
    config = VerifyConfig.model_validate(
        {"verifier": f"hostile_verifier:{function}", "timeout_seconds": 1.0, "workers": 1, **changes}
    )
    verdicts = verify_batch(responses, ["gold"] * len(responses), config)
    return [(verdict.verdict.value, verdict.extracted_answer) for verdict in verdicts]


@pytest.mark.parametrize(
    ("kind", "verdict"), [("group", "timeout"), ("session", "timeout"), ("daemon", "timeout"), ("crash", "error")]
)
def test_what_a_verifier_started_ends_with_it(kind: str, verdict: str, tmp_path: Path) -> None:
    """Also without a sandbox, which would not let it note its process ids; tests/sandbox has the same inside one."""
    place = tmp_path / "pid"
    assert verify("starts", [f"{kind} {place}"], sandbox="off")[0][0] == verdict
    assert ends(int(place.read_text()))


def test_what_a_verifier_started_and_forgot_ends_with_the_pool(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    assert verify("starts", [f"fine {place}"], sandbox="off")[0][0] == "correct"
    assert alive(int(place.read_text()))
    close_pool()
    assert ends(int(place.read_text()))


def test_secrets_are_not_in_a_verifiers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = (
        "HACRL_CREDENTIALS",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_URI",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
    )
    for name in (*secrets, "LC_TIME", "MINE"):
        monkeypatch.setenv(name, "s3cret")
    close_pool()
    seen = json.loads(verify("environment", ["a"])[0][1])
    assert not {*secrets, "MINE"} & set(seen)
    assert seen["PATH"] == os.environ["PATH"]
    assert seen["LC_TIME"] == "s3cret"
    assert json.loads(verify("environment", ["a"], environment=["MINE"])[0][1])["MINE"] == "s3cret"
    assert "MINE" not in json.loads(verify("environment", ["a"])[0][1])


def test_the_named_variables_are_identity_only_where_there_are_any() -> None:
    assert "environment" not in VerifyConfig().identity()
    assert VerifyConfig(environment=("MINE",)).identity()["environment"] == ["MINE"]


def test_what_a_verifier_starts_has_limits() -> None:
    cpu, size, processes = eval(verify("limits", ["a"], memory_mb=2048)[0][1])
    assert 10 <= cpu <= 10 * (os.cpu_count() or 1) + 100
    assert size == 2048 << 20
    assert processes != resource.RLIM_INFINITY


def test_bytes_on_every_descriptor_cost_one_verdict_each() -> None:
    bad = ["text", "huge", "list", "json", "deep", "forged", "close", "large"]
    responses = [word for name in bad for word in (name, f"good {name}")]
    found = dict(zip(responses, [verdict for verdict, _ in verify("writes", responses)], strict=True))
    assert {name: found[name] for name in bad} == dict.fromkeys(bad, "error")
    assert {found[f"good {name}"] for name in bad} == {"correct"}


def test_half_a_message_is_a_timeout_and_holds_up_nobody() -> None:
    responses = ["one", "short", "three"]
    found = verify("writes", responses, wall_timeout_seconds=3 * factor())
    assert found[0][0] == found[2][0] == "correct"
    assert found[1][0] in ("timeout", "error")

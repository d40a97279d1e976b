"""Worker processes: they answer, they are started again after a death, and they go when the campaign goes."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from flows.run.events import Listener
from flows.run.placement import Placement
from flows.run.worker import Progress, Stopped, Worker, WorkerDied
from hacrl_core.config.base import StrictConfig
from hacrl_core.errors import HacrlError
from stages.spec import StageCall
from stages.warmstart import WarmstartSlice
from tests.flow.conftest import AGENT, TINY
from tests.patience import patience

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def warmstart(**changes):
    corpus = {"kinds": {"addition": 1.0}, "levels": {"easy": 1.0}}
    config = WarmstartSlice.model_validate({"warmstart": {**AGENT, **changes}, "corpus": corpus})
    return StageCall("warmstart", config, seed=1, agent="ada")


def test_a_killed_worker_is_an_error_that_may_be_retried_and_the_next_call_starts_a_new_one(tmp_path):
    worker = Worker("ada", tmp_path, Placement("cpu"))
    busy = threading.Event()
    listener = Listener()
    listener.progress = lambda *news: busy.set()

    def kill():
        assert busy.wait(patience(120))
        os.kill(worker._process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(WorkerDied, match=r"warmstart ada: the worker of ada died \(killed by SIGKILL\)"):
            worker.run(warmstart(steps=100_000), listener)
        killer.join()
        outcome = worker.run(warmstart(steps=20), listener)
        assert not outcome.cached
        assert worker.run(warmstart(steps=20), listener).cached
        # The dead one's staging folder is swept by whoever comes next; the published one is whole.
        assert (outcome.ref.path / "model.safetensors").exists()
    finally:
        worker.stop()
    with pytest.raises(Stopped):
        worker.run(warmstart(steps=20), listener)


def test_an_error_in_a_stage_reaches_the_caller_and_the_worker_lives_on(tmp_path):
    worker = Worker("ada", tmp_path, Placement("cpu"))
    try:
        with pytest.raises(HacrlError, match="warmstart ada"):
            worker.run(StageCall("warmstart", StrictConfig(), agent="ada"), Listener())
        process = worker._process
        assert not worker.run(warmstart(steps=20), Listener()).cached
        assert worker._process is process
    finally:
        worker.stop()


# kill -9 is the business of tests/chaos.
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_campaign_leaves_no_process_and_goes_on_where_it_was(tmp_path, number, code):
    agents = {"ada": TINY["agents"]["ada"]}  # one worker will do
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "agents": agents, "iterations": 200, "evaluate": {}}))
    environment = {**os.environ, "HACRL_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flows.cli", "run", str(tmp_path / "tiny.yaml")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_ctrl_c,
    )
    try:
        _stop_and_resume(process, command, environment, tmp_path, number, code)
    finally:
        process.kill()


def _heed_ctrl_c() -> None:
    """A shell's background job ignores SIGINT, and so would its children; a terminal's foreground job does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _stop_and_resume(process, command, environment, tmp_path, number, code):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("iteration   2/"):
            os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
            break
    clock = time.monotonic()
    rest = process.communicate(timeout=patience(60))[0]
    assert process.returncode == code, "".join(lines) + rest
    assert time.monotonic() - clock < patience(30)
    assert "Run the same command again to go on" in rest
    assert "Traceback" not in rest
    deadline = time.monotonic() + patience(10)
    while (left := _below(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    done = list((tmp_path / "home" / "store" / "objects" / "update").iterdir())
    again = subprocess.run(
        [*command, "--set", "iterations=2"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "nothing had to run" in again.stdout  # two iterations were complete
    assert len(done) >= 2


def _below(place: Path) -> list[str]:
    """Processes whose environment names this test's home."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"HACRL_HOME={place}".encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append((entry / "cmdline").read_text().replace("\0", " ")[:120])
        except OSError:
            continue
    return found


def test_progress_is_told_so_often_that_a_person_sees_it_and_never_by_short_stages(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("flows.run.worker.time.monotonic", lambda: clock[0])
    told = []
    progress = Progress(lambda done, total, note: told.append(done))
    for stage_seconds in (0.2, 2.0):
        progress.begin()
        for step in range(1, 101):
            clock[0] += stage_seconds / 100
            progress(step, 100, "steps")
    assert told == [13, 26, 39, 52, 65, 78, 91, 100]


@dataclass(frozen=True)
class ImportsTriton:
    title: str = "import Triton"
    agent: str = "ada"

    def perform(self, store, context):
        import triton._C.libtriton

        return triton._C.libtriton.__name__


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_worker_that_has_triton_loaded_ends_without_a_word(tmp_path):
    """Its library counts what is left at the end, and objects that nobody looks through any more are left."""
    lines = []
    worker = Worker("ada", tmp_path, Placement("cpu"), output=lambda name, line: lines.append(line))
    try:
        assert worker.run(ImportsTriton(), Listener()) == "triton._C.libtriton"
    finally:
        worker.stop()
    time.sleep(0.5)  # a thread forwards what it prints
    assert lines == []

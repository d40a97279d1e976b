"""Processes that are started before anything is asked of them."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.run.events import Listener
from flows.run.opening import start_early
from hacrl_core.artifacts import Store
from tests.flow.conftest import tiny
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]


def started() -> list[str]:
    return sorted(process.name for process in multiprocessing.active_children() if process.name.startswith("hacrl "))


def test_the_first_executor_has_the_early_processes_and_the_next_one_starts_its_own(tmp_path) -> None:
    config, store = tiny(), Store(tmp_path)
    with start_early(config, store, Listener(), config.agents) as open_early:
        assert started() == [f"hacrl {name}" for name in sorted(config.agents)]
        first = open_early(config, store, Listener())
        first.close(now=True)
        assert started() == []
        assert open_early(config, store, Listener()) is not first


def test_whatever_ends_the_start_ends_the_processes(tmp_path) -> None:
    config = tiny()
    with pytest.raises(KeyboardInterrupt), start_early(config, Store(tmp_path), Listener(), config.agents):
        raise KeyboardInterrupt
    assert started() == []


def test_agents_that_come_later_or_go_or_are_others_are_not_started(tmp_path) -> None:
    config = tiny()
    ada, ben = config.agents.values()
    agents = {"ada": ada.model_copy(update={"joins": 1}), "ben": ben.model_copy(update={"leaves": 1})}
    for chosen in (agents, {}):
        with start_early(config, Store(tmp_path), Listener(), chosen):
            assert started() == []


def test_a_process_that_cannot_be_started_now_ends_nothing(tmp_path, monkeypatch) -> None:
    def refuse(process) -> None:
        raise BlockingIOError("no process can be had")

    config, store = tiny(), Store(tmp_path)
    with monkeypatch.context() as there:
        there.setattr("multiprocessing.context.SpawnProcess.start", refuse)
        with start_early(config, store, Listener(), config.agents):
            assert started() == []


STOPPED = """
import os, signal, sys, threading, time
from pathlib import Path
from flows.run.events import Listener
from flows.run.opening import start_early
from flows.run.signals import Stop, raise_on_signals
from hacrl_core.artifacts import Store
from tests.flow.conftest import tiny

if __name__ == "__main__":
    config = tiny()
    try:
        with raise_on_signals():
            threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), int(sys.argv[1]))).start()
            with start_early(config, Store(Path(sys.argv[3])), Listener(), config.agents):
                time.sleep(60)
    except Stop as stop:
        sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("milliseconds", [3, 8, 15])
def test_a_signal_while_processes_start_is_a_clean_end(tmp_path, number, milliseconds) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    done = subprocess.run(
        [sys.executable, str(script), str(int(number)), str(milliseconds / 1000), str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(60),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")

"""Signals are heard while the main thread waits, whichever thread receives them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.run.events import Listener
from flows.run.runner import InlineRunner
from flows.run.session import open_session
from hacrl_core.artifacts import Store
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
WAITING = """
import signal, sys, threading, time
from concurrent.futures import Future
from flows.run.signals import Stop, raise_on_signals

heard = threading.Event()

def send(numbers):
    time.sleep(0.5)  # until the main thread waits
    for number in numbers:
        signal.pthread_kill(threading.get_ident(), number)
        heard.wait()  # two at once would count as one
        time.sleep(0.2)

with raise_on_signals():  # the command
    threading.Thread(target=send, args=([int(word) for word in sys.argv[1:]],), daemon=True).start()
    try:
        with raise_on_signals():  # its stages
            Future().result()
    except Stop as stop:
        print("stopped", stop.number, flush=True)
        heard.set()
        if len(sys.argv) > 2:
            Future().result()  # a clean end that takes its time
        sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_another_thread_wakes_the_main_thread(number):
    done = wait_with([number])
    assert (done.returncode, done.stdout) == (128 + number, f"stopped {int(number)}\n"), done.stderr


def test_the_second_signal_to_another_thread_ends_at_once():
    done = wait_with([signal.SIGINT, signal.SIGINT])
    assert (done.returncode, done.stdout) == (130, "stopped 2\n"), done.stderr


SWALLOWING = """
import os, signal, sys, time
from flows.run.signals import Stop, raise_on_signals
from flows.run.worker import end_once

class Swallows:  # an exception cannot leave a finalizer: Python reports it as ignored and goes on
    def __init__(self, times):
        self.times = times

    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1])) if self.times == 2 else time.sleep(0.1)

def swallow(times):
    Swallows(times)

def campaign():
    for times in (2, 1):  # the second one swallows what is sent again, too
        swallow(times)
    time.sleep(60)

with raise_on_signals():
    if sys.argv[2] == "worker":
        signal.signal(signal.SIGTERM, end_once)
    try:
        with raise_on_signals() if sys.argv[2] == "command" else open(os.devnull):
            campaign()
    except Stop as stop:
        print("stopped", stop.number, flush=True)
        sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "where", "printed"),
    [
        (signal.SIGINT, "command", "stopped 2\n"),
        (signal.SIGTERM, "command", "stopped 15\n"),
        (signal.SIGTERM, "worker", ""),
    ],
)
def test_a_signal_whose_exception_python_ignores_is_not_lost(number, where, printed):
    """Compiled code does the same: a campaign ran on after SIGTERM had hit pydantic while it serialized a config."""
    done = wait_with([number, where], SWALLOWING)
    assert (done.returncode, done.stdout) == (128 + number, printed), done.stderr
    assert "ignored" not in done.stderr


POOL = """
from flows.servers.serve import run_until_signal
import anyio, asyncio, os, signal, sys, time

def send():
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.1)

class Finalizer:  # an exception cannot leave it
    def __del__(self):
        send()

async def task():
    Finalizer() if sys.argv[2] == "finalizer" else send()
    await anyio.sleep(60)

async def work():
    async with anyio.create_task_group() as group:
        group.start_soon(task)
        await anyio.sleep(60)

try:
    asyncio.run(run_until_signal(work()))
except asyncio.CancelledError:
    print("the worker stopped", flush=True)
"""


@pytest.mark.parametrize("where", ["task", "finalizer"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_of_the_pool_ends_quietly_wherever_its_loop_is_when_a_signal_comes(number, where):
    """An exception that is raised in a task of a group is reported as that group's failure, with a traceback."""
    done = wait_with([number, where], POOL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the worker stopped\n", "")


def wait_with(words, script=WAITING):
    words = [str(int(word)) if isinstance(word, signal.Signals) else word for word in words]
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a background job ignores it
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
        preexec_fn=heed,
    )


CLEANING = """
import os, signal, time
from flows.run.worker import end_once

signal.signal(signal.SIGTERM, end_once)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    print("cleaned up", flush=True)
"""


def test_a_worker_that_is_told_to_end_twice_finishes_its_clean_up():
    """The group's SIGTERM and the campaign's own: the second one must not leave a staging folder behind."""
    ended = subprocess.run(
        [sys.executable, "-c", CLEANING], cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert ended.stdout == "cleaned up\n", ended.stderr
    assert ended.returncode == 143


def test_what_a_killed_worker_has_staged_is_removed_and_what_others_stage_stays(tmp_path):
    """A busy machine may keep a worker from ending in time; it is killed then, and cannot clean up."""
    store = Store(tmp_path)
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "aa.7.left").mkdir()
    (tmp_path / "staging" / "bb.8.busy").mkdir()

    class KillsItsWorkers:
        def close(self, *, now: bool) -> None:
            assert now

    executor = KillsItsWorkers()
    session = open_session(InlineRunner(store, executor, Listener()), executor)
    with store.lock("bb"), pytest.raises(KeyboardInterrupt), session:
        raise KeyboardInterrupt
    assert [folder.name for folder in (tmp_path / "staging").iterdir()] == ["bb.8.busy"]

"""Campaigns as real processes that are stopped, killed, and share a store.

The commands are forked from a process that has everything imported (see ``zygote.py``) and share one home, so that warm
starts are computed once. What Prefect adds to a stop is tested in ``tests/flow/test_workers.py``.
"""

import ctypes
import json
import os
import signal
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from tests.chaos.chaos import Driver, attack, start_zygote
from tests.chaos.commands import environment, processes_of, read_until, start, wait_until_gone
from tests.flow.conftest import TINY
from tests.patience import patience

pytestmark = pytest.mark.slow
# Seconds that only a failure waits for: it takes one or two on a quiet machine.
WITHIN, GONE = 30.0, 10.0
SLOW_VERIFIER = """
import time

def check(response, gold):
    time.sleep(0.2)
    return 0.0
"""


class Command:
    """A campaign under way."""

    def __init__(self, zygote, home, name, environ=None, **changes):
        self.home, self._zygote = home, zygote
        config, self.output = home.parent / f"{name}.yaml", home.parent / f"{name}-{time.monotonic()}.out"
        config.write_text(yaml.safe_dump({**TINY, "name": name, **changes}))
        environ = environment(home, environ)
        environ["PYTHONPATH"] += f"{os.pathsep}{home.parent}"
        self.pid = zygote.start(["run", str(config)], environ, self.output)
        self.name = name

    def text(self):
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, happened, seconds=90.0):
        deadline = time.monotonic() + patience(seconds)
        while not happened():
            assert self._zygote.code(self.pid) is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def end(self, seconds=90.0):
        return self._zygote.wait(self.pid, patience(seconds))

    def has_ended(self):
        return self._zygote.code(self.pid) is not None

    def stop(self, number, *, group=False):
        """Send the signal; the output, once everything is gone."""
        os.killpg(self.pid, number) if group else os.kill(self.pid, number)
        code = self.end(WITHIN)
        assert code == 128 + number, self.text()
        assert wait_until_gone(self.home, patience(GONE), self.pid) == []
        assert "Traceback" not in self.text()
        assert "Run the same command again to go on" in self.text()
        return self.text()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def forking(place):
    """The process that commands are forked from, and the library that kills inside system calls."""
    zygote, library = start_zygote(place)
    yield zygote, library
    zygote.close()


@pytest.fixture(scope="module")
def run(place, forking):
    return lambda name, environ=None, **changes: Command(forking[0], place / "home", name, environ, **changes)


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_schedulers_sigterm_to_the_whole_group_ends_training_and_says_how_far_it_is(run):
    """Ctrl-C, and SIGTERM to the command alone, are tested under Prefect in ``tests/flow/test_workers.py``."""
    command = run("stopped", iterations=500)
    command.wait_for(lambda: "iteration   1/" in command.text())
    text = command.stop(signal.SIGTERM, group=True)
    saved = int(text.split("stopped; campaign stopped has ")[1].split(" of 500 iterations")[0])
    assert saved >= 1
    assert "died" not in text  # its workers were told to go as well, which is no accident
    assert list((command.home / "store" / "staging").iterdir()) == []


def test_during_verification_no_verifier_is_left_and_what_was_checked_is_kept(run, place):
    (place / "slow_verifier.py").write_text(SLOW_VERIFIER)
    command = run("checking", verify={"verifier": "slow_verifier:check", "workers": 1})
    shards = (command.home / "store" / "partial").glob
    command.wait_for(lambda: list(shards("*/verdicts-*")))
    command.stop(signal.SIGTERM)
    assert list(shards("*/verdicts-*"))


@contextmanager
def standing_still(command):
    """The campaign with its workers stopped: a stage is under way and does not end. Nothing is left afterwards."""
    command.wait_for(lambda: "iteration " in command.text())
    os.killpg(command.pid, signal.SIGSTOP)
    # On a busy machine a process that has not run since then is not stopped yet. It would take a signal that comes next
    # first, because of its lower number: SIGTERM would be heard, without an effect, and be no longer waiting.
    command.wait_for(lambda: all_stopped(command.pid))
    os.kill(command.pid, signal.SIGCONT)
    try:
        yield
    finally:
        if not command.has_ended():
            os.killpg(command.pid, signal.SIGKILL)
        for process in processes_of(command.home, command.pid):
            for number in (signal.SIGCONT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.kill(int(process.split()[0]), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_another_thread_receives_is_heard_while_a_stage_runs(run, number):
    """The kernel may give a signal to any thread; only a thread of the test's choice proves that each will do."""
    command = run(f"threads-{number}", iterations=500)
    with standing_still(command):
        time.sleep(1.0)  # the main thread has nothing to do but to wait for the stage
        for thread in sorted(int(entry.name) for entry in Path(f"/proc/{command.pid}/task").iterdir()):
            if thread != command.pid:
                assert ctypes.CDLL(None).tgkill(command.pid, thread, number) == 0
                break
        assert command.end(WITHIN) == 128 + number, command.text()
        assert "Run the same command again to go on" in command.text()
        assert "Traceback" not in command.text()


def test_a_second_ctrl_c_ends_at_once(run):
    command = run("impatient", iterations=500, update={"learning_rate": 2e-3, "minibatch_prompts": 3})
    with standing_still(command):  # a clean end has to wait for its workers, some seconds
        os.kill(command.pid, signal.SIGINT)
        command.wait_for(lambda: told_to_go(command.pid))  # the first one was heard; two at once would count as one
        os.kill(command.pid, signal.SIGINT)
        assert command.end(WITHIN) == 130, command.text()
        assert "stopped at once" in command.text()
        os.killpg(command.pid, signal.SIGCONT)
        assert wait_until_gone(command.home, patience(GONE), command.pid) == []


def all_stopped(session):
    """Whether every thread of the session's processes stands still."""
    states = []
    for process in processes_of(Path("nowhere"), session):
        for thread in Path(f"/proc/{process.split()[0]}/task").glob("*/stat"):
            with suppress(OSError):
                states.append(thread.read_text().rpartition(")")[2].split()[0])
    return set(states) == {"T"}


def told_to_go(session):
    """Whether a process of the session stands still while SIGTERM waits for it: a worker that was told to end."""
    for process in processes_of(Path("nowhere"), session):
        with suppress(OSError):
            status = Path(f"/proc/{process.split()[0]}/status").read_text()
            pending = int(status.split("ShdPnd:")[1].split()[0], 16)
            if pending & 1 << (signal.SIGTERM - 1):
                return True
    return False


def test_sigterm_while_prefect_starts(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    process = start(["run", str(tmp_path / "tiny.yaml")], environment(tmp_path / "home"))
    said = read_until(process, "starting Prefect")
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGTERM)
    said += process.communicate(timeout=patience(60))[0]
    assert process.returncode == 143, said
    assert "stopped; campaign tiny has 0 of 2 iterations and 0 finished stages saved" in said
    assert "Traceback" not in said
    assert wait_until_gone(tmp_path / "home", patience(GONE), process.pid) == []


# -- sharing -----------------------------------------------------------------------------------------------------------


def events(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_two_campaigns_compute_each_artifact_once_and_one_of_them_twice_is_refused(run, place):
    log = place / "shared.jsonl"
    both = [run(name, {"CHAOS_LOG": str(log)}, iterations=1, seed=90) for name in ("left", "right")]
    both[0].wait_for(lambda: events(log))
    again = run("left", iterations=1, seed=90)
    assert again.end() == 2
    assert f"campaign left: already running (process {both[0].pid})" in again.text()
    assert [command.end() for command in both] == [0, 0], both[0].text() + both[1].text()
    ran = Counter(event["key"] for event in events(log) if event["event"] == "run")
    assert len(ran) >= 15
    assert set(ran.values()) == {1}
    assert "is computing the same artifact; waiting for it" in both[0].text() + both[1].text()


def test_when_the_holder_of_a_lock_is_killed_the_one_that_waits_goes_on(run, place):
    log = place / "holder.jsonl"
    holder = run("holder", {"CHAOS_LOG": str(log)}, iterations=1, seed=91)
    holder.wait_for(lambda: any(event["stage"] == "warmstart" for event in events(log)))
    os.killpg(holder.pid, signal.SIGSTOP)  # it keeps its locks and gets nowhere
    waiter = run("waiter", {"CHAOS_LOG": str(log)}, iterations=1, seed=91)
    waiter.wait_for(lambda: "is computing the same artifact; waiting for it" in waiter.text())
    os.killpg(holder.pid, signal.SIGKILL)
    assert holder.end() == -signal.SIGKILL
    assert waiter.end() == 0, waiter.text()
    store = waiter.home / "store"
    assert [path for name in ("staging", "locks") for path in (store / name).iterdir()] == []


# -- killing -----------------------------------------------------------------------------------------------------------


def test_a_short_chaos_run(forking, tmp_path):
    """A handful of the kills of ``make chaos``."""
    driver = Driver(tmp_path, 4, 1, *forking)
    found = attack(driver, kills=4, full=0, minutes=patience(10))
    assert driver.tally.problems == []
    assert found["kills"] == 4
    assert found["identical_digests"] == found["campaigns"] >= 1
    assert found["re_executed_published_stages"] == found["duplicate_points"] == found["problems"] == 0

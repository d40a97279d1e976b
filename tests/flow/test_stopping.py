"""Ctrl-C and SIGTERM, with real processes: a clean end within seconds, no child left, and a word on what is saved."""

import os
import signal
import time

import pytest
import yaml

from tests.chaos.commands import environment, read_until, start, wait_until_gone
from tests.chaos.zygote import Zygote
from tests.flow.conftest import TINY

pytestmark = pytest.mark.slow
WITHIN = 15.0  # seconds, on a machine that does other things as well
SLOW_VERIFIER = """
import time

def check(response, gold):
    time.sleep(0.2)
    return 0.0
"""


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    forking = Zygote(tmp_path_factory.mktemp("zygote"))
    yield forking
    forking.close()


class Command:
    """A campaign that would run for long, in a home of its own."""

    def __init__(self, place, zygote, environ=None, **changes):
        self.home, self.output, self._zygote = place / "home", place / "output", zygote
        (place / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "iterations": 500, **changes}))
        words = ["run", str(place / "tiny.yaml")]
        self.output.write_text("")
        self.pid = zygote.start(words, environment(self.home) | (environ or {}), self.output)

    def wait_for(self, happened, seconds=90.0):
        deadline = time.monotonic() + seconds
        while not happened():
            assert self._zygote.code(self.pid) is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.02)

    def stop(self, number, *, group=False, within=WITHIN):
        """Send the signal; the output, once everything is gone."""
        begun = time.monotonic()
        os.killpg(self.pid, number) if group else os.kill(self.pid, number)
        code = self._zygote.wait(self.pid, within)
        text = self.output.read_text()
        assert code == 128 + number, text
        assert time.monotonic() - begun < within
        assert wait_until_gone(self.home, 2.0, self.pid) == []
        assert "Traceback" not in text
        return text


def test_sigterm_while_prefect_starts(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    process = start(["run", str(tmp_path / "tiny.yaml")], environment(tmp_path / "home"))
    said = read_until(process, "starting Prefect")
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGTERM)
    said += process.communicate(timeout=60)[0]
    assert process.returncode == 143, said
    assert "stopped; campaign tiny has 0 of 2 iterations and 0 finished stages saved" in said
    assert "Run the same command again to go on" in said
    assert "Traceback" not in said
    assert wait_until_gone(tmp_path / "home", 2.0, process.pid) == []


@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGTERM, True)])
def test_a_signal_in_the_middle_of_training_ends_it_and_says_how_far_it_is(tmp_path, zygote, number, group):
    """Ctrl-C reaches the whole group, as a scheduler's SIGTERM may; ``kill`` reaches the command alone."""
    command = Command(tmp_path, zygote)
    command.wait_for(lambda: "iteration   1/" in command.output.read_text())
    text = command.stop(number, group=group)
    saved = int(text.split("stopped; campaign tiny has ")[1].split(" of 500 iterations")[0])
    assert saved >= 1
    assert "Run the same command again to go on" in text
    assert list((command.home / "store" / "staging").iterdir()) == []


def test_during_verification_no_verifier_is_left_and_what_was_checked_is_kept(tmp_path, zygote):
    (tmp_path / "slow_verifier.py").write_text(SLOW_VERIFIER)
    path = {"PYTHONPATH": f"{environment(tmp_path)['PYTHONPATH']}:{tmp_path}"}
    command = Command(tmp_path, zygote, path, verify={"verifier": "slow_verifier:check", "workers": 1})
    shards = (command.home / "store" / "partial").glob
    command.wait_for(lambda: list(shards("*/verdicts-*")))
    command.stop(signal.SIGTERM)
    assert list(shards("*/verdicts-*"))


def test_a_second_ctrl_c_ends_at_once(tmp_path, zygote):
    command = Command(tmp_path, zygote)
    command.wait_for(lambda: list((command.home / "store" / "objects").glob("*/*")))
    os.killpg(command.pid, signal.SIGINT)
    time.sleep(0.02)
    begun = time.monotonic()
    os.killpg(command.pid, signal.SIGINT)
    assert zygote.wait(command.pid, WITHIN) == 130
    assert time.monotonic() - begun < 3.0
    assert "stopped at once" in command.output.read_text()
    assert wait_until_gone(command.home, 2.0, command.pid) == []

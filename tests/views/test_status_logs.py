"""What the terminal shows of campaigns: in 80 columns, whatever state they are in."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from flows.record.goal import TERMINAL, Goal, write_goal
from flows.record.history import read_history
from flows.record.log import Logbook, follow, parse, read_log
from flows.record.record import Record, read_entries
from flows.run.events import Listener
from flows.run.placement import Placement
from flows.run.worker import Worker, WorkerDied
from flows.views.status import show_log, show_status
from flows.views.text import can_redraw, waiting
from hacrl_core.artifacts import Store
from hacrl_core.config.base import StrictConfig
from hacrl_core.errors import ConfigError
from stages.spec import StageCall
from tests.patience import patience

from .conftest import seen_config

ROOT = Path(__file__).resolve().parents[2]


def console() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=False, color_system=None)


def shown(home, name=None, everything=False) -> str:
    screen = console()
    show_status(screen, home, name, everything=everything)
    return screen.file.getvalue()


def logged(home, name="seen", **options) -> str:
    screen = console()
    show_log(screen, home, name, **{"lines": 0, "following": False, "problems": False, "worker": None, **options})
    return screen.file.getvalue()


def test_status_has_progress_rate_cost_and_agents_in_80_columns(seen, history):
    text = shown(seen)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    campaign = next(line for line in lines if line.startswith("seen "))
    assert "complete" in campaign
    assert "3/3" in campaign
    assert " 144 " in campaign
    assert f"{history.seconds_per_iteration():.1f} s" in campaign
    for agent in ("ada", "ben"):
        row = next(line for line in lines if line.startswith(f"seen/{agent}"))
        assert f"{history.accuracy(agent, 'held_out')[-1][1]:.1%}" in row
        assert f"{history.rewards(agent)[-1][1]:.2f}" in row


def test_a_running_campaign_has_time_left_and_says_what_it_does(own):
    config = seen_config(iterations=5)
    with Record(own.campaign("seen"), config):
        log = Logbook(own.campaign("seen"))
        log.write("run", "seen")
        log.write("start", "generate ada #3")
        log.write("start", "generate ben #3 (again: something changed)")
        log.write("done", "generate ada #3: 1.00 s")
        text = shown(own, "seen")
        history = read_history(Store(own.store), own.campaign("seen"))
        log.close()
    assert "running" in text
    assert "3/5" in text
    assert "now: generate ben #3" in text
    assert history.seconds_left() == pytest.approx(2 * history.seconds_per_iteration())
    assert "stopped" in shown(own, "seen")


def test_a_campaign_of_scheduled_runs_is_idle_between_them_and_never_complete(own):
    folder = own.campaign("seen")
    write_goal(folder, Goal("a flow run", more=2, iterations=3))
    row = next(line for line in shown(own).splitlines() if line.startswith("seen "))
    assert re.search(r"idle\s+3 \(\+2\)", row)
    assert "complete" not in row
    write_goal(folder, Goal(TERMINAL, more=2, iterations=3))  # by hand, with hacrl run --more
    assert re.search(r"complete\s+3/3", shown(own))
    write_goal(folder, Goal("a flow run", more=2, iterations=5))  # its run did not get there
    assert re.search(r"complete\s+3/3", shown(own))


def test_a_campaign_that_failed_says_so_and_why_until_it_runs_again(own):
    with Record(own.campaign("seen"), seen_config(iterations=5)):
        log = Logbook(own.campaign("seen"))
    for kind, text in (("run", "seen"), ("error", "the disk of /somewhere is full"), ("end", "failed after 3.0 s")):
        log.write(kind, text)
    text = shown(own)
    assert "failed" in next(line for line in text.splitlines() if line.startswith("seen "))
    assert "seen failed: the disk of /somewhere is full" in text
    log.write("run", "seen")  # and was killed
    assert "stopped" in shown(own)
    log.write("end", "complete: 3 stages ran, 0 from the store, 1.0 s")
    log.close()
    assert "failed" not in shown(own)


@pytest.mark.parametrize("agent", ["ada", "ben"])
def test_a_campaign_whose_last_evaluation_did_not_run_is_not_complete(own, agent):
    assert "complete" in shown(own, "seen")
    record = own.campaign("seen") / "stages.jsonl"
    lines = record.read_text().splitlines()
    last = [line for line in lines if '"evaluate"' in line and f'"agent": "{agent}"' in line][-1]
    record.write_text("".join(f"{line}\n" for line in lines if line != last))
    text = shown(own, "seen")
    assert "3/3" in text
    assert "complete" not in text
    assert "stopped" in text
    assert read_history(Store(own.store), own.campaign("seen")).missing_evaluations() == [
        f"held_out of {agent} after 3"
    ]


def test_many_campaigns_are_counted_and_a_long_name_does_not_break_the_table(own):
    for number in range(14):
        with Record(
            own.campaign(f"a-campaign-with-a-rather-long-name-{number:02d}"),
            seen_config(name=f"a-campaign-with-a-rather-long-name-{number:02d}"),
        ):
            pass
    text = shown(own)
    assert "3 older campaigns; see them with --all" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "older campaigns" not in shown(own, everything=True)


def test_a_pause_between_two_nights_does_not_count_as_work(own):
    """The rate is a median of the last iterations' wall times."""
    history = read_history(Store(own.store), own.campaign("seen"))
    ends = [
        max(h.manifest.provenance.finished for h in history.finished if h.entry.stage == "update" and h.step == step)
        for step in (1, 2, 3)
    ]
    gaps = [b - a for a, b in pairwise(ends)]
    assert history.seconds_per_iteration() == min(gaps)


# -- logs --------------------------------------------------------------------------------------------------------------


def test_the_log_has_every_stage_with_its_seconds(seen):
    lines = read_log(seen.campaign("seen"))
    done = {line.text.partition(": ")[0]: line.text for line in lines if line.kind == "done"}
    for entry in read_entries(seen.campaign("seen")):
        call = StageCall(entry.stage, StrictConfig(), {}, None, entry.agent, entry.iteration, entry.variant)
        assert (call.label, f"{entry.seconds:.2f} s" in done[call.title]) == (entry.label, True)
    assert "reward mean" in done["verify ada iteration 1"]
    assert "accuracy" in done["evaluate ben held_out after iteration 3"]
    assert lines[0].kind == "run"
    assert lines[-1].kind == "end"


def test_cached_stages_are_one_line(tmp_path, seen):
    from stages.spec import Outcome, StageCall

    log = Logbook(tmp_path)
    for iteration in range(500):
        call = StageCall("verify", StrictConfig(), agent="ada", iteration=iteration)
        log.stage_finished(call, Outcome(None, True, 0.0, {}))
    log.write("start", "verify ada #500")
    log.close()
    assert [(line.kind, line.text) for line in read_log(tmp_path)] == [
        ("cached", "500 stages from the store"),
        ("start", "verify ada #500"),
    ]


def test_only_problems_only_a_worker_only_the_last(own):
    log = Logbook(own.campaign("seen"))
    log.write_warning("the disk is nearly full")
    log.write("|ada", "  indented stderr line")
    log.write("error", "two\nlines")
    log.close()
    assert logged(own, problems=True).count("\n") == 3
    assert "the disk is nearly full" in logged(own, problems=True)
    assert logged(own, worker="ada").rstrip().endswith("|ada       indented stderr line")
    assert logged(own, lines=2).count("\n") == 2
    with pytest.raises(ConfigError, match="campaign nobody: not found"):
        logged(own, "nobody")


@pytest.mark.parametrize(
    "torn", ["", "2026-11-16", "2026-11-16 04:3", "garbage of a torn line\n", "2026-11-16 04:31:07 nonsense x"]
)
def test_a_torn_line_is_passed_over(torn):
    assert parse(torn) is None


def test_following_shows_a_line_as_it_is_written_even_in_two_pieces(tmp_path):
    log = Logbook(tmp_path)
    log.write("run", "first")
    found, stop = [], threading.Event()

    def watch():
        for line in follow(tmp_path, 1):
            if line is not None:
                found.append(line.text)
            if stop.is_set():
                return

    reader = threading.Thread(target=watch)
    reader.start()
    with (tmp_path / "log.txt").open("a") as file:
        file.write("2026-11-16 04:31:07 done     gener")
        file.flush()
        time.sleep(0.4)
        file.write("ate ada #3: 1.00 s\n")
    deadline = time.monotonic() + patience(10)
    while not found and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    reader.join(patience(5))
    log.close()
    assert found == ["generate ada #3: 1.00 s"]


def test_logs_follow_ends_with_ctrl_c_and_exit_code_zero(seen):
    command = [sys.executable, "-m", "flows.cli", "logs", "seen", "-f", "-n", "1", "--home", str(seen.root)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A shell's background job ignores Ctrl-C, and so would this child of it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    assert "complete" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(patience(20)) == 0


def test_what_a_worker_process_prints_reaches_the_log(tmp_path, own):
    """Also the last words of one that dies at once: here, a torch that cannot be imported."""
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import sys; print('last words', file=sys.stderr); raise SystemExit(3)")
    heard: list[tuple[str, str]] = []
    worker = Worker("ada", own.store, Placement("cpu"), output=lambda *line: heard.append(line))
    from stages.spec import StageCall

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{broken.parent}{os.pathsep}{before}"
    sys.path.insert(0, str(broken.parent))  # a spawned process gets its parent's path
    try:
        with pytest.raises(WorkerDied):
            worker.run(StageCall("verify", StrictConfig(), agent="ada"), Listener())
    finally:
        os.environ["PYTHONPATH"] = before
        sys.path.remove(str(broken.parent))
        worker.stop(now=True)
    deadline = time.monotonic() + patience(5)
    while not heard and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ("ada", "last words") in heard


def test_a_notebook_takes_colours_and_no_live_table(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-color")
    notebook = Console(file=io.StringIO())
    assert notebook.is_terminal
    assert not can_redraw(notebook)
    with waiting(notebook, "starting …") as say:
        say("still starting …")
    assert notebook.file.getvalue() == "", "a notebook would keep every frame"

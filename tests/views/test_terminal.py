"""What commands print: tables that fit 80 columns, progress that is shown while it happens, plain help."""

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flows.cli import _with_plain_help, app
from flows.commands.common import one_line_errors
from flows.home import Home
from flows.scheduling.deployments import next_times
from flows.servers.serve import run_name
from flows.store.inspect import show_ls
from flows.tracking.feed import sync_campaigns
from flows.tracking.links import note_place, page_of
from flows.views.live import Display
from flows.views.rollouts import show_rollouts
from flows.views.tables import FittingTable
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import StrictConfig
from hacrl_core.errors import ConfigError
from stages.spec import Outcome, StageCall

from .conftest import seen_config


def console(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width)


def shown(output: Console) -> str:
    return output.file.getvalue()  # type: ignore[attr-defined]


def of_long_names() -> FittingTable:
    titles = ("campaign", "state", "iterations", "each", "left", "responses", "tokens", "stages", "last")
    table = FittingTable(titles, droppable=("stages", "responses", "tokens", "each"), left=("state",))
    row = ("running", "10/100", "12.5 s", "1:02:13", "12.3k", "1.23M", "2:03:04", "2026-11-16")
    table.add("hacpo_x2_long-s10", *row)
    return table


def test_a_narrow_terminal_loses_columns_before_it_loses_digits():
    output = console()
    output.print(of_long_names())
    text = shown(output)
    assert "…" not in text
    assert all(word in text for word in ("hacpo_x2_long-s10", "running", "10/100", "1:02:13", "2026-11-16"))
    assert "2:03:04" not in text  # the sum of all stages matters least
    wide = console(120)
    wide.print(of_long_names())
    assert "2:03:04" in shown(wide)


def test_only_the_name_is_cut_where_nothing_else_can_go():
    output = console(48)
    output.print(of_long_names())
    text = shown(output)
    assert text.splitlines()[1].startswith("hacpo…")
    assert "2026-11-16" in text


def test_the_stores_list_is_whole_in_80_columns_and_says_when_it_is_empty(seen, tmp_path):
    output = console()
    show_ls(output, seen, None, None, None, False)
    assert "…" not in shown(output)
    assert "warmstart" in shown(output)
    empty = console()
    show_ls(empty, Home(tmp_path), None, None, None, False)
    assert "no artifacts in" in shown(empty)
    nothing = console(200)
    assert sync_campaigns(nothing, Home(tmp_path), None) == 0
    assert "no campaigns in" in shown(nothing)


def evaluation(iteration: int, *, cached: bool = False) -> tuple[StageCall, Outcome]:
    start = "evaluate/held_out/accuracy"
    metrics = {start: 0.6, f"{start}_low": 0.5, f"{start}_high": 0.7}
    call = StageCall("evaluate", StrictConfig(), agent="ada", iteration=iteration, variant="held_out")
    return call, Outcome(ArtifactRef("evaluate", "k", "d", Path()), cached, 1.0, metrics)


def test_evaluations_are_shown_while_the_campaign_runs():
    output = console(120)
    display = Display(output, seen_config())
    display.stage_finished(*evaluation(2))
    display.stage_finished(*evaluation(3, cached=True))
    assert shown(output).splitlines() == ["ada held_out after iteration 2: accuracy 60.0% (50.0% to 70.0%)"]


def test_waiting_for_another_process_is_no_warning():
    warnings: list[str] = []
    output = console(120)
    display = Display(output, seen_config(), warnings.append)
    for _ in range(2):
        display.waiting(evaluation(0)[0], "process 7")
    assert shown(output).count("evaluate ada held_out before iteration 1: process 7 is computing") == 1
    assert "!" not in shown(output)
    assert warnings == []


@pytest.mark.parametrize("command", [["run"], ["status"], ["store", "ls"]])
def test_help_has_neither_types_of_flags_nor_braces(command, monkeypatch):
    import typer

    monkeypatch.setenv("COLUMNS", "120")
    plain = _with_plain_help(typer.main.get_command(app))
    for word in command:
        plain = plain.commands[word]
    text = plain.get_help(plain.make_context(command[-1], [], resilient_parsing=True))
    assert "<bool>" not in text
    assert "{" not in text
    assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0


@pytest.mark.parametrize(("name", "said"), [("doctor", "stopped\n"), ("run", "everything finished so far is saved")])
def test_only_commands_with_work_to_save_say_that_it_is_saved(name, said, capsys):
    import typer

    def command() -> None:
        raise KeyboardInterrupt

    command.__name__ = name
    with pytest.raises(typer.Exit) as ended:
        one_line_errors(command)()
    assert ended.value.exit_code == 130
    assert said in capsys.readouterr().err


def test_iterations_count_from_one(seen):
    output = console(200)
    show_rollouts(output, seen, "seen", 3, None, None, None, 1)
    assert "seen, iteration 3" in shown(output)
    with pytest.raises(ConfigError, match="--iteration 0: campaign seen has 1 to 3"):
        show_rollouts(output, seen, "seen", 0, None, None, None, 1)
    call = StageCall("update", StrictConfig(), agent="ada", iteration=6)
    assert (call.title, call.label) == ("update ada iteration 7", "update ada #6")


def test_the_address_of_a_campaign_in_mlflow(tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    assert page_of(folder, "http://lab:5000/") == "http://lab:5000"
    note_place(folder, "http://ann:secret@lab:5000", "7")
    assert "secret" not in (folder / "mlflow.json").read_text()
    page = page_of(folder, "http://ann:secret@lab:5000/")
    assert page.startswith("http://lab:5000/#/experiments/7/runs?compareRunsMode=CHART&searchFilter=")
    assert page.endswith("%27demo%27")
    assert page_of(folder, "sqlite:///x.db").startswith("http://127.0.0.1:5000/#/experiments/7/")
    assert json.loads((folder / "mlflow.json").read_text())["experiment"] == "7"


def test_the_next_run_is_in_the_future_in_the_schedules_own_zone():
    now = datetime(2026, 11, 16, 11, 54, tzinfo=UTC)
    [minute, night] = next_times([("*/15 * * * *", "UTC"), ("0 2 * * *", "Europe/Berlin")], now)
    assert minute == datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
    assert night == datetime(2026, 11, 17, 1, 0, tzinfo=UTC)


def test_an_upcoming_run_has_the_name_that_it_starts_with():
    at = datetime(2026, 11, 16, 2, 0, tzinfo=UTC)
    config = {"name": "nightly", "iterations": 40}
    assert run_name({"config": config, "more_iterations": 5}, at) == "nightly +5 (2026-11-16 02:00)"
    assert run_name({"config": config, "more_iterations": None}, at) == "nightly to 40 (2026-11-16 02:00)"
    # Prefect plans in the schedule's time zone and starts in UTC.
    planned = at.astimezone(ZoneInfo("America/New_York"))
    assert run_name({"config": config, "more_iterations": 5}, planned) == "nightly +5 (2026-11-16 02:00)"


def test_a_log_has_the_quarters_of_a_warm_start_though_only_some_steps_are_told_and_it_ends_early():
    output = console()
    display = Display(output, seen_config(), lambda message: None)
    call = StageCall("warmstart", StrictConfig(), agent="ada")
    for done, total in ((290, 1200), (310, 1200), (330, 1200), (430, 1200), (440, 470), (470, 470)):
        display.progress(call, done, total, "steps")
    assert shown(output).splitlines() == ["warmstart ada: 310/1200 steps", "warmstart ada: 470/470 steps"]

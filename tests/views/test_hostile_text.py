"""What models, datasets and workers write reaches the terminal without control sequences."""

import io
import json
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.common import one_line_errors
from flows.home import Home
from flows.record.feedback import Label
from flows.record.log import NAME, Logbook, parse
from flows.views.live import Display
from flows.views.rollouts import _panel
from hacrl_core.errors import ConfigError
from hacrl_core.printable import printable
from tests.views.conftest import seen_config

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "clipboard (OSC 52)": "\x1b]52;c;cm0gLXJmIH4=\x1b\\",
    "clear (CSI)": "\x1b[2J\x1b[H",
    "colour": "\x1b[31mred",
    "C1 CSI": "\x9b2J",
    "C1 OSC": "\x9d52;c;cm0=\x9c",
    "DCS": "\x1bP$q\x1b\\",
    "reset": "\x1bc",
    "unfinished": "text \x1b]52;c;",
    "carriage return": "answer 42\ranswer 41",
    "backspace, delete": "41\b\b42\x7f",
    "NUL": "a\0b",
    "next line (C1)": "a\x85b",
}


def controls(text: str) -> list[str]:
    return [c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text())
def test_only_newlines_and_tabs_are_left(text: str) -> None:
    shown = printable(text)
    assert controls(shown) == []
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown, strict=True) if not controls(a))


@pytest.mark.parametrize("name", HOSTILE)
def test_rollouts_are_printed_without_control_characters(name: str) -> None:
    evil = f"before {HOSTILE[name]} after"
    row = {"agent_id": "ada", "response_text": evil, "verdict": "correct", "credits": {}, "finish_reason": "stop"}
    row["rollout_id"] = "r"
    prompt = {"messages": [{"content": evil}], "answer": evil, "tags": json.dumps({"kind": evil})}
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system=None)
    label = Label("r", "ada", 1, "correct", "incorrect", evil, 0.0, evil, "t", "a")
    console.print(_panel(prompt, [row], {"r": label}))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert controls(shown) == []
    assert shown.count("before ") == 5


@pytest.mark.parametrize("name", HOSTILE)
def test_logs_and_warnings_are_printed_without_control_characters(name: str, own: Home) -> None:
    evil, folder = f"before {HOSTILE[name]} after", own.campaign("seen")
    log = Logbook(folder)
    log.output("ada", evil)
    log.close()
    written = (folder / NAME).read_bytes().decode()
    assert controls(written) == []
    with (folder / NAME).open("a", newline="") as file:  # as an earlier version wrote it
        file.write(f"2026-11-16 04:31:07 error    {evil}\n2026-11-16 04:31:07 end      failed\n")
    assert parse(f"2026-11-16 04:31:07 error    {evil}") is not None
    for command in ("logs seen", "status --all"):
        done = CliRunner().invoke(app, [*command.split(), "--home", str(own.root)], env={"COLUMNS": "300"})
        assert done.exit_code == 0
        assert controls(done.output) == [], command
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system=None)
    display = Display(console, seen_config())
    display.warn(evil)
    display.say(evil)
    assert controls(console.file.getvalue()) == []  # type: ignore[attr-defined]


def test_errors_are_printed_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    @one_line_errors
    def fails() -> None:
        raise ConfigError("problem \x1b]52;c;cm0=\x07: no such [bold]thing[/bold]")

    with pytest.raises(BaseException) as ended:  # noqa: PT011
        fails()
    assert ended.value.exit_code == 2  # type: ignore[attr-defined]
    told = capsys.readouterr().err
    assert controls(told) == []
    assert "]52;c;cm0=" in told

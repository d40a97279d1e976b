"""``notify``: real messages by HTTP, by a command and by mail, without any other server; secrets stay out of sight."""

import http.server
import io
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.home import Home
from flows.run.divergence import Watch
from flows.run.launch import launch
from flows.run.notices import Notifier
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import StrictConfig
from hacrl_core.errors import ConfigError
from stages.spec import Outcome, StageCall
from tests.flow.conftest import tiny
from tests.patience import patience

SECRET = "T00000000/B00000000/abcdefghijklmnopqrstuvwx"


@pytest.fixture
def hook() -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """A web server and what was posted to it."""
    posted: list[tuple[str, dict[str, str]]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()


@pytest.fixture
def mailbox() -> Iterator[tuple[str, list[str]]]:
    """A mail server of a few lines, and the mails that it got."""
    mails: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 test\r\n")
            while line := self.rfile.readline():
                word = line.split()[0].upper() if line.split() else b""
                if word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    mails.append(b"".join(iter(self.rfile.readline, b".\r\n")).decode())
                self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
                if word == b"QUIT":
                    return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", mails
        server.shutdown()


def failing(**notify: Any) -> Any:
    """A campaign that ends in an error before anything is computed: its device does not exist."""
    config = tiny(notify=notify)
    ada = config.agents["ada"].model_copy(update={"gpus": (7,)})
    return config.model_copy(update={"agents": {**config.agents, "ada": ada}})


def test_a_failure_is_told_in_every_way_within_ten_seconds(
    tmp_path: Path, hook: Any, mailbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, posted = hook
    server, mails = mailbox
    monkeypatch.setenv("HOOK", f"{url}/services/{SECRET}")
    # No server of Prefect or MLflow is there to help.
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    config = failing(
        url="$HOOK",
        command=f'echo "$HACRL_EVENT $HACRL_CAMPAIGN $HACRL_MESSAGE" > {tmp_path}/told',
        email={"to": "me@example.org", "server": server},
    )
    begun, shown = time.monotonic(), io.StringIO()
    with pytest.raises(ConfigError, match="GPU 7 does not exist"):
        launch(config, Home(tmp_path / "home"), Console(file=shown))
    assert time.monotonic() - begun < patience(10)
    assert [path for path, _ in posted] == [f"/services/{SECRET}"]
    assert posted[0][1]["event"] == "failed"
    assert "GPU 7 does not exist" in posted[0][1]["text"]
    assert (tmp_path / "told").read_text().startswith("failed tiny tiny failed: ConfigError: agent ada: GPU 7")
    assert "To: me@example.org" in mails[0]
    assert "Subject: hacrl: tiny failed" in mails[0]
    left = [path for path in (tmp_path / "home").rglob("*") if path.is_file() and SECRET[-20:] in path.read_text()]
    assert left == []
    assert SECRET[-20:] not in shown.getvalue()


def test_what_cannot_be_sent_is_a_warning_without_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:9/services/{SECRET}")
    warned: list[str] = []
    config = tiny(notify={"on": ["failed"], "url": "$HOOK", "command": "exit 3"})
    with pytest.raises(RuntimeError), Notifier(config, Home(tmp_path), warned.append):
        raise RuntimeError("lost")
    assert sorted(text.partition(":")[0] for text in warned) == ["notify.command", "notify.url"]
    assert all("127.0.0.1" not in text and SECRET not in text for text in warned)


def test_only_what_is_asked_for_is_sent(tmp_path: Path, hook: Any) -> None:
    url, posted = hook
    config = tiny(notify={"on": ["best", "collapsed"], "url": url})
    with Notifier(config, Home(tmp_path), print) as notifier:
        for step, accuracy in enumerate([0.5, 0.4, 0.7, 0.6]):
            call = StageCall("evaluate", StrictConfig(), agent="ada", iteration=step, variant="held_out")
            metrics = {"evaluate/held_out/accuracy": accuracy}
            notifier.stage_finished(call, Outcome(ArtifactRef("evaluate", "k", "d", tmp_path), False, 1.0, metrics))
        watch = Watch(collapsed=notifier.collapsed)
        for iteration, reward in enumerate([0.8] * 5 + [0.01] * 5):
            call = StageCall("verify", StrictConfig(), agent="ada", iteration=iteration)
            metrics = {"verify/reward_mean": reward}
            watch.after(call, Outcome(ArtifactRef("verify", "k", "d", tmp_path), False, 1.0, metrics))
        watch.before(StageCall("update", StrictConfig(), agent="ada", iteration=9))
        notifier.tell("failed", "not asked for")
    assert sorted(fields["event"] for _, fields in posted) == ["best", "collapsed"]
    texts = {fields["event"]: fields["text"] for _, fields in posted}
    assert texts["best"] == "tiny best: ada@2 has 70.0%, 50.0% before"
    assert "mean reward below 20% of its best" in texts["collapsed"]


@pytest.mark.parametrize(
    ("notify", "words"),
    [
        ({"on": ["failed"]}, "nobody to tell"),
        ({"url": f"https://hooks.slack.com/services/{SECRET}"}, "looks secret"),
        ({"url": "https://user:word@example.org/x"}, "looks secret"),
        ({"url": "ftp://example.org"}, "no http:// or https:// address"),
        ({"on": ["started"], "command": "true"}, "failed"),
    ],
)
def test_settings_that_cannot_work_are_refused(notify: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny(notify=notify)


def test_the_documented_automation_is_one_that_prefect_accepts() -> None:
    import yaml
    from prefect.events.schemas.automations import AutomationCore, EventTrigger

    path = Path(__file__).resolve().parents[2] / "infra/prefect/pause-after-failure.yaml"
    automation = AutomationCore.model_validate(yaml.safe_load(path.read_text()))
    assert isinstance(automation.trigger, EventTrigger)
    assert automation.trigger.expect == {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}
    assert automation.actions[0].type == "pause-deployment"

"""Tells a person how a campaign goes: by a web hook, a command or a mail, sent by the campaign's own process."""

import json
import os
import smtplib
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from email.message import EmailMessage
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flows.home import Home
from flows.run.events import Listener
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.operation import EmailConfig
from stages.spec import Outcome, StageCall

if TYPE_CHECKING:
    from flows.record.history import History

# One message may take so long; the end of a run waits so long for messages that are under way.
SEND_SECONDS = 8.0


class Notifier(Listener):
    """Hears what happens and sends what ``notify`` asks for. A message that cannot be sent is a warning, no error.

    As a context it watches a run: an error that leaves it is sent as *failed*.
    """

    def __init__(self, config: CampaignConfig, home: Home, warn: Callable[[str], None]) -> None:
        self._config, self._home, self._warn = config, home, warn
        self._wanted = set(config.notify.on) if config.notify else set()
        self._sending: list[threading.Thread] = []
        self._accuracy: dict[tuple[str, int], dict[str, float]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "Notifier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(problem, Exception):
            self.tell("failed", f"{type(problem).__name__}: {problem}")
        for thread in self._sending:
            thread.join(SEND_SECONDS)

    def collapsed(self, message: str) -> None:
        """Send that rewards collapsed."""
        self.tell("collapsed", message)

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Send that an agent has a new best version, once all of its benchmarks are done."""
        if call.stage != "evaluate" or call.iteration is None or "best" not in self._wanted:
            return
        value = outcome.metrics.get(f"evaluate/{call.variant}/accuracy")
        if value is None:
            return
        with self._lock:
            found = self._accuracy.setdefault((call.agent, call.iteration), {})
            found[call.variant] = value
            if len(found) < len(self._config.evaluate.benchmarks) or outcome.cached:
                return
            mean = sum(found.values()) / len(found)
            earlier = [
                sum(values.values()) / len(values)
                for (agent, step), values in self._accuracy.items()
                if agent == call.agent and step < call.iteration and len(values) == len(found)
            ]
        if earlier and mean > max(earlier):
            self.tell("best", f"{call.agent}@{call.iteration} has {mean:.1%}, {max(earlier):.1%} before")

    def complete(self, history: "History") -> None:
        """Send that the campaign is complete, with its agents' accuracies."""
        gains = []
        for agent in history.agents:
            means = history.mean_accuracy(agent)
            if means:
                gains.append(f"{agent} {means[min(means)]:.1%} → {means[max(means)]:.1%}")
        self.tell("done", f"{history.done} iterations complete" + (f"; {', '.join(gains)}" if gains else ""))

    def tell(self, event: str, message: str) -> None:
        """Send a message where it is wanted, in a thread of its own: training never waits for it."""
        settings = self._config.notify
        if settings is None or event not in self._wanted:
            return
        text = f"{self._config.name} {event}: {message}"
        ways: list[tuple[str, Callable[[], None]]] = []
        if settings.url is not None:
            address = settings.url
            ways.append(("url", lambda: post(address, self._fields(event, text))))
        if settings.command is not None:
            command = settings.command
            ways.append(("command", lambda: run_command(command, self._fields(event, text))))
        if settings.email is not None:
            mail = settings.email
            ways.append(("email", lambda: send_mail(mail, f"{self._config.name} {event}", text)))
        for name, send in ways:
            thread = threading.Thread(target=self._send, args=(name, send), name=f"notify {name}", daemon=True)
            thread.start()
            self._sending.append(thread)

    def _fields(self, event: str, text: str) -> dict[str, str]:
        return {"text": text, "event": event, "campaign": self._config.name, "home": str(self._home.root)}

    def _send(self, name: str, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as problem:
            # The problem's own text may hold the address: name what failed, not where.
            reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else type(problem).__name__
            self._warn(f"notify.{name}: the message was not sent ({reason}); training is not concerned")


def post(address: str, fields: dict[str, str]) -> None:
    """Send the fields as JSON to an address, or to the one that a ``$VARIABLE`` holds."""
    url = os.environ[address[1:]] if address.startswith("$") else address
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("no http address")
    request = urllib.request.Request(
        url, json.dumps(fields).encode(), {"Content-Type": "application/json", "User-Agent": "hacrl"}
    )
    with urllib.request.urlopen(request, timeout=SEND_SECONDS):
        pass


def run_command(command: str, fields: dict[str, str]) -> None:
    """Run a shell command with the message in its environment."""
    variables = {
        "HACRL_EVENT": fields["event"],
        "HACRL_CAMPAIGN": fields["campaign"],
        "HACRL_MESSAGE": fields["text"],
    }
    subprocess.run(
        ["/bin/sh", "-c", command],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=SEND_SECONDS,
        check=True,
    )


def send_mail(settings: EmailConfig, subject: str, text: str) -> None:
    """Send a mail."""
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = settings.sender, settings.to, f"hacrl: {subject}"
    mail.set_content(text)
    host, _, port = settings.server.rpartition(":")
    host, number = (host, int(port)) if host else (port, 25)
    connect = smtplib.SMTP_SSL if number == 465 else smtplib.SMTP
    with connect(host, number, timeout=SEND_SECONDS) as server:
        if settings.starttls:
            server.starttls(context=ssl.create_default_context())
        if settings.user is not None:
            server.login(settings.user, os.environ[settings.password_variable])
        server.send_message(mail)

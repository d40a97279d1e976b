"""The view of a running campaign: a live table in a terminal, a line per iteration anywhere else."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flows.run.events import Listener
from flows.views.text import can_redraw, clock, number, sparkline
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.printable import printable
from stages.spec import Outcome, StageCall


@dataclass
class _AgentRow:
    # Of stages that run side by side, the one that began last is shown.
    running: list[str] = field(default_factory=list)
    done: int = 0
    total: int = 0
    note: str = ""
    rewards: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=24))
    accuracy: float | None = None
    capability: float | None = None

    @property
    def doing(self) -> str:
        """The stage that is shown."""
        return self.running[-1].partition(" ")[0] if self.running else "waiting"

    def reward(self, iteration: int) -> float | None:
        """The mean reward of an iteration; the agent may be one ahead."""
        return next((reward for number, reward in self.rewards if number == iteration), None)


class Display(Listener):
    """Shows a campaign's progress and its warnings. Every method may be called from several threads."""

    def __init__(
        self, console: Console, config: CampaignConfig, on_warning: Callable[[str], None] = lambda message: None
    ) -> None:
        self.console = console
        self._config = config
        self._on_warning = on_warning
        self._rows = {agent: _AgentRow() for agent in config.agents}
        self._iteration = 0
        self._begun = time.monotonic()
        # The first iteration that was not answered from the cache, and when it was done.
        self._first: tuple[int, float] | None = None
        self._ran = 0
        self._told: set[str] = set()
        # How far each warm start was when it was last heard of.
        self._steps: dict[str, int] = {}
        self._lock = threading.Lock()
        self._live: Live | None = None

    def __enter__(self) -> "Display":
        if can_redraw(self.console):
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, message: str) -> None:
        """Print a line."""
        self.console.print(Text(printable(message)))

    def warn(self, message: str) -> None:
        """Print a warning, each one once."""
        with self._lock:
            if message in self._told:
                return
            self._told.add(message)
        self._on_warning(message)
        self.console.print(Text.assemble(("! ", "yellow"), printable(message)))

    # -- events ----------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Forget the agents' rewards: the campaign is walked again from its beginning."""
        with self._lock:
            self._rows = {agent: _AgentRow() for agent in self._config.agents}

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        """Show the stage in its agent's row, and print what changed since it ran last."""
        if call.agent in self._rows:
            row = self._rows[call.agent]
            row.running.append(call.title)
            row.note = ""
            row.done = row.total = 0
        own = [reason for reason in why if not reason.startswith("inputs.")]
        # What merely follows from changed inputs is not repeated for every stage.
        if own:
            self._once(f"{call.stage}:{own}", f"{call.title} runs again: {'; '.join(own)}")

    def progress(self, call: StageCall, done: int, total: int, note: str) -> None:
        """Move the agent's bar; outside a terminal, print a warm start's quarters."""
        if call.agent in self._rows and self._rows[call.agent].running[-1:] == [call.title]:
            row = self._rows[call.agent]
            row.done, row.total = done, total
            row.note = note
        if call.stage == "warmstart" and self._live is None and total:
            before, self._steps[call.title] = self._steps.get(call.title, 0), done
            if done * 4 // total > before * 4 // total:
                self._once(f"{call.title} {done * 4 // total}", f"{call.title}: {done}/{total} {note}")

    def waiting(self, call: StageCall, holder: str) -> None:
        """Say once that another process computes the same artifact: nothing is wrong, two agents may share it."""
        message = f"{call.title}: {holder} is computing the same artifact; waiting for it"
        self._once(message, message)

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Update the agent's row with what the stage measured."""
        with self._lock:
            self._ran += not outcome.cached
        if call.agent not in self._rows:
            return
        row = self._rows[call.agent]
        row.running = [label for label in row.running if label != call.title]
        row.total = 0
        if call.stage == "verify" and call.iteration is not None and not call.variant:
            row.rewards.append((call.iteration, outcome.metrics["verify/reward_mean"]))
        elif call.stage == "credit":
            row.capability = outcome.metrics["credit/capability"]
        elif call.stage == "evaluate":
            row.accuracy = outcome.metrics.get(f"evaluate/{call.variant}/accuracy", row.accuracy)
            if not outcome.cached:
                self._say_accuracy(call, outcome)

    def _say_accuracy(self, call: StageCall, outcome: Outcome) -> None:
        """Print what an evaluation measured, with its 95 % interval: rewards alone are noisy."""
        start = f"evaluate/{call.variant}/accuracy"
        value, low, high = (outcome.metrics.get(f"{start}{end}") for end in ("", "_low", "_high"))
        if value is not None:
            interval = f" ({low:.1%} to {high:.1%})" if low is not None and high is not None else ""
            self.say(f"{call.title.removeprefix('evaluate ')}: accuracy {value:.1%}{interval}")

    def iteration_finished(self, iteration: int) -> None:
        """Count the iteration; outside a terminal, print a line. A second pass over the campaign repeats none."""
        if iteration < self._iteration:
            return
        self._iteration = iteration + 1
        if self._first is None and self._ran > 0:
            self._first = (self._iteration, time.monotonic())
        if self._live is None and self._first is not None:
            known = {agent: row.reward(iteration) for agent, row in self._rows.items()}
            rewards = "  ".join(f"{agent} {reward:.2f}" for agent, reward in known.items() if reward is not None)
            self.say(f"iteration {self._iteration:>3}/{self._config.iterations}  reward {rewards}  {self._left()}")

    def _once(self, key: str, message: str) -> None:
        with self._lock:
            if key in self._told:
                return
            self._told.add(key)
        self.say(message)

    # -- the live table --------------------------------------------------------------------------------------------

    def _left(self) -> str:
        if self._first is None or self._iteration <= self._first[0]:
            return "time left: …"
        each = (time.monotonic() - self._first[1]) / (self._iteration - self._first[0])
        return f"time left {clock(each * (self._config.iterations - self._iteration))}"

    def _render(self) -> Any:
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(self._config.name, style="bold"),
            Text(f"iteration {self._iteration}/{self._config.iterations}"),
            ProgressBar(total=self._config.iterations, completed=self._iteration, width=30),
            Text(f"{clock(time.monotonic() - self._begun)} gone, {self._left()}"),
        )
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for title in ("agent", "stage", "progress", "", "reward", "", "capability", "accuracy"):
            table.add_column(title)
        for agent, row in self._rows.items():
            table.add_row(
                Text(agent, style="bold"),
                row.doing,
                ProgressBar(total=row.total, completed=row.done, width=16) if row.total else "",
                Text(row.note if row.total else "", style="dim"),
                f"{row.rewards[-1][1]:.2f}" if row.rewards else "",
                Text(sparkline([reward for _, reward in row.rewards]), style="cyan"),
                number(row.capability),
                f"{row.accuracy:.1%}" if row.accuracy is not None else "",
            )
        return Group(head, table)

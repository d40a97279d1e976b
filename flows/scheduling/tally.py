"""How far a campaign is, counted while it runs: nothing is read again, however long the campaign is."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from flows.run.events import Listener
from flows.views.text import number, short
from hacrl_core.config.campaign import CampaignConfig
from stages.spec import Outcome, StageCall

# How many of the last iterations the rate is taken from.
RECENT = 9


@dataclass
class _Agent:
    reward: float | None = None
    capability: float | None = None
    # Benchmark → the first and the last accuracy.
    accuracy: dict[str, tuple[float, float]] = field(default_factory=dict)
    responses: float = 0.0
    tokens: float = 0.0


class Tally(Listener):
    """Counts what stages report, of each agent."""

    def __init__(self, config: CampaignConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._agents = {agent: _Agent() for agent in config.agents}
        self._ends: deque[float] = deque(maxlen=RECENT + 1)
        self._lock = threading.Lock()

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Take the metrics that the table shows."""
        agent, metrics = self._agents.get(call.agent), outcome.metrics
        if agent is None:
            return
        with self._lock:
            if call.stage == "verify" and not call.variant:
                agent.reward = metrics.get("verify/reward_mean")
            elif call.stage == "credit":
                agent.capability = metrics.get("credit/capability")
            elif call.stage == "generate":
                agent.responses += metrics.get("generate/responses", 0.0)
                agent.tokens += metrics.get("generate/tokens", 0.0)
            elif call.stage == "evaluate" and (value := metrics.get(f"evaluate/{call.variant}/accuracy")) is not None:
                first, _ = agent.accuracy.get(call.variant, (value, value))
                agent.accuracy[call.variant] = (first, value)

    def iteration_finished(self, iteration: int) -> None:
        """Note when it ended."""
        with self._lock:
            self._ends.append(self._clock())

    def seconds_left(self, done: int) -> float | None:
        """Estimate the wall time of the remaining iterations; None before there is a rate."""
        with self._lock:
            gaps = [after - before for before, after in pairwise(self._ends)]
        return statistics.median(gaps) * (self._config.iterations - done) if gaps else None

    def rows(self) -> list[dict[str, Any]]:
        """Return the table of agents: the newest numbers of each."""
        with self._lock:
            return [self._row(name, agent) for name, agent in self._agents.items()]

    def _row(self, name: str, agent: _Agent) -> dict[str, Any]:
        row: dict[str, Any] = {"agent": name, "reward": number(agent.reward, 3)}
        row["capability"] = number(agent.capability, 3)
        for benchmark in (benchmark.name for benchmark in self._config.evaluate.benchmarks):
            first, last = agent.accuracy.get(benchmark, (None, None))
            row[f"accuracy, {benchmark}"] = "" if last is None else f"{last:.1%}"
            row[f"gain, {benchmark}"] = "" if last is None or first is None else f"{100 * (last - first):+.1f}"
        return {**row, "responses": short(int(agent.responses)), "tokens": short(int(agent.tokens))}

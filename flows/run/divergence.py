"""Watches a campaign's rewards for a collapse, and its updates for skipped ones.

The update stage itself refuses numbers that are not finite.
"""

import threading
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from hacrl_core.config.operation import CollapseConfig, DivergenceConfig
from hacrl_core.errors import DivergenceError
from stages.spec import Outcome, StageCall


class Watch:
    """Sees every stage, run or found in the store; may refuse an update before it runs. Used from several threads."""

    def __init__(
        self, settings: DivergenceConfig | None = None, warn: Callable[[str], None] = lambda message: None
    ) -> None:
        self._settings, self._warn = settings or DivergenceConfig(), warn
        self._rewards: dict[str, dict[int, float]] = defaultdict(dict)
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def after(self, call: StageCall, outcome: Outcome) -> None:
        """Note the reward of a finished stage; refuse an update that was skipped before and may not be skipped now."""
        if call.stage == "verify" and call.iteration is not None:
            with self._lock:
                self._rewards[call.agent][call.iteration] = outcome.metrics["verify/reward_mean"]
        if (
            call.stage == "update"
            and outcome.metrics.get("update/not_finite")
            and self._settings.on_nonfinite == "stop"
        ):
            raise DivergenceError(
                f"{call.label}: was skipped in an earlier run because its numbers were not finite, and "
                "divergence.on_nonfinite is now stop; "
                "lower update.learning_rate, or set it to skip again"
            )

    def before(self, call: StageCall) -> None:
        """Before an update runs, warn or refuse if the rewards that it learns from have collapsed."""
        if call.stage != "update" or call.iteration is None or self._settings.collapse is None:
            return
        with self._lock:
            rewards = [reward for _, reward in sorted(self._rewards[call.agent].items())]
            problem = collapse(rewards, self._settings.collapse)
            if problem is None or call.agent in self._told:
                return
            self._told.add(call.agent)
        best, at = problem
        first = call.iteration + 1 - len(rewards) + at
        message = (
            f"{call.agent}: mean reward below {self._settings.collapse.share:.0%} of its best ({best:.3f}, iterations "
            f"{first} to "
            f"{first + self._settings.collapse.window - 1}) for {self._settings.collapse.iterations} iterations in a "
            f"row, now {rewards[-1]:.3f}"
        )
        if self._settings.collapse.action == "stop":
            with self._lock:
                self._told.discard(call.agent)  # each try to go on is refused, not only the first
            raise DivergenceError(
                f"{message}; {call.label} is not made. {call.agent}@{first + self._settings.collapse.window - 1} wrote "
                "the last of the best; lower "
                "update.learning_rate, or set divergence.collapse.action to warn"
            )
        self._warn(f"{message}; training goes on (divergence.collapse.action: stop would end it)")


def collapse(rewards: list[float], settings: CollapseConfig) -> tuple[float, int] | None:
    """Return the best window's mean reward and its start, if all of the last iterations are below the set share."""
    before, last = rewards[: -settings.iterations], rewards[-settings.iterations :]
    if len(before) < settings.window:
        return None
    means = np.convolve(before, np.ones(settings.window) / settings.window, mode="valid")
    best = int(means.argmax())
    return (float(means[best]), best) if max(last) < settings.share * means[best] else None

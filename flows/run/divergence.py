"""Watches a campaign's rewards for a collapse, and its updates for skipped ones.

The update stage itself refuses numbers that are not finite.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from hacrl_core.config.operation import CollapseConfig, DivergenceConfig
from hacrl_core.errors import DivergenceError
from stages.spec import Outcome, StageCall

# Below this share of foreign responses inside the window an update learns next to nothing from others.
LEAST_INSIDE = 0.02
# In nats: so much less likely than the tokens between, a boundary token is no matter of style.
EDGE = 3.0


class Watch:
    """Sees every stage, run or found in the store; may refuse an update before it runs. Used from several threads."""

    def __init__(
        self,
        settings: DivergenceConfig | None = None,
        warn: Callable[[str], None] = lambda message: None,
        collapsed: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._settings, self._warn, self._collapsed = settings or DivergenceConfig(), warn, collapsed
        self._rewards: dict[str, dict[int, float]] = defaultdict(dict)
        self._told: set[str] = set()
        self._scores: dict[str, Mapping[str, float]] = {}
        self._said: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def after(self, call: StageCall, outcome: Outcome) -> None:
        """Note the reward of a finished stage; refuse an update that was skipped before and may not be skipped now."""
        if call.stage == "verify" and call.iteration is not None and not call.variant:
            with self._lock:
                self._rewards[call.agent][call.iteration] = outcome.metrics["verify/reward_mean"]
        message = self._notice(call, outcome.metrics)
        if message is not None and not outcome.cached:
            self._warn_once(call, message)
        if (
            call.stage == "update"
            and outcome.metrics.get("update/not_finite")
            and self._settings.on_nonfinite == "stop"
        ):
            raise DivergenceError(
                f"{call.title}: was skipped in an earlier run because its numbers were not finite, and "
                "divergence.on_nonfinite is now stop; "
                "lower update.learning_rate, or set it to skip again"
            )

    def _notice(self, call: StageCall, metrics: Mapping[str, float]) -> str | None:
        """Return what goes on without an error and should not: guesses that are paid, nothing that is shared."""
        if call.stage == "score" and not call.variant:
            with self._lock:
                self._scores[call.agent] = metrics
        guesses = metrics.get("verify/truncated_guess_share", 0.0)
        if guesses > 0:
            return (
                f"{call.title}: {guesses:.1%} of the responses are rewarded though they were cut off before a complete "
                "answer; half a number may equal the gold by chance: set verify.truncated to complete_only"
            )
        return nothing_shared(call.title, metrics, self._scores.get(call.agent, {}))

    def _warn_once(self, call: StageCall, message: str) -> None:
        with self._lock:
            known = (call.stage, call.agent) in self._said
            self._said.add((call.stage, call.agent))
        if not known:
            self._warn(message)

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
            f"{first + 1} to {first + self._settings.collapse.window}) for {self._settings.collapse.iterations} "
            f"iterations in a row, now {rewards[-1]:.3f}"
        )
        self._collapsed(message)
        if self._settings.collapse.action == "stop":
            with self._lock:
                self._told.discard(call.agent)  # each try to go on is refused, not only the first
            raise DivergenceError(
                f"{message}; {call.title} is not made. {call.agent}@{first + self._settings.collapse.window - 1} wrote "
                "the last of the best; lower "
                "update.learning_rate, or set divergence.collapse.action to warn"
            )
        self._warn(f"{message}; training goes on (divergence.collapse.action: stop would end it)")


def nothing_shared(label: str, update: Mapping[str, float], score: Mapping[str, float]) -> str | None:
    """Return what to tell where (almost) no foreign response counted in an update, with the likely cause."""
    inside = update.get("update/foreign_inside_fraction")
    if inside is None or (inside >= LEAST_INSIDE and update.get("update/foreign_ess", 1.0) >= 1.0):
        return None
    edges = {
        "first": score.get("score/foreign_first_logprob", 0.0),
        "last": score.get("score/foreign_last_logprob", 0.0),
    }
    unlikely = [edge for edge, value in edges.items() if value < score.get("score/foreign_inner_logprob", 0.0) - EDGE]
    if unlikely:
        cause = (
            f"the {' and the '.join(unlikely)} token of foreign responses is far less likely to it than those between: "
            "agents begin or end their responses differently (score.boundary, generate.stop_strings, chat_template; "
            "hacrl doctor --config shows both ends)"
        )
    else:
        cause = (
            "the agents are too far apart on this task, or the window is too narrow (algorithm.cross_clip_delta); "
            "compare their prompts, or train them closer to each other first"
        )
    return (
        f"{label}: nothing is shared: {inside:.1%} of the foreign responses are inside the window, "
        f"{update.get('update/foreign_ess', 0.0):.1f} effective samples; likely cause: {cause}"
    )


def collapse(rewards: list[float], settings: CollapseConfig) -> tuple[float, int] | None:
    """Return the best window's mean reward and its start, if all of the last iterations are below the set share."""
    before, last = rewards[: -settings.iterations], rewards[-settings.iterations :]
    if len(before) < settings.window:
        return None
    means = np.convolve(before, np.ones(settings.window) / settings.window, mode="valid")
    best = int(means.argmax())
    return (float(means[best]), best) if max(last) < settings.share * means[best] else None

"""Rates from a campaign's own manifests: what each stage took, over what the table had said.

A factor per stage and agent carries everything that the table does not know about this machine, so that a plan for
other settings of the same campaign scales from what was measured.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from flows.plan.graph import Task, record_graph
from flows.plan.rates import Rates, Workload, factor_name, stage_seconds
from flows.plan.simulate import simulate
from flows.record.history import FinishedStage, History
from hacrl_core.errors import ConfigError


@dataclass(frozen=True)
class Comparison:
    """What was predicted for some iterations and what they took, in seconds."""

    iterations: int
    predicted_stages: float
    measured_stages: float
    predicted_iteration: float
    measured_iteration: float

    @property
    def stage_error(self) -> float:
        """How far the predicted sum of stage seconds is from the measured one, as a share of it."""
        return self.predicted_stages / self.measured_stages - 1.0

    @property
    def iteration_error(self) -> float:
        """How far the predicted wall time of an iteration is from the measured one, as a share of it."""
        return self.predicted_iteration / self.measured_iteration - 1.0


def measured_seconds(finished: FinishedStage) -> float:
    """Return what a call took, publishing included where the record knows it."""
    computed = finished.manifest.provenance.seconds
    return computed if finished.entry.cached else max(finished.entry.seconds, computed)


def calibrated(rates: Rates, history: History, work: Workload, until: int | None = None) -> Rates:
    """Return the rates with factors and response lengths of a campaign's first ``until`` iterations (None: all)."""
    done = history.done if until is None else min(until, history.done)
    if not done:
        raise ConfigError(
            f"campaign {history.config.name}: no iteration is complete, so there is nothing to calibrate from; "
            "run one first"
        )
    seen = [f for f in history.finished if f.entry.iteration is None or f.entry.iteration < done]
    rates = rates.model_copy(update={"agents": _lengths(seen, rates), "factors": {}, "call_seconds": 0.0})
    tasks = record_graph(history.config, done)
    rates = rates.model_copy(update={"factors": _factors(seen, tasks, work, rates)})
    return rates.model_copy(update={"call_seconds": _overhead(seen, tasks, work, rates)})


def compare(history: History, work: Workload, rates: Rates, known: int) -> Comparison:
    """Predict the iterations after the first ``known`` ones from those, and set it beside what they took."""
    if not 0 < known < history.done:
        raise ConfigError(
            f"campaign {history.config.name}: {history.done} iterations are complete; calibrating from {known} of "
            "them leaves none to predict"
        )
    fitted = calibrated(rates, history, work, known)
    simulation = simulate(record_graph(history.config, history.done), work, fitted)
    later = [i for i in simulation.intervals if i.call.stage != "evaluate" and (i.call.iteration or 0) >= known]
    took = [f for f in history.finished if f.entry.stage != "evaluate" and (f.entry.iteration or 0) >= known]
    return Comparison(
        iterations=history.done - known,
        predicted_stages=sum(i.seconds - fitted.call_seconds for i in later),
        measured_stages=sum(measured_seconds(f) for f in took),
        predicted_iteration=_typical_gap(simulation.iteration_ends(), known),
        measured_iteration=_typical_gap(_ends(history.finished), known),
    )


def _lengths(seen: Sequence[FinishedStage], rates: Rates) -> dict[str, dict[str, float]]:
    """Return each agent's mean response, and the prompt length of the rates where it has none of its own."""
    found: dict[str, list[tuple[float, float]]] = {}
    for f in seen:
        if f.entry.stage == "generate" and f.manifest.metrics.get("generate/responses"):
            metrics = f.manifest.metrics
            found.setdefault(f.entry.agent, []).append(
                (metrics.get("generate/tokens", 0.0), metrics["generate/responses"])
            )
    own = {agent: dict(values) for agent, values in rates.agents.items()}
    for agent, pairs in found.items():
        tokens, responses = (sum(column) for column in zip(*pairs, strict=True))
        if tokens:
            own.setdefault(agent, {})["response_tokens"] = tokens / responses
    return own


def _factors(seen: Sequence[FinishedStage], tasks: Sequence[Task], work: Workload, rates: Rates) -> dict[str, float]:
    """Return measured over computed seconds by stage, agent and variant: the lower quartile over the iterations.

    The first iteration also loads what the later ones find warm, so it counts only where it is the only one.
    """
    computed = {task.call.label: stage_seconds(task.call, work, rates) for task in tasks}
    ratios: dict[str, list[tuple[int, float]]] = {}
    for f in seen:
        expected = computed.get(f.entry.label, 0.0)
        if expected > 0:
            number = f.entry.iteration or 0
            ratios.setdefault(factor_name(f.entry), []).append((number, measured_seconds(f) / expected))
    factors = {}
    for name, pairs in ratios.items():
        later = [ratio for number, ratio in pairs if number > min(n for n, _ in pairs)]
        factors[name] = max(_undisturbed(later or [ratio for _, ratio in pairs]), 1e-9)
    return factors


def _overhead(seen: Sequence[FinishedStage], tasks: Sequence[Task], work: Workload, rates: Rates) -> float:
    """Return the seconds per call outside the stages, from the wall time of the iterations after the first."""
    ends = _ends(seen)
    if len(ends) < 3:
        return 0.0
    simulation = simulate(tasks, work, rates)
    # The fastest one: a server that starts and a diagnosis after the third iteration delay the others.
    missing = min(_gaps(ends, 1)) - _typical_gap(simulation.iteration_ends(), 1)
    calls = len(simulation.critical_path(len(ends) - 1))
    return max(0.0, missing / max(calls, 1))


def _ends(finished: Sequence[FinishedStage]) -> list[float]:
    """Return when each iteration's last version was made, in seconds since the epoch."""
    ends: dict[int, float] = {}
    for f in finished:
        if f.entry.stage == "update" and f.entry.iteration is not None:
            number = f.entry.iteration
            ends[number] = max(ends.get(number, 0.0), f.manifest.provenance.finished)
    return [ends[number] for number in sorted(ends)]


def _typical_gap(ends: Sequence[float], first: int) -> float:
    """Return the median distance between the ends of an iteration and the one before, from iteration ``first`` on."""
    gaps = _gaps(ends, first)
    return statistics.median(gaps) if gaps else 0.0


def _gaps(ends: Sequence[float], first: int) -> list[float]:
    return [b - a for a, b in pairwise(ends[max(first - 1, 0) :])]


def _undisturbed(values: Sequence[float]) -> float:
    """Return the lower quartile: a disturbance only makes things slower, and the first iterations have most of them."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]

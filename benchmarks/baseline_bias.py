"""How biased is the baseline? A Monte-Carlo of pooled, exact and windowed capability, and the picture of
docs/algorithm.md.

    python benchmarks/baseline_bias.py [--trials 2000] [--picture docs/pictures/baseline_bias.png]

Two agents answer the same prompts. A prompt has a difficulty u, uniform; agent a of overall success rate p solves it
with probability u^(1/p − 1), whose mean over prompts is p: the agents' relative strength differs from prompt to prompt,
as it does in life. Bias is the mean of (baseline − the learner's true success rate on the same prompts).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hacrl_core.algorithm.advantage import capability_baseline, group_advantages
from hacrl_core.algorithm.capability import smoothed_capability
from hacrl_core.seeding import derive_rng

PROMPTS, SAMPLES, WINDOW = 32, 8, 5


@dataclass(frozen=True)
class Bias:
    mean: float
    error: float  # standard error of the mean

    @classmethod
    def of(cls, values: Sequence[float]) -> "Bias":
        return cls(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))))

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.error:.4f}"


def solve_rates(rng: np.random.Generator, rates_IN: np.ndarray) -> np.ndarray:
    """Success probability of every agent on every prompt of every iteration, I × P × N; the prompts differ by
    iteration.
    """
    return rng.random((len(rates_IN), PROMPTS, 1)) ** (1.0 / rates_IN[:, None, :] - 1.0)


def measure(rates_IN: np.ndarray, *, trials: int, seed: int, window: int = WINDOW) -> dict[str, Bias]:
    """Bias of four baselines for learner 0, whose true rates move along ``rates_IN`` (oldest first, the last is now).

    pooled: plain mean. exact: ω from the true rates. window: ω from ``window`` iterations, the formula alone.
    implemented: the baseline `group_advantages` used, with clamp and ceiling; prompts without signal, which have no
    gradient, count as the formula.
    """
    now = rates_IN[-1]
    errors: dict[str, list[float]] = {"pooled": [], "exact": [], "window": [], "implemented": []}
    valid = np.ones((PROMPTS, len(now), SAMPLES), dtype=bool)
    for trial in range(trials):
        rng = derive_rng(seed, "baseline_bias", trial)
        solve_IPN = solve_rates(rng, rates_IN[-window:])
        history_IN = rng.binomial(SAMPLES, solve_IPN).mean(axis=1) / SAMPLES
        rewards = (rng.random(valid.shape) < solve_IPN[-1][:, :, None]).astype(float)
        history_IN[-1] = rewards.mean(axis=(0, 2))
        capability = smoothed_capability(history_IN, window)
        truth = solve_IPN[-1][:, 0].mean()
        for name, omega in (
            ("pooled", np.ones_like(now)),
            ("exact", now[0] / now),
            ("window", capability[0] / capability),
        ):
            baseline_P = capability_baseline(rewards, valid, omega)
            errors[name].append(baseline_P.mean() - truth)
        advantages, implemented_P = group_advantages(rewards, capability, learner=0)
        has_signal_P = (advantages != 0).any(axis=(1, 2))
        errors["implemented"].append(np.where(has_signal_P, implemented_P, baseline_P).mean() - truth)
    return {name: Bias.of(values) for name, values in errors.items()}


def still(learner: float, sampler: float, iterations: int = WINDOW) -> np.ndarray:
    return np.tile([learner, sampler], (iterations, 1))


def drifting(learner: float, sampler: float, learner_step: float, sampler_step: float, iterations: int) -> np.ndarray:
    """Rates that rise by a step each iteration and are ``learner`` and ``sampler`` now."""
    ago = np.arange(iterations - 1, -1, -1)[:, None]
    return np.array([learner, sampler]) - ago * np.array([learner_step, sampler_step])


def drift_bias(learner: float, sampler: float, learner_step: float, sampler_step: float, window: int) -> float:
    """First-order closed form for two agents: a window of K lags (K − 1)/2 iterations behind."""
    lag = (window - 1) / 2
    return learner / 2 * ((1 - lag * learner_step / learner) / (1 - lag * sampler_step / sampler) - 1)


def prompt_level_error(learner: float, sampler: float) -> tuple[float, float]:
    """Root mean square over prompts of E[baseline | prompt] − truth: exact ω, pooled. Unbiased on average is not so on
    each.
    """
    u = (np.arange(200_000) + 0.5) / 200_000
    mine, theirs = u ** (1 / learner - 1), u ** (1 / sampler - 1)
    exact, pooled = (learner / sampler * theirs + mine) / 2 - mine, (theirs + mine) / 2 - mine
    return float(np.sqrt(np.mean(exact**2))), float(np.sqrt(np.mean(pooled**2)))


def draw(
    path: Path,
    by_sampler: dict[float, dict[str, Bias]],
    by_window: dict[str, dict[int, Bias]],
    closed: dict[str, list[float]],
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    style = {"pooled": ("C3", "s", "plain pooling (Naive)"), "exact": ("C0", "o", "capability-aware, ω exact"),
             "implemented": ("C2", "^", f"capability-aware, window of {WINDOW}, with clamp and ceiling")}  # fmt: skip
    for name, (colour, marker, label) in style.items():
        points = [results[name] for results in by_sampler.values()]
        left.errorbar(list(by_sampler), [p.mean for p in points], [2 * p.error for p in points], color=colour,
        marker=marker,
                      ms=4, lw=1.2, capsize=2, label=label)  # fmt: skip
    left.set(
        xlabel="sampler's success rate (the learner's is 0.4)", ylabel="bias of the baseline", title="Steady agents"
    )
    for colour, (label, results) in zip(("C1", "C4", "C5"), by_window.items(), strict=True):
        windows = list(results)
        right.errorbar(windows, [results[k].mean for k in windows], [2 * results[k].error for k in windows],
        color=colour,
                       fmt="o", ms=4, capsize=2, label=label)  # fmt: skip
        right.plot(windows, closed[label], color=colour, lw=1.0, ls="--")
    right.axvline(WINDOW, color="0.7", lw=0.8)
    right.set(
        xlabel="window K, in iterations",
        title="Agents that learn (now 0.4 and 0.6; dashed: closed form)",
        xticks=[1, 5, 10, 15, 20],
    )
    for axes in (left, right):
        axes.axhline(0, color="0.3", lw=0.8)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--picture", type=Path, default=Path("docs/pictures/baseline_bias.png"))
    arguments = parser.parse_args()
    trials = arguments.trials
    print(
        f"{trials} trials, {PROMPTS} prompts, {SAMPLES} samples, two agents, learner's rate 0.4; bias ± standard error"
    )
    by_sampler = {}
    for sampler in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        by_sampler[sampler] = measure(still(0.4, sampler), trials=trials, seed=0)
        print(f"sampler {sampler:.2f}: " + ", ".join(f"{name} {bias}" for name, bias in by_sampler[sampler].items()))
    by_window: dict[str, dict[int, Bias]] = {}
    closed: dict[str, list[float]] = {}
    scenes = {"only the learner improves, +0.01": (0.01, 0.0), "only the sampler improves, +0.01": (0.0, 0.01),
              "both improve by 2.5 % of their rate": (0.01, 0.015)}  # fmt: skip
    for label, steps in scenes.items():
        windows = (1, 2, 3, 5, 8, 12, 16, 20)
        by_window[label] = {
            k: measure(drifting(0.4, 0.6, *steps, k), trials=trials, seed=1, window=k)["window"] for k in windows
        }
        closed[label] = [drift_bias(0.4, 0.6, *steps, k) for k in windows]
        rows = zip(by_window[label].items(), closed[label], strict=True)
        print(f"{label}: " + ", ".join(f"K={k} {bias} (closed form {form:+.4f})" for (k, bias), form in rows))
    for sampler in (0.2, 0.6, 0.8):
        exact, pooled = prompt_level_error(0.4, sampler)
        print(
            f"per prompt, sampler {sampler}: RMS error of the expected baseline, exact ω {exact:.4f}, pooled "
            f"{pooled:.4f}"
        )
    draw(arguments.picture, by_sampler, by_window, closed)


if __name__ == "__main__":
    main()

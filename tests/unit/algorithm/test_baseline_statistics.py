"""The theory as statistics: is the capability-aware baseline unbiased, and by how much not? (docs/algorithm.md has the
picture)
"""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "baseline_bias.py"
spec = importlib.util.spec_from_file_location("baseline_bias", SCRIPT)
assert spec is not None
assert spec.loader is not None
simulation = sys.modules["baseline_bias"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulation)

TRIALS = 500
SIGMAS = 4.0


@pytest.mark.parametrize("sampler", [0.2, 0.6, 0.9])
def test_exact_and_steady_capability_is_unbiased_and_pooling_is_not(sampler):
    bias = simulation.measure(simulation.still(0.4, sampler), trials=TRIALS, seed=11)
    assert abs(bias["exact"].mean) < SIGMAS * bias["exact"].error
    # Iterations of steady agents are exchangeable, so E[capability ratio · current reward] is exact for any window.
    assert abs(bias["window"].mean) < SIGMAS * bias["window"].error
    assert bias["window"].error < 0.003
    assert bias["pooled"].mean == pytest.approx((sampler - 0.4) / 2, abs=SIGMAS * bias["pooled"].error)
    assert abs(bias["pooled"].mean) > 20 * bias["pooled"].error


@pytest.mark.parametrize(("learner_step", "sampler_step"), [(0.01, 0.0), (0.0, 0.01)])
def test_a_window_lags_behind_agents_that_learn_by_the_closed_form(learner_step, sampler_step):
    seen = []
    for window in (1, 5, 15):
        rates = simulation.drifting(0.4, 0.6, learner_step, sampler_step, window)
        bias = simulation.measure(rates, trials=TRIALS, seed=12, window=window)["window"]
        wanted = simulation.drift_bias(0.4, 0.6, learner_step, sampler_step, window)
        assert bias.mean == pytest.approx(wanted, abs=SIGMAS * bias.error + 0.05 * abs(wanted))
        seen.append(abs(bias.mean) / bias.error)
    assert seen[0] < SIGMAS  # a window of one iteration does not lag
    assert seen[2] > 10


def test_agents_that_improve_at_the_same_relative_rate_cancel():
    rates = simulation.drifting(0.4, 0.6, 0.01, 0.015, 15)
    bias = simulation.measure(rates, trials=TRIALS, seed=13, window=15)["window"]
    assert abs(bias.mean) < SIGMAS * bias.error


def test_the_ceiling_costs_unbiasedness_against_a_weak_sampler():
    """A weak sampler's rare successes are worth ω each; where they lift μ above 1 they are dropped, so μ is too low."""
    weak = simulation.measure(simulation.still(0.4, 0.1), trials=TRIALS, seed=14)
    assert abs(weak["exact"].mean) < SIGMAS * weak["exact"].error
    assert weak["implemented"].mean < -10 * weak["implemented"].error
    assert weak["implemented"].mean > weak["pooled"].mean  # still better than plain pooling
    strong = simulation.measure(simulation.still(0.4, 0.7), trials=TRIALS, seed=14)
    assert abs(strong["implemented"].mean) < SIGMAS * strong["implemented"].error

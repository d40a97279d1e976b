"""The first update measures how far its log-probs are from the scored ones, which its ratios of 1 hide."""

import numpy as np
import torch

from hacrl_core.algorithm.objective import ObjectiveRows, make_objective
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.learning.learner import _score_mismatch
from hacrl_core.learning.trainer import StepResult


def stats_of(update_index: int, off: float) -> dict[str, torch.Tensor]:
    ones = torch.ones(3, dtype=torch.float64)
    rows = ObjectiveRows(
        sampler_mean_logprob_B=-ones,
        advantage_B=ones,
        is_own_B=torch.tensor([True, True, False]),
        omega_B=ones,
        weight_B=ones,
        total_weight=3.0,
        old_logprobs=[torch.full((2,), -1.0), torch.full((4,), -1.0), torch.full((4,), -1.0)],
    )
    mask_BT = torch.arange(4) < torch.tensor([2, 4, 4])[:, None]
    logprobs_BT = torch.full((3, 4), -1.0)
    logprobs_BT[1, 0] += off
    objective = make_objective(rows, update_index=update_index, config=HacpoConfig())
    return objective(logprobs_BT, mask_BT, torch.arange(3))[1]


def test_the_mismatch_is_that_of_own_means_and_ratios_stay_one() -> None:
    stats = stats_of(0, off=0.02)
    np.testing.assert_allclose(stats["score_mismatch"][:2], [0.0, 0.005], atol=1e-7)
    assert stats["score_mismatch"][2].isnan()
    assert stats["ratio"][:2].tolist() == [1.0, 1.0]
    assert "score_mismatch" not in stats_of(1, off=0.02)


def test_mean_and_largest_mismatch_are_metrics_of_the_iteration() -> None:
    table = {name: values.double().numpy() for name, values in stats_of(0, off=0.02).items()}
    step = StepResult(0.0, 0.0, table, 1, 0.0, True)
    found = _score_mismatch([step])
    np.testing.assert_allclose(found["update/score_mismatch_mean"], 0.0025, atol=1e-7)
    np.testing.assert_allclose(found["update/score_mismatch_max"], 0.005, atol=1e-7)
    assert _score_mismatch([]) == {}

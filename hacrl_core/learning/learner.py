"""The learner: the updates of one iteration.

It joins the algorithm's objective with the trainer, which knows no algorithm.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hacrl_core.algorithm.calibration import calibrated_config
from hacrl_core.algorithm.diagnostics import gradient_cosine, summarise
from hacrl_core.algorithm.hacpo import foreign_window
from hacrl_core.algorithm.minibatches import Response, minibatches
from hacrl_core.algorithm.objective import Objective, ObjectiveRows, make_objective
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.errors import DivergenceError
from hacrl_core.learning.sequences import TrainSequence, plan_rows
from hacrl_core.learning.trainer import StepResult, Trainer
from hacrl_core.seeding import derive_rng

# Responses on either side of the gradient cosine: enough to see the sign, cheap enough for every iteration.
COSINE_RESPONSES = 64

Metrics = dict[str, float]


class Learner:
    """Updates the trainer's agent on the responses of one iteration; use one instance per iteration."""

    def __init__(
        self,
        trainer: Trainer,
        algorithm: HacpoConfig,
        *,
        name: str,
        iteration: int,
        minibatch_prompts: int,
        seed: int,
    ) -> None:
        self.trainer = trainer
        self.algorithm = algorithm
        self.name = name
        self.iteration = iteration
        self.minibatch_prompts = minibatch_prompts
        self.seed = seed
        self._saved_shares: list[float] = []

    def learn(self, responses: Sequence[Response], progress: Callable[[int, int, str], None]) -> Metrics:
        """Make every update of the iteration and return its metrics; raise `DivergenceError` on a non-finite number."""
        self.algorithm = calibrated_config(
            self.algorithm,
            np.array([response.old_mean for response in responses]),
            np.array([response.sampler_mean for response in responses]),
            np.array([response.is_own for response in responses]),
        )
        measured = _kl_to_start(responses) | self._gradient_cosine(responses)
        batches = minibatches(
            responses,
            prompts_each=self.minibatch_prompts,
            order=self.trainer.config.minibatch_order,
            epochs=self.trainer.config.epochs,
            rng=derive_rng(self.seed, "minibatches", self.iteration),
        )
        steps: list[StepResult] = []
        for index, batch in enumerate(batches):
            progress(index, len(batches), "updates")
            step = self.trainer.step(*self._prepare(batch, index))
            if not step.finite:
                raise self._diverged(f"loss {step.loss} or gradient norm {step.gradient_norm} of update {index}")
            steps.append(step)
        largest = max((response.omega for response in responses if not response.is_own), default=1.0)
        tables = [step.stats for step in steps if step.stats]
        metrics = summarise(tables, config=self.algorithm, omega_max=largest) | measured
        metrics |= self._totals(responses, steps)
        self._check_finite(responses, len(steps))
        return metrics

    def _prepare(self, batch: Sequence[Response], index: int) -> tuple[list[TrainSequence], Objective]:
        """Wrap responses for the trainer.

        Those whose gradient is zero for certain are left out, and identical ones are merged.
        """
        kl = self.algorithm.kl_coefficient
        plan = plan_rows(
            [(r.prompt_token_ids, r.token_ids, r.sampler, r.advantage, r.sampler_mean) for r in batch],
            [r.advantage for r in batch],
            [kl if r.is_own else 0.0 for r in batch],
            [len(r.prompt_token_ids) + len(r.token_ids) for r in batch],
        )
        self._saved_shares.append(plan.saved_share)
        kept = [batch[i] for i in plan.rows_K]
        rows = ObjectiveRows(
            sampler_mean_logprob_B=torch.tensor([r.sampler_mean for r in kept], dtype=torch.float64),
            advantage_B=torch.tensor([r.advantage for r in kept], dtype=torch.float64),
            is_own_B=torch.tensor([r.is_own for r in kept], dtype=torch.bool),
            omega_B=torch.tensor([r.omega for r in kept], dtype=torch.float64),
            weight_B=torch.as_tensor(plan.weights_K, dtype=torch.float64),
            total_weight=float(len(batch)),
            old_logprobs=[torch.tensor(r.old_logprobs) for r in kept],
            reference_logprobs=_references(kept) if kl > 0 else None,
            rollout_ids=[r.rollout_id for r in kept],
        )
        objective = make_objective(rows, update_index=index, config=self.algorithm)
        return [TrainSequence(r.prompt_token_ids, r.token_ids) for r in kept], objective

    def _gradient_cosine(self, responses: Sequence[Response]) -> Metrics:
        """Measure whether own and foreign responses pull the same way, before the first update and on a subsample."""
        if not self.algorithm.gradient_cosine:
            return {}
        rng = derive_rng(self.seed, "cosine", self.iteration)
        sides = [[r for r in responses if r.is_own == own and r.advantage != 0] for own in (True, False)]
        if not all(sides):
            return {}
        gradients = []
        for side in sides:
            chosen = rng.permutation(len(side))[:COSINE_RESPONSES]
            gradients.append(self.trainer.gradient(*self._prepare([side[i] for i in sorted(chosen)], 0)))
        self._saved_shares.clear()
        cosine = gradient_cosine(*gradients)
        return {} if cosine is None else {"update/gradient_cosine": cosine}

    def _totals(self, responses: Sequence[Response], steps: Sequence[StepResult]) -> Metrics:
        low, _ = foreign_window(0, self.algorithm)
        return {
            "update/loss": float(np.mean([s.loss for s in steps])),
            "update/gradient_norm_mean": float(np.mean([s.gradient_norm for s in steps])),
            "update/gradient_norm_max": float(np.max([s.gradient_norm for s in steps])),
            "update/updates": float(len(steps)),
            "update/tokens": float(sum(s.tokens for s in steps)),
            "update/padding_share": float(np.mean([s.padding_share for s in steps])),
            "update/saved_share": float(np.mean(self._saved_shares)),
            "update/window_low": low,
            "update/responses": float(len(responses)),
        }

    def _check_finite(self, responses: Sequence[Response], steps: int) -> None:
        """Check the new weights and one loss under them: no later step would find out what the last update did."""
        if not self.trainer.is_finite():
            raise self._diverged("a weight or a moment of the optimizer")
        informative = [response for response in responses if response.advantage != 0]
        if informative:
            shortest = min(informative, key=lambda r: len(r.prompt_token_ids) + len(r.token_ids))
            if not self.trainer.gives_finite(*self._prepare([shortest], 0), steps=steps):
                raise self._diverged("the loss under the new weights")

    def _diverged(self, what: str) -> DivergenceError:
        return DivergenceError(
            f"update {self.name} #{self.iteration}: {what} is not finite; the last good version stays current. "
            "Lower update.learning_rate, look at the rollouts, or set divergence.on_nonfinite to skip"
        )


def _kl_to_start(responses: Sequence[Response]) -> Metrics:
    """k3 estimate of KL(learner now ‖ its first version) per token, from responses the learner has just sampled."""
    differences = [np.array(r.reference) - np.array(r.old_logprobs) for r in responses if r.reference is not None]
    if not differences:
        return {}
    log_ratio = np.concatenate(differences).astype(np.float64)
    return {"update/kl_to_start": float(np.mean(np.expm1(log_ratio) - log_ratio))}


def _references(responses: Sequence[Response]) -> list[torch.Tensor | None]:
    return [None if r.reference is None else torch.tensor(r.reference) for r in responses]

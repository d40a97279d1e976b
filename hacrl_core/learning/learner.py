"""The learner: the updates of one iteration.

It joins the algorithm's objective with the trainer, which knows no algorithm.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hacrl_core.algorithm.calibration import calibrated_config
from hacrl_core.algorithm.diagnostics import cosine_of_norms, summarise
from hacrl_core.algorithm.hacpo import foreign_window, length_factors
from hacrl_core.algorithm.minibatches import Minibatch, Response, minibatches
from hacrl_core.algorithm.objective import Objective, ObjectiveRows, make_objective
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.config.training import UpdateConfig
from hacrl_core.errors import DivergenceError, NotFiniteError
from hacrl_core.learning.sequences import RowPlan, TrainSequence, plan_rows
from hacrl_core.learning.trainer import StepResult
from hacrl_core.seeding import derive_rng

Metrics = dict[str, float]
# Log-probs of a minibatch's responses before the first update, by rollout.
Old = Mapping[str, tuple[float, ...]]


NEAR = 1e-2  # of a weight: so little does not make a finite loss overflow
SMALLEST = 1e-15  # a gradient whose square is zero in float32 is smaller by far


class Steps(Protocol):
    """What the learner needs of a trainer: that of one process, or that of several ranks."""

    config: UpdateConfig

    def step(self, sequences: Sequence[TrainSequence], objective: Objective) -> StepResult:
        """Make one optimizer step on a minibatch."""

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Return the log-probs of the response tokens as a step on these sequences computes them now."""

    def gradient_norm(self, sequences: Sequence[TrainSequence], objective: Objective, *, add: bool = False) -> float:
        """Return the norm of a gradient, or of its sum with that of the call before; nothing is updated."""

    def is_finite(self) -> bool:
        """Whether every weight and every moment is a number."""

    def gives_finite(self, sequences: Sequence[TrainSequence], objective: Objective, steps: int) -> bool:
        """Whether loss and gradient are finite under the weights of now, ``steps`` updates later than they were."""


class Learner:
    """Updates the trainer's agent on the responses of one iteration; use one instance per iteration."""

    def __init__(
        self,
        trainer: Steps,
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
        batches = minibatches(
            responses,
            prompts_each=self.minibatch_prompts,
            order=self.trainer.config.minibatch_order,
            epochs=self.trainer.config.epochs,
            rng=derive_rng(self.seed, "minibatches", self.iteration),
        )
        self._calibrate(batches)
        measured = _kl_to_start(responses) | self._gradient_cosine(responses, batches) | self._windows(batches)
        old = self._old_logprobs(batches)
        steps: list[StepResult] = []
        for index, batch in enumerate(batches):
            progress(index, len(batches), "updates")
            try:
                step = self.trainer.step(*self._prepare(batch.responses, index, batch.window_index, old=old.get(index)))
            except NotFiniteError as problem:
                if not index:
                    raise  # nothing was updated yet: a mask or a checkpoint is wrong
                raise self._diverged(f"a log-prob of update {index}") from problem
            if not step.finite:
                raise self._diverged(f"loss {step.loss} or gradient norm {step.gradient_norm} of update {index}")
            steps.append(step)
        largest = max((response.omega for response in responses if not response.is_own), default=1.0)
        tables = [step.stats for step in steps if step.stats]
        metrics = summarise(tables, config=self.algorithm, omega_max=largest) | measured
        metrics |= self._totals(responses, steps) | (_old_mismatch(batches, old) if old else _score_mismatch(steps))
        self._check_finite(responses, len(steps))
        return metrics

    def _calibrate(self, batches: Sequence[Minibatch]) -> None:
        """Choose δ where the algorithm asks for a share of responses inside the window."""
        met = [(r, batch.window_index) for batch in batches for r in batch.responses if not r.is_own and r.advantage]
        factors = [self._factors(response) for response, _ in met]
        self.algorithm = calibrated_config(
            self.algorithm,
            np.array([response.old_mean * factor for (response, _), (factor, _) in zip(met, factors, strict=True)]),
            np.array([response.sampler_mean * factor for (response, _), (_, factor) in zip(met, factors, strict=True)]),
            np.array([window_index for _, window_index in met]),
        )

    def _factors(self, response: Response) -> tuple[float, float]:
        """Return what the two means of a response's ratio are multiplied with; an own response has one length."""
        if response.is_own:
            return 1.0, 1.0
        return length_factors(len(response.token_ids), response.sampler_tokens, self.algorithm.ratio_length)

    def _old_logprobs(self, batches: Sequence[Minibatch]) -> dict[int, Old]:
        """Under autocast: the learner's log-probs before the first update, by minibatch and rollout.

        Each minibatch is passed as its update will pass it. In bfloat16 a response's log-prob depends on its company by
        more than GSPO's window, and the score stage has other batches. In float32 the scored ones are as good.
        """
        if self.trainer.config.autocast == "none":
            return {}
        found: dict[int, Old] = {}
        as_own = self.algorithm.foreign_treatment == "as_own"
        for index, batch in enumerate(batches):
            kept = self._plan(batch.responses)[0]
            if any(r.is_own or as_own for r in kept):
                logprobs = self.trainer.logprobs([TrainSequence(r.prompt_token_ids, r.token_ids) for r in kept])
                found[index] = {r.rollout_id: tuple(v.tolist()) for r, v in zip(kept, logprobs, strict=True)}
        return found

    def _plan(self, batch: Sequence[Response]) -> tuple[list[Response], RowPlan, list[tuple[float, float]]]:
        """Return the responses that pass through the model, how they were chosen, and their lengths' factors."""
        kl = self.algorithm.kl_coefficient
        factors = [self._factors(r) for r in batch]
        plan = plan_rows(
            [
                (r.prompt_token_ids, r.token_ids, r.sampler, r.advantage, r.sampler_mean, factor)
                for r, factor in zip(batch, factors, strict=True)
            ],
            [r.advantage for r in batch],
            [kl if r.is_own else 0.0 for r in batch],
            [len(r.prompt_token_ids) + len(r.token_ids) for r in batch],
        )
        return [batch[i] for i in plan.rows_K], plan, [factors[i] for i in plan.rows_K]

    def _prepare(
        self,
        batch: Sequence[Response],
        index: int,
        window_index: int,
        total: int | None = None,
        old: Old | None = None,
    ) -> tuple[list[TrainSequence], Objective]:
        """Wrap responses for the trainer; their mean is over ``total`` responses where that is not the batch's size.

        Those whose gradient is zero for certain are left out, and identical ones are merged. ``old`` replaces the
        scored log-probs of the start of the iteration.
        """
        kept, plan, factors = self._plan(batch)
        self._saved_shares.append(plan.saved_share)
        factor_KS = torch.tensor(factors, dtype=torch.float64).reshape(-1, 2)
        sampler_K = torch.tensor([r.sampler_mean for r in kept], dtype=torch.float64)
        rows = ObjectiveRows(
            sampler_mean_logprob_B=sampler_K * factor_KS[:, 1],
            advantage_B=torch.tensor([r.advantage for r in kept], dtype=torch.float64),
            is_own_B=torch.tensor([r.is_own for r in kept], dtype=torch.bool),
            omega_B=torch.tensor([r.omega for r in kept], dtype=torch.float64),
            weight_B=torch.as_tensor(plan.weights_K, dtype=torch.float64),
            total_weight=float(len(batch) if total is None else total),
            old_logprobs=_rows([old[r.rollout_id] if old else r.old_logprobs for r in kept]),
            old_of_update=bool(old),
            reference_logprobs=_references(kept) if self.algorithm.kl_coefficient > 0 else None,
            rollout_ids=[r.rollout_id for r in kept],
            learner_factor_B=factor_KS[:, 0] if self.algorithm.ratio_length == "sampler" else None,
        )
        objective = make_objective(rows, update_index=index, config=self.algorithm, window_index=window_index)
        return [TrainSequence(r.prompt_token_ids, r.token_ids) for r in kept], objective

    def _gradient_cosine(self, responses: Sequence[Response], batches: Sequence[Minibatch]) -> Metrics:
        """Measure whether own and foreign responses pull the same way: all of them, before the first update.

        Only prompts that both sides learn from count. The yardstick is the cosine between two halves of the own
        responses, every other one of each prompt. Every gradient is passed through the trainer's one buffer.
        """
        if not self.algorithm.gradient_cosine or self.iteration % self.algorithm.gradient_cosine_every:
            return {}
        signal = [r for r in responses if r.advantage != 0]
        both = {r.prompt_id for r in signal if r.is_own} & {r.prompt_id for r in signal if not r.is_own}
        if not both:
            return {}
        own = sorted((r for r in signal if r.is_own and r.prompt_id in both), key=lambda r: r.prompt_id)
        foreign = [r for r in signal if not r.is_own and r.prompt_id in both]
        window = next(batch.window_index for batch in batches if batch.has_foreign)

        def norm(side: Sequence[Response], total: int, *, add: bool = False) -> float:
            sequences, objective = self._prepare(side, 0, window, total)
            return self.trainer.gradient_norm(sequences, objective, add=add)

        halves = own[::2], own[1::2]
        first = norm(halves[0], len(own))
        whole = norm(halves[1], len(own), add=True)
        together = norm(foreign, len(foreign), add=True)
        pull = cosine_of_norms(whole, norm(foreign, len(foreign)), together)
        yardstick = cosine_of_norms(first, norm(halves[1], len(own)), whole) if halves[1] else None
        self._saved_shares.clear()
        measured = {"update/gradient_cosine": pull, "update/gradient_cosine_own": yardstick}
        return {name: value for name, value in measured.items() if value is not None}

    def _windows(self, batches: Sequence[Minibatch]) -> Metrics:
        """Return the lower bound of the window in the first and in the last minibatch with foreign responses."""
        foreign = [batch.window_index for batch in batches if batch.has_foreign]
        if not foreign or not self.algorithm.has_window:
            return {}
        (first, _), (last, _) = (foreign_window(m, self.algorithm) for m in (foreign[0], foreign[-1]))
        return {"update/window_first_low": first, "update/window_last_low": last}

    def _totals(self, responses: Sequence[Response], steps: Sequence[StepResult]) -> Metrics:
        return {
            "update/loss": float(np.mean([s.loss for s in steps])),
            "update/gradient_norm_mean": float(np.mean([s.gradient_norm for s in steps])),
            "update/gradient_norm_max": float(np.max([s.gradient_norm for s in steps])),
            "update/updates": float(len(steps)),
            "update/tokens": float(sum(s.tokens for s in steps)),
            "update/padding_share": float(np.mean([s.padding_share for s in steps])),
            "update/saved_share": float(np.mean(self._saved_shares)),
            "update/responses": float(len(responses)),
        }

    def _check_finite(self, responses: Sequence[Response], steps: int) -> None:
        """Check the new weights and one loss under them: no later step would find out what the last update did.

        Where no weight can have moved far, the loss is as finite as the last step has found it.
        """
        if not self.trainer.is_finite():
            raise self._diverged("a weight or a moment of the optimizer")
        if furthest_move(self.trainer.config, steps) <= NEAR:
            return
        informative = [response for response in responses if response.advantage != 0]
        if informative:
            shortest = min(informative, key=lambda r: len(r.prompt_token_ids) + len(r.token_ids))
            try:
                finite = self.trainer.gives_finite(*self._prepare([shortest], 0, 0), steps=steps)
            except NotFiniteError:
                finite = False
            if not finite:
                raise self._diverged("the loss under the new weights")

    def _diverged(self, what: str) -> DivergenceError:
        return DivergenceError(
            f"update {self.name} iteration {self.iteration + 1}: {what} is not finite; the last good version stays "
            "current. Lower update.learning_rate, look at the rollouts, or set divergence.on_nonfinite to skip"
        )


def furthest_move(config: UpdateConfig, steps: int) -> float:
    """Return how far so many steps of AdamW can move a weight, its decay left out.

    By Cauchy and Schwarz the first moment is at most so many times the root of the second, whatever the gradients were,
    if the second forgets slowly enough; else there is no bound. There is none, either, where the square of a gradient
    is rounded to zero and epsilon alone divides it, nor where decay is more than the weight itself.
    """
    first, second = config.betas
    if first**2 >= second or config.epsilon < SMALLEST or config.learning_rate * config.weight_decay > 1:
        return math.inf
    most = (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second))
    return max(1.0, most) * config.learning_rate * steps


def _old_mismatch(batches: Sequence[Minibatch], old: Mapping[int, Old]) -> Metrics:
    """`_score_mismatch` under autocast, of all own responses: the update's own passes against the scored ones."""
    own = [(r, old[i][r.rollout_id]) for i in old for r in batches[i].responses if r.is_own and r.rollout_id in old[i]]
    off = np.array([abs(float(np.mean(now, dtype=np.float64)) - r.old_mean) for r, now in own])
    if not len(off):
        return {}
    return {"update/score_mismatch_mean": float(off.mean()), "update/score_mismatch_max": float(off.max())}


def _score_mismatch(steps: Sequence[StepResult]) -> Metrics:
    """How far mean log-probs of own responses in the first update are from the scored ones; both are of one policy."""
    off = steps[0].stats.get("score_mismatch", np.zeros(0)) if steps else np.zeros(0)
    off = off[~np.isnan(off)]
    if not len(off):
        return {}
    return {"update/score_mismatch_mean": float(off.mean()), "update/score_mismatch_max": float(off.max())}


def _kl_to_start(responses: Sequence[Response]) -> Metrics:
    """k3 estimate of KL(learner now ‖ its first version) per token, from responses the learner has just sampled."""
    differences = [np.array(r.reference) - np.array(r.old_logprobs) for r in responses if r.reference is not None]
    if not differences:
        return {}
    log_ratio = np.concatenate(differences).astype(np.float64)
    return {"update/kl_to_start": float(np.mean(np.expm1(log_ratio) - log_ratio))}


def _rows(lists: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    """Return a tensor for each list, all of them made in one call."""
    return list(torch.split(torch.tensor([*chain.from_iterable(lists)]), [len(row) for row in lists]))


def _references(responses: Sequence[Response]) -> list[torch.Tensor | None]:
    return [None if r.reference is None else torch.tensor(r.reference) for r in responses]

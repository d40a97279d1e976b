"""update: learner + scores + credit → the learner's next version. The algorithm comes in as the trainer's loss."""

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.artifacts.store import read_manifest
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.config.base import StrictConfig
from hacrl_core.config.training import UpdateConfig
from hacrl_core.contracts.tables import CREDIT, SCORES, read_table
from hacrl_core.errors import AlgorithmError, DivergenceError
from hacrl_core.seeding import derive_rng
from stages.spec import Context, Metrics, OutFolder, Result, Stage

COSINE_ROWS = (
    64  # responses on either side of the gradient cosine: enough to see the sign, cheap enough for every iteration
)


Table = list[dict[str, Any]]
_OF_SAMPLERS = ("rollout_id", "is_own", "mean_logprob")  # what the learner needs of another's scores


class UpdateSlice(StrictConfig):
    learner: str
    samplers: tuple[str, ...]
    iteration: NonNegativeInt
    minibatch_prompts: PositiveInt
    algorithm: HacpoConfig
    update: UpdateConfig
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_error_share: float | None = (
        None  # more verifier errors than this share of a sampler's responses: publish unchanged
    )

    def identity(self) -> dict[str, Any]:
        # Finite updates are the same under both; an unchanged version says so in its metrics, and the campaign heeds them.
        whole = self.model_dump(mode="json", exclude={"on_nonfinite"})
        if self.max_error_share is None:
            del whole["max_error_share"]
        for speed_only in ("token_budget", "max_logits_mb", "gradient_checkpointing"):
            del whole["update"][speed_only]
        return whole


@dataclass(frozen=True)
class Row:
    """One response the learner may learn from: credit joined with its log-probs."""

    rollout_id: str
    prompt_id: str
    sampler: str
    is_own: bool
    advantage: float
    omega: float
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    old_logprobs: tuple[float, ...]  # under the learner at the start of the iteration
    old_mean: float
    sampler_mean: float  # under the sampler when it wrote the response, in the sampler's tokens
    reference: tuple[float, ...] | None  # under the campaign's first version of the learner, for KL


def run(
    inputs: Mapping[str, ArtifactRef], config: UpdateSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    from hacrl_core.agents.checkpoints import has_optimizer
    from hacrl_core.learning.trainer import Trainer
    from hacrl_core.warm import give_back_memory

    credits = read_table(inputs["credit"].path / "credit.parquet", CREDIT).to_pylist()
    scores = {s: _scores(inputs[f"scores/{s}"], _OF_SAMPLERS) for s in config.samplers if s != config.learner}
    scores[config.learner] = _scores(inputs[f"scores/{config.learner}"])
    reference = _scores(inputs["reference"]) if "reference" in inputs else []
    rows = _rows(credits, scores, reference, config)
    failed = _error_share(credits, scores, config)
    del (
        credits,
        scores,
        reference,
    )  # as Python objects they would weigh as much as a small model all through the training
    if config.max_error_share is not None and failed > config.max_error_share:
        context.warn(
            f"update {config.learner} #{config.iteration}: skipped, the verifier failed on {failed:.0%} of a sampler's responses"
        )
        return _unchanged(inputs["agent"], out, {"update/verifier_failed": 1.0})
    version = inputs["agent"]
    agent = context.warm.take_agent(version.path, version.digest, device=context.device, attention=context.attention)
    resumes = version.path if has_optimizer(version.path) else None
    trainer = Trainer(agent, config.update, optimizer_state=resumes, seed=seed or 0)
    learner = _Learner(trainer, config, seed or 0)
    try:
        metrics = learner.learn(rows, context)
    except DivergenceError as problem:
        if config.on_nonfinite == "stop":
            raise
        context.warn(f"{str(problem).partition(';')[0]}; the update is skipped and the version stays as it was")
        return _unchanged(inputs["agent"], out, {"update/not_finite": 1.0})
    trainer.save(out.path)
    metrics["update/skipped"] = 0.0
    metrics["update/peak_memory_bytes"] = float(trainer.peak_memory_bytes())
    after = trainer.trained()
    weights = sum(p.numel() * p.element_size() for p in agent.model.parameters())

    def published(ref: ArtifactRef) -> None:
        if after is not None:
            context.warm.keep_agent(after, ref.path, ref.digest, device=context.device)
        give_back_memory(weights)  # gradient, moments and activations are gone by now

    return Result(metrics, published=published)


def _scores(ref: ArtifactRef, columns: Sequence[str] = SCORES.fields.names) -> Table:
    rows: Table = read_table(ref.path / "scores.parquet", SCORES).select(columns).to_pylist()
    return rows


def _rows(credits: Table, scores: Mapping[str, Table], reference: Table, config: UpdateSlice) -> list[Row]:
    """Join: credit names the responses, the learner's scores their tokens, each sampler's own scores the denominator."""
    sampled_at = {r["rollout_id"]: r["mean_logprob"] for s in config.samplers for r in scores[s] if r["is_own"]}
    scored = {row["rollout_id"]: row for row in scores[config.learner]}
    first_scored = {row["rollout_id"]: row for row in reference}
    rows = []
    for credit in credits:
        rollout = credit["rollout_id"]
        if rollout not in sampled_at:
            raise AlgorithmError(
                f"update {config.learner} #{config.iteration}: rollout {rollout} has no score by its sampler {credit['sampler']}; "
                "its score artifact is missing or of another iteration"
            )
        score = scored.get(rollout)
        if score is None:
            continue  # a foreign response that is empty in the learner's tokens; counted by the score stage
        first = first_scored.get(rollout)
        rows.append(
            Row(
                rollout_id=rollout,
                prompt_id=credit["prompt_id"],
                sampler=credit["sampler"],
                is_own=credit["is_own"],
                advantage=credit["advantage"],
                omega=credit["omega"],
                prompt_token_ids=tuple(score["prompt_token_ids"]),
                token_ids=tuple(score["token_ids"]),
                old_logprobs=tuple(score["logprobs"]),
                old_mean=score["mean_logprob"],
                sampler_mean=sampled_at[rollout],
                reference=tuple(first["logprobs"]) if first and credit["is_own"] else None,
            )
        )
    return rows


def _error_share(credits: Table, scores: Mapping[str, Table], config: UpdateSlice) -> float:
    """The largest share, over samplers, of responses without credit: the verifier's errors. Scores have every response."""
    credited = Counter(row["sampler"] for row in credits)
    shares = [0.0]
    for sampler in config.samplers:
        scored = sum(row["is_own"] for row in scores[sampler])
        missing = scored - credited[sampler]
        if missing > 1:  # one error alone is nobody's failure
            shares.append(missing / scored)
    return max(shares)


def _unchanged(agent: ArtifactRef, out: OutFolder, why: Metrics) -> Result:
    """The version as it was, under the name of the next one: artifacts never change, so both may share their files."""
    for output in read_manifest(agent.path).outputs:
        target = out.path / output.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(agent.path / output.path, target)
        except OSError:
            shutil.copyfile(agent.path / output.path, target)
    return Result({"update/skipped": 1.0, **why})


def minibatches(rows: Sequence[Row], config: UpdateSlice, seed: int) -> list[list[Row]]:
    """Own responses first, then each other sampler's, ``minibatch_prompts`` prompts at a time; or everything mixed by prompt."""
    prompts = list(dict.fromkeys(row.prompt_id for row in rows))
    if config.update.minibatch_order == "mixed":
        prompts = [prompts[i] for i in derive_rng(seed, "minibatches", config.iteration).permutation(len(prompts))]
        sources: list[list[Row]] = [list(rows)]
    else:
        others = sorted({row.sampler for row in rows if not row.is_own})
        sources = [[r for r in rows if r.is_own], *([r for r in rows if r.sampler == other] for other in others)]
    size = config.minibatch_prompts
    groups = [set(prompts[start : start + size]) for start in range(0, len(prompts), size)]
    batches = [[row for row in source if row.prompt_id in group] for source in sources for group in groups]
    return [batch for batch in batches if batch] * config.update.epochs


class _Learner:
    """The updates of one iteration: turns rows into the trainer's sequences and the algorithm's objective."""

    def __init__(self, trainer: Any, config: UpdateSlice, seed: int) -> None:
        self.trainer, self.config, self.seed = trainer, config, seed
        self.algorithm = config.algorithm
        self.saved: list[float] = []

    def learn(self, rows: list[Row], context: Context) -> Metrics:
        from hacrl_core.algorithm.clipping import calibrated_config
        from hacrl_core.algorithm.diagnostics import summarise

        means = [np.array([getattr(row, name) for row in rows]) for name in ("old_mean", "sampler_mean", "is_own")]
        self.algorithm = calibrated_config(self.config.algorithm, *means)
        metrics = _kl_to_start(rows) | self._cosine(rows)
        steps, batches = [], minibatches(rows, self.config, self.seed)
        for index, batch in enumerate(batches):
            context.progress(index, len(batches), "updates")
            step = self._step(batch, index)
            if not step.finite:
                raise self._diverged(f"loss {step.loss} or gradient norm {step.gradient_norm} of update {index}")
            steps.append(step)
        tables = [step.stats for step in steps if step.stats]
        largest = max((row.omega for row in rows if not row.is_own), default=1.0)
        metrics = summarise(tables, config=self.algorithm, omega_max=largest) | metrics
        metrics |= self._totals(rows, steps)
        self._prove(rows, len(steps))
        return metrics

    def _prove(self, rows: list[Row], steps: int) -> None:
        """The new weights are numbers, and give numbers: the last update has no step after it that would find out."""
        if not self.trainer.is_finite():
            raise self._diverged("a weight or a moment of the optimizer")
        telling = [row for row in rows if row.advantage != 0]
        if telling:
            shortest = min(telling, key=lambda row: len(row.prompt_token_ids) + len(row.token_ids))
            if not self.trainer.gives_finite(*self._prepare([shortest], 0), steps=steps):
                raise self._diverged("the loss under the new weights")

    def _diverged(self, what: str) -> DivergenceError:
        return DivergenceError(
            f"update {self.config.learner} #{self.config.iteration}: {what} is not finite; the last good version stays current. Lower "
            "update.learning_rate, look at the rollouts, or set divergence.on_nonfinite to skip"
        )

    def _step(self, batch: list[Row], index: int) -> Any:
        sequences, objective = self._prepare(batch, index)
        return self.trainer.step(sequences, objective)

    def _prepare(self, batch: list[Row], index: int) -> tuple[list[Any], Any]:
        """Leave out rows whose gradient is zero for certain, merge identical ones, wrap the rest."""
        import torch

        from hacrl_core.algorithm.objective import ObjectiveRows, make_objective
        from hacrl_core.learning.sequences import TrainSequence, plan_rows

        kl = self.algorithm.kl_coefficient
        plan = plan_rows(
            [(r.prompt_token_ids, r.token_ids, r.sampler, r.advantage, r.sampler_mean) for r in batch],
            [r.advantage for r in batch],
            [kl if r.is_own else 0.0 for r in batch],
            [len(r.prompt_token_ids) + len(r.token_ids) for r in batch],
        )
        self.saved.append(plan.saved_share)
        kept = [batch[i] for i in plan.rows_K]
        rows = ObjectiveRows(
            sampler_mean_logprob_B=torch.tensor([r.sampler_mean for r in kept], dtype=torch.float64),
            advantage_B=torch.tensor([r.advantage for r in kept], dtype=torch.float64),
            is_own_B=torch.tensor([r.is_own for r in kept], dtype=torch.bool),
            omega_B=torch.tensor([r.omega for r in kept], dtype=torch.float64),
            weight_B=torch.as_tensor(plan.weights_K, dtype=torch.float64),
            total_weight=float(len(batch)),
            old_logprobs=[torch.tensor(r.old_logprobs) for r in kept],
            reference_logprobs=[_maybe(r.reference) for r in kept] if kl > 0 else None,
            rollout_ids=[r.rollout_id for r in kept],
        )
        objective = make_objective(rows, update_index=index, config=self.algorithm)
        return [TrainSequence(r.prompt_token_ids, r.token_ids) for r in kept], objective

    def _cosine(self, rows: list[Row]) -> Metrics:
        """Do own and foreign responses pull the same way? Measured before the first update, on a subsample."""
        from hacrl_core.algorithm.diagnostics import gradient_cosine

        if not self.algorithm.gradient_cosine:
            return {}
        rng = derive_rng(self.seed, "cosine", self.config.iteration)
        sides = [[row for row in rows if row.is_own == own and row.advantage != 0] for own in (True, False)]
        if not all(sides):
            return {}
        gradients = []
        for side in sides:
            chosen = rng.permutation(len(side))[:COSINE_ROWS]
            gradients.append(self.trainer.gradient(*self._prepare([side[i] for i in sorted(chosen)], 0)))
        self.saved.clear()
        cosine = gradient_cosine(*gradients)
        return {} if cosine is None else {"update/gradient_cosine": cosine}

    def _totals(self, rows: list[Row], steps: list[Any]) -> Metrics:
        return {
            "update/loss": float(np.mean([s.loss for s in steps])),
            "update/gradient_norm_mean": float(np.mean([s.gradient_norm for s in steps])),
            "update/gradient_norm_max": float(np.max([s.gradient_norm for s in steps])),
            "update/updates": float(len(steps)),
            "update/tokens": float(sum(s.tokens for s in steps)),
            "update/padding_share": float(np.mean([s.padding_share for s in steps])),
            "update/saved_share": float(np.mean(self.saved)),
            "update/window_low": self.algorithm.foreign_lower_bound(0),
            "update/responses": float(len(rows)),
        }


def _kl_to_start(rows: list[Row]) -> Metrics:
    """k3 estimate of KL(learner now ‖ its first version) per token, from responses the learner has just sampled."""
    differences = [np.array(row.reference) - np.array(row.old_logprobs) for row in rows if row.reference is not None]
    if not differences:
        return {}
    log_ratio = np.concatenate(differences).astype(np.float64)
    return {"update/kl_to_start": float(np.mean(np.expm1(log_ratio) - log_ratio))}


def _maybe(values: tuple[float, ...] | None) -> Any:
    import torch

    return None if values is None else torch.tensor(values)


STAGE = Stage("update", 2, UpdateSlice, run)

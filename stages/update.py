"""update: learner + scores + credit → the learner's next version, trained by `hacrl_core.learning.learner`."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.artifacts.manifests import read_manifest
from hacrl_core.config.agents import Attention
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.config.base import IdentityUnlessDefault, NotIdentity, StrictConfig
from hacrl_core.config.training import UpdateConfig
from hacrl_core.contracts.tables import CLAIMS, CREDIT, SCORES, read_table
from hacrl_core.errors import AlgorithmError, DivergenceError
from stages.spec import Context, Metrics, OutFolder, Result, Stage, required_seed

if TYPE_CHECKING:
    from hacrl_core.algorithm.minibatches import Response
    from hacrl_core.learning.learner import Steps
    from hacrl_core.learning.sharded.ranks import Rank

Table = list[dict[str, Any]]

# The columns that the learner needs of another sampler's scores.
_OF_SAMPLERS = ("rollout_id", "is_own", "mean_logprob")


# Inputs of an iteration before: replay/1/credit and replay/1/scores/ben are those of the last one.
REPLAY = "replay/"
# A third of GSPO's window: score and update should agree better about one policy.
_MISMATCH = 1e-4


class UpdateSlice(StrictConfig):
    """What an update reads of the config."""

    learner: str
    samplers: tuple[str, ...]
    iteration: NonNegativeInt
    minibatch_prompts: PositiveInt
    algorithm: HacpoConfig
    update: UpdateConfig
    # Finite updates are the same under both. An unchanged version says so in its metrics, and the campaign reads them.
    on_nonfinite: Annotated[Literal["stop", "skip"], NotIdentity] = "stop"
    # With more verifier errors than this share of a sampler's responses the version is published unchanged.
    max_error_share: Annotated[float | None, IdentityUnlessDefault] = None

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the version; several other samplers are heard in rounds, and it says so.

        Versions of before, when their window narrowed in the order of their names, have other keys. With one other
        sampler nothing changed. Under autocast the old log-probs of own responses were once those of the score stage.
        """
        several = len(set(self.samplers) - {self.learner}) > 1
        rounds = several and self.algorithm.share_rollouts and self.update.minibatch_order == "own_first"
        marks = {"foreign_minibatches": "rounds"} if rounds else {}
        if self.update.autocast == "bf16":
            marks["old_logprobs"] = "of the update"
        return {**super().identity(), **marks}


def run(
    inputs: Mapping[str, ArtifactRef], config: UpdateSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Train the learner on the iteration's responses and publish its next version."""
    responses, failed = _read(inputs, config)
    if config.max_error_share is not None and failed > config.max_error_share:
        skipped = f"update {config.learner} iteration {config.iteration + 1}: skipped"
        context.warn(f"{skipped}, the verifier failed on {failed:.0%} of a sampler's responses")
        return _unchanged(inputs["agent"], out, {"update/verifier_failed": 1.0})
    seed = required_seed("update", seed)
    train = _train_here if config.update.ranks == 1 else _train_on_ranks
    try:
        metrics, published = train(inputs, config, seed, out, context, responses)
    except DivergenceError as problem:
        if config.on_nonfinite == "stop":
            raise
        context.warn(f"{str(problem).partition(';')[0]}; the update is skipped and the version stays as it was")
        return _unchanged(inputs["agent"], out, {"update/not_finite": 1.0})
    if metrics.get("update/score_mismatch_max", 0.0) > _MISMATCH:
        # Under autocast own ratios compare the update with itself, foreign ones still with what was scored.
        whose = "ratios" if config.update.autocast == "none" else "foreign ratios"
        context.warn(
            f"update {config.learner} iteration {config.iteration + 1}: mean log-probs of own responses differ by up "
            f"to {metrics['update/score_mismatch_max']:.2g} between score and update, more than {_MISMATCH:g}: {whose} "
            "are clipped by rounding; give score and update the same token_budget, or set autocast: none in both"
        )
    return Result({**metrics, "update/skipped": 0.0}, published=published)


def _train_here(
    inputs: Mapping[str, ArtifactRef],
    config: UpdateSlice,
    seed: int,
    out: OutFolder,
    context: Context,
    responses: "list[Response]",
) -> tuple[Metrics, Callable[[ArtifactRef], None]]:
    """Train in this process alone; return the metrics, and what is to be done once the version is published."""
    from hacrl_core.agents.checkpoints import has_optimizer
    from hacrl_core.learning.fused import kernel_metrics
    from hacrl_core.learning.trainer import Trainer
    from hacrl_core.warm import give_back_memory

    version = inputs["agent"]
    agent = context.warm.take_agent(version.path, version.digest, device=context.device, attention=context.attention)
    resumes = version.path if has_optimizer(version.path) else None
    trainer = Trainer(agent, config.update, optimizer_state=resumes, seed=seed)
    metrics = _learn(trainer, responses, config, seed, context.progress)
    metrics |= kernel_metrics("update", agent.device)
    trainer.save(out.path)
    metrics["update/peak_memory_bytes"] = float(trainer.peak_memory_bytes())
    trained = trainer.trained()
    weights = sum(p.numel() * p.element_size() for p in agent.model.parameters())

    def published(ref: ArtifactRef) -> None:
        context.warm.keep_agent(trained, ref.path, ref.digest, device=context.device)
        give_back_memory(weights)  # gradient, moments and activations are freed by now

    return metrics, published


def _train_on_ranks(
    inputs: Mapping[str, ArtifactRef],
    config: UpdateSlice,
    seed: int,
    out: OutFolder,
    context: Context,
    responses: "list[Response]",
) -> tuple[Metrics, Callable[[ArtifactRef], None]]:
    """Train on several ranks, of which this process is the first; every rank reads the inputs itself."""
    from hacrl_core.learning.sharded.policy import Published

    group = context.warm.ranks(config.update.ranks, context.device)
    group.rank.progress = context.progress
    metrics = group.run(
        TrainOnRank(dict(inputs), config, seed, out.path, context.attention, context.warm.own_code),
        name=f"update {config.learner} iteration {config.iteration + 1}",
    )
    return metrics, lambda ref: group.run(Published(ref.path, ref.digest))


@dataclass(frozen=True)
class TrainOnRank:
    """What every rank of an update does. Plain data: it is sent to the ranks."""

    inputs: dict[str, ArtifactRef]
    config: UpdateSlice
    seed: int
    out: Path
    attention: Attention
    own_code: bool

    def __call__(self, rank: "Rank") -> Metrics:
        """Train this rank's slices, save them and return the metrics, which are the same on all ranks."""
        from hacrl_core.agents.checkpoints import has_optimizer
        from hacrl_core.learning.fused import kernel_metrics
        from hacrl_core.learning.sharded.policy import agent_of, numerics_of
        from hacrl_core.learning.sharded.trainer import ShardedTrainer

        update, version = self.config.update, self.inputs["agent"]
        numerics = numerics_of(update, self.attention, adapters=True)
        agent = agent_of(rank, version.path, version.digest, numerics, own_code=self.own_code, seed=self.seed)
        rank.agent = None  # half-trained from now on
        resumes = version.path if has_optimizer(version.path) else None
        trainer = ShardedTrainer(agent, update, optimizer_state=resumes)
        responses, _ = _read(self.inputs, self.config)
        metrics = _learn(trainer, responses, self.config, self.seed, rank.progress)
        metrics |= kernel_metrics("update", rank.device)
        trainer.save(self.out)
        metrics["update/peak_memory_bytes"] = float(trainer.peak_memory_bytes())
        rank.agent = trainer.trained()
        return metrics


def _learn(
    trainer: "Steps",
    responses: "list[Response]",
    config: UpdateSlice,
    seed: int,
    progress: Callable[[int, int, str], None],
) -> Metrics:
    from hacrl_core.learning.learner import Learner

    learner = Learner(
        trainer,
        config.algorithm,
        name=config.learner,
        iteration=config.iteration,
        minibatch_prompts=config.minibatch_prompts,
        seed=seed,
    )
    return learner.learn(responses, progress)


def _read(inputs: Mapping[str, ArtifactRef], config: UpdateSlice) -> "tuple[list[Response], float]":
    """Return the responses to learn from, and the largest share of a sampler's responses that the verifier failed on.

    The tables are dropped on return: as Python objects they take as much memory as a small model.
    """
    credits, scores = _tables(inputs, config)
    reference = _scores(inputs["reference"]) if "reference" in inputs else []
    responses = _joined(credits, scores, reference, config) + _replayed(inputs, config)
    return responses, _error_share(credits, scores, config)


def _tables(inputs: Mapping[str, ArtifactRef], config: UpdateSlice) -> tuple[Table, dict[str, Table]]:
    """Return the learner's credit and everybody's scores of one iteration."""
    credits = read_table(inputs["credit"].path / "credit.parquet", CREDIT).to_pylist()
    # A method without sampler's log-probs does without other parties' claims.
    samplers = [name.removeprefix("scores/") for name in inputs if name.startswith("scores/")]
    scores = {s: _scores(inputs[f"scores/{s}"], _OF_SAMPLERS) for s in samplers if s != config.learner}
    scores[config.learner] = _scores(inputs[f"scores/{config.learner}"])
    return credits, scores


def _replayed(inputs: Mapping[str, ArtifactRef], config: UpdateSlice) -> "list[Response]":
    """Return the others' successes of earlier iterations, with the credit and the log-probs that they had then."""
    from hacrl_core.algorithm.minibatches import successes_of_others

    found = []
    for back in range(1, config.algorithm.replay_iterations + 1):
        past = {name.removeprefix(f"{REPLAY}{back}/"): ref for name, ref in inputs.items()
                if name.startswith(f"{REPLAY}{back}/")}  # fmt: skip
        if past:
            found += successes_of_others(_joined(*_tables(past, config), [], config))
    return found


def _scores(ref: ArtifactRef, columns: Sequence[str] = SCORES.fields.names) -> Table:
    import pyarrow.compute as pc

    if (ref.path / "claims.parquet").exists():
        claims: Table = read_table(ref.path / "claims.parquet", CLAIMS).to_pylist()
        return [{**row, "is_own": True} for row in claims]
    table = read_table(ref.path / "scores.parquet", SCORES)
    tokens = pc.list_value_length(table["token_ids"])
    rows: Table = table.select(columns).append_column("tokens", tokens).to_pylist()
    return rows


def _joined(credits: Table, scores: Mapping[str, Table], reference: Table, config: UpdateSlice) -> "list[Response]":
    """Join by rollout: credit names responses, the learner's scores their tokens, each sampler's its denominator."""
    from hacrl_core.algorithm.minibatches import Response

    sampled_at = {
        r["rollout_id"]: (r["mean_logprob"], r["tokens"]) for rows in scores.values() for r in rows if r["is_own"]
    }
    scored = {row["rollout_id"]: row for row in scores[config.learner]}
    first_scored = {row["rollout_id"]: row for row in reference}
    responses = []
    for credit in credits:
        rollout = credit["rollout_id"]
        needs_claim = credit["is_own"] or config.algorithm.foreign_treatment != "as_own"
        if rollout not in sampled_at and needs_claim:
            raise AlgorithmError(
                f"update {config.learner} iteration {config.iteration + 1}: rollout {rollout} has no score by its "
                f"sampler {credit['sampler']}; its score artifact is missing or of another iteration"
            )
        score = scored.get(rollout)
        if score is None:
            continue  # a foreign response that is empty in the learner's tokens; counted by the score stage
        first = first_scored.get(rollout)
        sampler_mean, sampler_tokens = sampled_at.get(rollout, (score["mean_logprob"], len(score["token_ids"])))
        responses.append(
            Response(
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
                sampler_mean=sampler_mean,
                sampler_tokens=sampler_tokens,
                reference=tuple(first["logprobs"]) if first and credit["is_own"] else None,
            )
        )
    return responses


def _error_share(credits: Table, scores: Mapping[str, Table], config: UpdateSlice) -> float:
    """Return the largest share, over samplers, of responses without credit: the verifier's errors.

    Scores have every response.
    """
    credited = Counter(row["sampler"] for row in credits)
    shares = [0.0]
    for sampler in scores:
        scored = sum(row["is_own"] for row in scores[sampler])
        missing = scored - credited[sampler]
        if missing > 1:  # a single error may be the response's fault
            shares.append(missing / scored)
    return max(shares)


def _unchanged(agent: ArtifactRef, out: OutFolder, why: Metrics) -> Result:
    """Publish the version as it was under the next one's name.

    Artifacts never change, so both may share their files.
    """
    for output in read_manifest(agent.path).outputs:
        target = out.path / output.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(agent.path / output.path, target)
        except OSError:
            shutil.copyfile(agent.path / output.path, target)
    return Result({"update/skipped": 1.0, **why})


STAGE = Stage("update", 2, UpdateSlice, run)

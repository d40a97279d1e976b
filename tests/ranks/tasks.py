"""What the ranks of the tests run. Tasks are pickled, so they live in a module."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hacrl_core.algorithm.objective import Objective, ObjectiveRows, make_objective
from hacrl_core.config.algorithm import preset
from hacrl_core.config.training import UpdateConfig
from hacrl_core.learning.sequences import TrainSequence
from hacrl_core.learning.sharded.policy import Numerics, ShardedAgent, load_sharded, numerics_of
from hacrl_core.learning.sharded.ranks import Rank
from hacrl_core.learning.sharded.scoring import score_sharded
from hacrl_core.learning.sharded.trainer import ShardedTrainer

VOCABULARY = 211


def sequences(count: int = 24, seed: int = 1, longest: int = 40) -> list[TrainSequence]:
    """Random rows; some share their prompt."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(int(i) for i in rng.integers(3, VOCABULARY, rng.integers(4, 12))) for _ in range(count // 3 + 1)]
    return [
        TrainSequence(
            prompts[row % len(prompts)], tuple(int(i) for i in rng.integers(3, VOCABULARY, rng.integers(2, longest)))
        )
        for row in range(count)
    ]


def objective(rows: list[TrainSequence], index: int = 1, clipped: tuple[int, ...] = (), wide: float = 0.5) -> Objective:
    """HACPO over own and foreign rows; the ratio of ``clipped`` rows is far outside the window."""
    generator = torch.Generator().manual_seed(3)
    advantage = torch.randn(len(rows), generator=generator, dtype=torch.float64)
    advantage[list(clipped)] = advantage[list(clipped)].abs()
    old = [torch.full((len(r.response_token_ids),), -9.0 if i in clipped else -5.3) for i, r in enumerate(rows)]
    count = len(rows)
    return make_objective(
        ObjectiveRows(
            sampler_mean_logprob_B=torch.full((count,), -5.25, dtype=torch.float64),
            advantage_B=advantage,
            is_own_B=torch.tensor([i % 2 == 0 or i in clipped for i in range(count)]),
            omega_B=torch.full((count,), 1.3, dtype=torch.float64),
            weight_B=torch.ones(count, dtype=torch.float64),
            total_weight=float(max(1, count)),  # rows may all have been left out as certain zeros
            old_logprobs=old,
        ),
        update_index=index,
        config=preset("hacpo", self_clip_low=wide, self_clip_high=wide, cross_clip_delta=wide),
    )


def settings(**changes: Any) -> UpdateConfig:
    return UpdateConfig(**{"learning_rate": 1e-2, "token_budget": 120, "epsilon": 1e-3, **changes})


@dataclass(frozen=True)
class Train:
    """Load a version, make some steps, and say what came of them."""

    checkpoint: Path
    config: UpdateConfig
    rows: list[TrainSequence]
    steps: int = 1
    resume: bool = False
    save: Path | None = None
    clipped: tuple[int, ...] = ()
    gradients: bool = True

    def agent(self, rank: Rank) -> ShardedAgent:
        numerics = Numerics(self.config.autocast, "auto", self.config.offload == "optimizer", self.config.lora)
        return load_sharded(rank, self.checkpoint, "digest", numerics, seed=4)

    def __call__(self, rank: Rank) -> dict[str, Any]:
        trainer = ShardedTrainer(
            self.agent(rank), self.config, optimizer_state=self.checkpoint if self.resume else None
        )
        first = trainer.gradient_norm(self.rows, objective(self.rows, clipped=self.clipped))
        gradient = {name: trainer.whole_gradient(name).clone() for name in trainer._names} if self.gradients else {}
        steps = [trainer.step(self.rows, objective(self.rows, clipped=self.clipped)) for _ in range(self.steps)]
        if self.save is not None:
            trainer.save(self.save)
        finite = trainer.is_finite() and trainer.gives_finite(self.rows[:1], objective(self.rows[:1]), 1)
        return {
            "norm": first,
            "gradient": gradient,
            "steps": steps,
            "finite": finite,
            "updates": trainer.updates,
            "shared": trainer.agent.shares_prefixes,
        }


@dataclass(frozen=True)
class Score:
    """Score rows under a version."""

    checkpoint: Path
    rows: list[TrainSequence]
    numerics: Numerics = field(default_factory=Numerics)

    def __call__(self, rank: Rank) -> list[Any]:
        agent = load_sharded(rank, self.checkpoint, "digest", self.numerics)
        return score_sharded(agent, self.rows, token_budget=200)


@dataclass(frozen=True)
class ScoreAndUpdate:
    """Mean log-probs of rows: as scoring finds them, as the update reads them beforehand, as its first step sees them.

    Returns one list for each.
    """

    checkpoint: Path
    rows: list[TrainSequence]
    config: UpdateConfig

    def __call__(self, rank: Rank) -> list[list[float]]:
        agent = load_sharded(rank, self.checkpoint, "digest", numerics_of(self.config, "auto"))
        scored = score_sharded(agent, self.rows, token_budget=200)
        trainer = ShardedTrainer(agent, self.config)
        read = trainer.logprobs(self.rows)
        seen = trainer.step(self.rows, _means).stats["mean"]
        return [[float(values.mean(dtype=np.float64)) for values in found] for found in (scored, read)] + [list(seen)]


def _means(logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, rows_B: torch.Tensor) -> Any:
    means = (logprobs_BT * mask_BT).sum(1) / mask_BT.sum(1)
    return -means.sum(), {"mean": means.detach()}


def compare(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Relative distance of two gradients over all parameters."""
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[n].double() - theirs[n].double()).pow(2).sum()) for n in ours)
    size = sum(float(theirs[n].double().pow(2).sum()) for n in theirs)
    return (apart / size) ** 0.5


@dataclass(frozen=True)
class Fails:
    """Raise on one rank; the others wait for it in a collective."""

    problem: Exception
    at: int

    def __call__(self, rank: Rank) -> None:
        if rank.index == self.at:
            raise self.problem
        rank.barrier()


@dataclass(frozen=True)
class WithoutSharedDisk:
    """Save as ranks on different machines do: rank 0 gathers."""

    train: Train

    def __call__(self, rank: Rank) -> Any:
        from hacrl_core.learning.sharded import saving

        before = saving._is_shared
        saving._is_shared = lambda folder, rank: False  # type: ignore[assignment]
        try:
            return self.train(rank)
        finally:
            saving._is_shared = before  # type: ignore[assignment]


@dataclass(frozen=True)
class InSmallFiles:
    """Save as if a file might hold only so many bytes."""

    train: Train
    size: int

    def __call__(self, rank: Rank) -> Any:
        from hacrl_core.learning.sharded import saving

        before = saving._FILE_BYTES
        saving._FILE_BYTES = self.size
        try:
            return self.train(rank)
        finally:
            saving._FILE_BYTES = before


@dataclass(frozen=True)
class SlicesAreFloat32:
    """Whether master weights stay float32 under bf16."""

    checkpoint: Path
    numerics: Numerics

    def __call__(self, rank: Rank) -> bool:
        agent = load_sharded(rank, self.checkpoint, "digest", self.numerics)
        return all(p.dtype == torch.float32 for p in agent.model.parameters())


@dataclass(frozen=True)
class MeasureLoading:
    """Return, for each rank, the bytes of its slices and the most bytes of tensors alive while they were read.

    Views into a mapped file are not memory: safetensors makes one of a whole tensor to cut rows from it.
    """

    checkpoint: Path

    def __call__(self, rank: Rank) -> list[tuple[int, int]]:
        import gc

        from hacrl_core.learning.sharded import loading
        from hacrl_core.learning.sharded.policy import Policy, _allocate, shard, skeleton

        def alive() -> int:
            found = {}
            lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
            files = [line[0].split("-") for line in lines if line[-1].endswith(".safetensors")]
            mapped = [range(int(first, 16), int(last, 16)) for first, last in files]
            for item in gc.get_objects():
                if type(item) is not torch.Tensor or item.is_meta or item.dtype != torch.float32:
                    continue
                if not any(item.data_ptr() in place for place in mapped):
                    found[item.data_ptr()] = max(found.get(item.data_ptr(), 0), 4 * item.numel())
            return sum(found.values())

        gc.collect()
        before = alive()
        policy = Policy(skeleton(self.checkpoint))
        shard(policy, rank, Numerics())
        _allocate(policy, rank.device)
        peaks = []
        rows = loading.TensorFiles.rows

        def measured(files: Any, name: str, part: slice) -> torch.Tensor:
            piece = rows(files, name, part)
            peaks.append(alive() - before)
            return piece

        loading.TensorFiles.rows = measured  # type: ignore[method-assign]
        try:
            loading.read_slices(policy.model, self.checkpoint, rank)
        finally:
            loading.TensorFiles.rows = rows  # type: ignore[method-assign]
        held = sum(4 * loading.local(p).numel() for p in policy.model.parameters())
        return rank.gather((held, max(peaks)))


@dataclass(frozen=True)
class TrainForEver:
    """Make steps until somebody ends it; a file says that the first one is done."""

    train: Train
    begun: Path

    def __call__(self, rank: Rank) -> None:
        trainer = ShardedTrainer(self.train.agent(rank), self.train.config)
        while True:
            trainer.step(self.train.rows, objective(self.train.rows))
            self.begun.touch()


@dataclass(frozen=True)
class Forgotten:
    """In place of `policy.Published`: the rank keeps nothing of what it has trained."""

    checkpoint: Path
    digest: str

    def __call__(self, rank: Rank) -> None:
        """Drop the slices."""
        rank.agent = None

"""hacrl doctor --smoke reports a rank that dies and one whose work is wrong."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from flows.doctor import smoke, smoke_parts
from hacrl_core.config.training import UpdateConfig
from hacrl_core.learning.sequences import TrainSequence
from hacrl_core.learning.sharded.ranks import Rank

pytestmark = pytest.mark.ranks
_RIGHT = smoke_parts._StepOnRank


@dataclass(frozen=True)
class Dies:
    """The step of a rank; rank 1 is killed instead."""

    checkpoint: Path
    config: UpdateConfig
    sequences: list[TrainSequence]

    def __call__(self, rank: Rank) -> Any:
        if rank.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return _RIGHT(self.checkpoint, self.config, self.sequences)(rank)


@dataclass(frozen=True)
class Forgets:
    """The step of a rank; rank 1 sums its gradients without the others' share."""

    checkpoint: Path
    config: UpdateConfig
    sequences: list[TrainSequence]

    def __call__(self, rank: Rank) -> Any:
        from hacrl_core.learning.sharded import trainer

        right = trainer.ShardedTrainer._pass
        if rank.index == 1:

            def without_loss(self: Any, batch: Any, objective: Any) -> Any:
                return right(self, batch, trainer._no_loss if objective is not None else None)

            trainer.ShardedTrainer._pass = without_loss  # type: ignore[method-assign]
        return _RIGHT(self.checkpoint, self.config, self.sequences)(rank)


@pytest.mark.parametrize(
    ("fault", "why"), [(Dies, "rank 1 of 2 died (killed by SIGKILL)"), (Forgets, "2 ranks are off by")]
)
def test_a_planted_fault_of_a_rank_is_in_the_file(fault, why, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    name = "ranks against one process"
    monkeypatch.setattr(smoke_parts, "_StepOnRank", fault)
    monkeypatch.setattr(smoke, "PARTS", {name: smoke.PARTS[name]})
    assert smoke.run_smoke(Console(quiet=True), tmp_path / "smoke.json", "cpu") == 1
    found = json.loads((tmp_path / "smoke.json").read_text())
    assert found["state"] == "failed"
    assert why in found["parts"][name]["why"]

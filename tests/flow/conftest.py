"""Tiny campaigns for the flow tests: real agents, real stages, seconds long."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.campaign import State, run_campaign
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from stages.runner import run_stage
from stages.spec import Context, StageCall
from tests.once import common_folder

AGENT: dict[str, Any] = {
    "model": {
        "architecture": "llama",
        "hidden_size": 16,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "intermediate_size": 24,
    },
    "tokenizer": {"kind": "characters"},
    "mixture": {"addition": 1.0},
    "corpus_problems": 256,
    "steps": 150,
    "batch_size": 32,
    "learning_rate": 1e-2,
}
TINY: dict[str, Any] = {
    "name": "tiny",
    "iterations": 2,
    "problems": {"kind": "arithmetic", "kinds": {"addition": 1.0}, "levels": {"easy": 1.0}},
    "prompts_per_iteration": 6,
    "samples_per_prompt": 4,
    "agents": {
        "ada": {"warmstart": AGENT},
        "ben": {
            "warmstart": {
                **AGENT,
                "model": {**AGENT["model"], "architecture": "qwen3", "hidden_size": 24},
                "tokenizer": {"kind": "bpe", "vocab_size": 300},
            }
        },
    },
    "generate": {"max_tokens": 24, "batch_size": 32},
    "update": {"learning_rate": 1e-3, "minibatch_prompts": 3},
    "evaluate": {
        "benchmarks": [
            {
                "name": "held_out",
                "problems": {
                    "kind": "arithmetic",
                    "kinds": {"addition": 1.0},
                    "levels": {"easy": 1.0},
                    "split": "held_out",
                    "size": 8,
                },
                "max_tokens": 24,
            }
        ]
    },
    "tracking": {"enabled": False},
}


def tiny(**changes: Any) -> CampaignConfig:
    """The tiny campaign with top-level keys replaced."""
    return CampaignConfig.model_validate({**copy.deepcopy(TINY), **changes})


class Inline:
    """Runs every stage on the spot, in this process, and remembers what ran."""

    def __init__(self, store: Store) -> None:
        self.store, self.context = store, Context()
        self.ran: list[str] = []
        self.cached: list[str] = []
        self.outcomes: dict[str, Any] = {}

    def submit(self, planned: StageCall) -> Done:
        call = planned.bound()
        outcome = run_stage(self.store, call, self.context)
        (self.cached if outcome.cached else self.ran).append(call.label)
        self.outcomes[call.label] = outcome
        return Done(planned, outcome)

    def iteration_done(self, iteration: int) -> None:
        pass


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all inline campaigns of all test processes: warm starts and first rollouts are computed once."""
    shared = common_folder(tmp_path_factory) / "shared-store"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture
def run_inline(shared_store: Path):
    torch.set_num_threads(1)

    def run(config: CampaignConfig, root: Path | None = None) -> tuple[Inline, State]:
        runner = Inline(Store(root or shared_store))
        state = run_campaign(config, StageCalls(config), runner)
        return runner, state

    return run

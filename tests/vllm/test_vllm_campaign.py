"""A whole campaign with vLLM as the engine: tiny agents, three iterations, one warm worker per agent."""

import copy

import numpy as np
import pytest

from flows.campaign import run_campaign
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from stages.runner import run_stage
from stages.spec import Context
from tests.flow.conftest import TINY, tiny

pytestmark = pytest.mark.slow


class PerAgent:
    """Stages on the spot, each agent with things of its own kept warm, as its worker process would."""

    def __init__(self, store: Store) -> None:
        self.store, self.outcomes, self.warnings = store, {}, []
        self.contexts: dict[str, Context] = {}

    def submit(self, planned):
        call = planned.bound()
        context = self.contexts.setdefault(call.agent, Context(warn=self.warnings.append))
        self.outcomes[call.label] = run_stage(self.store, call, context)
        return Done(planned, self.outcomes[call.label])

    def iteration_done(self, iteration):
        pass


def test_a_campaign_of_three_iterations_on_vllm(vllm_config, tmp_path):
    generate = {**TINY["generate"], "engine": {**vllm_config.model_dump(mode="json"), "dtype": "float32"}}
    agents = copy.deepcopy(TINY["agents"])
    for agent in agents.values():  # vLLM's CPU attention knows head sizes from 32 on
        agent["warmstart"]["model"].update(hidden_size=64, heads=2, kv_heads=1)
    config = tiny(generate=generate, agents=agents, iterations=3)
    runner = PerAgent(Store(tmp_path))
    try:
        run_campaign(config, StageCalls(config), runner)
        assert {agent for agent, context in runner.contexts.items() if context.warm.has_engine} == {"ada", "ben"}
    finally:
        for context in runner.contexts.values():
            context.warm.close()
    for agent in ("ada", "ben"):
        for iteration in range(3):
            metrics = runner.outcomes[f"score {agent} #{iteration}"].metrics
            # Sampled by vLLM, scored by the trainer, in float32 on the same weights: a stale version would show at
            # once.
            assert metrics["score/sampling_mismatch_max"] < 1e-3
            assert np.isfinite(list(runner.outcomes[f"update {agent} #{iteration}"].metrics.values())).all()
        manifest = runner.store.manifest("generate", runner.outcomes[f"generate {agent} #2"].ref.key)
        assert manifest.details["engine"] == "vllm"
        assert manifest.details["engine_version"]
    assert runner.warnings == []

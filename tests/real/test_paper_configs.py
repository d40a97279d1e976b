"""The paper's six pairs load, validate and say what the paper says."""

from pathlib import Path

import pytest

from flows.plan.plan import Cluster, make_plan
from flows.plan.rates import load_rates
from flows.run.placement import turns_of
from hacrl_core.algorithm import foreign_window
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from hacrl_core.config.problems import PresetProblems

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "paper"
# α, δ, δ_step of each pair, after the paper's table 5: docs/algorithm.md.
PAIRS = {
    "qwen3-4b-pair": (3.0, 0.2, 0.01),
    "qwen3-1.7b-4b-base": (1.0, 0.2, 0.025),
    "qwen3-4b-8b-base": (3.0, 0.2, 0.025),
    "llama3.2-1b-3b": (1.0, 0.1, 0.01),
    "qwen3-1.7b-llama3.2-1b": (1.0, 0.2, 0.025),
    "qwen3-4b-llama3.2-3b": (1.0, 0.2, 0.025),
}
BENCHMARKS = {"math500", "math_test", "gsm8k_test", "aime2025", "amc2023", "minerva_math", "olympiadbench"}


def test_there_are_six_and_no_others():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*PAIRS, "common"}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_has_the_papers_numbers(pair):
    config = load_config(FOLDER / f"{pair}.yaml", CampaignConfig)
    assert config.name == pair
    assert len(config.agents) == 2
    assert (config.prompts_per_iteration, config.group_size) == (128, 8)
    assert (config.generate.temperature, config.generate.max_prompt_tokens, config.generate.max_tokens) == (
        1,
        1024,
        4096,
    )
    for agent, settings in config.agents.items():
        objective, update = config.objective(agent), config.training(agent)
        assert (objective.alpha, objective.cross_clip_delta, objective.cross_clip_step) == PAIRS[pair]
        assert (objective.self_clip_low, objective.self_clip_high, objective.capability_window) == (3e-4, 4e-4, 5)
        assert (config.minibatch_size(agent), update.epochs, update.gradient_norm) == (64, 1, 1.0)
        assert update.learning_rate == 1e-6
        assert update.lora is None, "the paper trains every weight"
        assert settings.checkpoint is not None
        assert settings.checkpoint.trust_remote_code is False
    assert foreign_window(0, config.objective(agent))[0] == pytest.approx(0.9 if pair == "llama3.2-1b-3b" else 0.8)


@pytest.mark.parametrize("pair", PAIRS)
def test_math500_every_three_iterations_and_seven_benchmarks_at_the_end(pair):
    config = load_config(FOLDER / f"{pair}.yaml", CampaignConfig)
    names = lambda completed: {b.name for b in config.evaluate.due(completed, config.iterations)}  # noqa: E731
    assert isinstance(config.problems, PresetProblems)
    assert config.problems.name == "math"
    assert names(0) == names(3) == names(6) == {"math500"}
    assert names(1) == names(4) == set()
    assert names(config.iterations) == BENCHMARKS
    assert {b.max_tokens for b in config.evaluate.benchmarks} == {8192}
    assert {b.name: b.samples for b in config.evaluate.benchmarks if b.samples > 1} == {"aime2025": 30}


@pytest.mark.parametrize("pair", PAIRS)
def test_eight_gpus_and_nobody_waits(pair):
    config = load_config(FOLDER / f"{pair}.yaml", CampaignConfig)
    used = [gpu for agent in config.agents.values() for gpu in agent.gpus]
    assert sorted(used) == list(range(8))
    assert turns_of(config) == {}
    for agent, settings in config.agents.items():
        engine = config.generation(agent).engine
        assert engine.tensor_parallel_size * engine.replicas == len(settings.gpus) == config.training(agent).ranks
        assert engine.keep == "sleep"  # sampling and training share the agent's GPUs
        # One queue, one tail: all responses of an iteration are in one shard.
        assert 2 * engine.in_flight >= config.prompts_per_iteration * config.group_size
    assert config.keep is not None
    assert (config.keep.last, config.keep.best) == (2, True)


@pytest.mark.parametrize("device", ["H100", "A100"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_weight_of_both_agents_fits_eight_gpus_of_80_gb(pair, device):
    config = load_config(FOLDER / f"{pair}.yaml", CampaignConfig)
    plan = make_plan(config, Cluster(device, 8), load_rates())
    assert plan.faults == ()
    assert max(stage.memory or 0 for stage in plan.stages) < 0.95 * 80e9  # a driver and its fragments need the rest
    assert plan.disk_bytes < 1e12
    assert plan.iteration_seconds < {"H100": 6, "A100": 15}[device] * 60


def test_what_does_not_fit_is_said():
    """The settings of before: all of the 8B agent on one GPU, an engine that stays, a share that leaves no room."""
    config = load_config(FOLDER / "qwen3-4b-8b-base.yaml", CampaignConfig)

    def faults(**changes):
        agent = config.agents["qwen3-8b-base"].model_copy(update=changes)
        altered = config.model_copy(update={"agents": {**config.agents, "qwen3-8b-base": agent}})
        return " ".join(make_plan(altered, Cluster("H100", 8), load_rates()).faults)

    assert faults() == ""
    assert "update needs about" in faults(update={"ranks": 1})
    assert "update needs about" in faults(generate={"engine": {"replicas": 5, "keep": True}})
    assert "generate needs about" in faults(generate={"engine": {"replicas": 5, "memory_share": 0.9}})
    assert "memory_share 0.2 allows 16" in faults(generate={"engine": {"replicas": 5, "memory_share": 0.2}})

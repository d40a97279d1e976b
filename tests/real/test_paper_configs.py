"""The paper's six pairs load, validate and say what the paper says."""

from pathlib import Path

import pytest

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
        assert (
            update.learning_rate == 1e-6 or update.lora is not None
        )  # adapters are the one departure, for the 8B agent
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
    for agent in config.agents:
        assert config.generation(agent).engine.tensor_parallel_size == len(config.agents[agent].gpus)
        assert config.generation(agent).engine.keep is False  # sampling and training share the agent's first GPU

"""Settings of an agent's own lie over the campaign's."""

import pytest
from pydantic import ValidationError

from flows.stage_calls import StageCalls
from flows.tracking.projection import campaign_digest
from hacrl_core.config.generation import BuiltinEngineConfig, VllmEngineConfig
from tests.flow.conftest import TINY, tiny


def with_ben(**own):
    return tiny(agents={"ada": TINY["agents"]["ada"], "ben": {**TINY["agents"]["ben"], **own}})


def test_an_agents_own_values_win_and_the_others_stay():
    config = with_ben(
        update={"learning_rate": 0.5, "lora": {"rank": 4, "alpha": 8}, "minibatch_prompts": 2},
        score={"token_budget": 128},
        generate={"max_tokens": 7, "engine": {"dtype": "bfloat16"}},
    )
    assert (config.training("ada").learning_rate, config.training("ben").learning_rate) == (1e-3, 0.5)
    assert (config.minibatch_size("ada"), config.minibatch_size("ben")) == (3, 2)
    assert config.training("ada").lora is None
    assert config.training("ben").lora.rank == 4
    assert config.scoring("ben").token_budget == 128
    assert config.generation("ben").engine == BuiltinEngineConfig(dtype="bfloat16")
    assert config.generation("ben").batch_size == config.generate.batch_size
    calls = StageCalls(config)
    assert calls.generate("ben", None, None, 0).config.generate.max_tokens == 7
    assert calls.score("ben", {"ben": None}, {}, None, 0).config.max_tokens == 7
    assert calls.update("ben", None, {}, None, 0).config.update.learning_rate == 0.5
    assert calls.update("ada", None, {}, None, 0).config.update.learning_rate == 1e-3


def test_another_kind_of_engine_replaces_the_campaigns():
    base = {**TINY["generate"], "engine": {"kind": "vllm", "memory_share": 0.3}}
    agents = {
        "ada": TINY["agents"]["ada"],
        "ben": {**TINY["agents"]["ben"], "generate": {"engine": {"kind": "builtin"}}},
    }
    config = tiny(generate=base, agents=agents)
    assert config.generation("ada").engine == VllmEngineConfig(memory_share=0.3)
    assert config.generation("ben").engine == BuiltinEngineConfig()


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"update": {"learning_rat": 1}}, "agents.ben.update.learning_rat: unknown key"),
        ({"update": {"learning_rate": -1}}, "agents.ben.update.learning_rate: -1 is not allowed"),
        ({"generate": {"temperature": 0.5}}, "generate.temperature 0.5 differs from score.temperature 1"),
        ({"score": {"autocast": "bf16"}}, "score.autocast bf16 differs from update.autocast none"),
        ({"update": {"minibatch_prompts": 7}}, "minibatch_prompts 7 exceeds prompts_per_iteration 6"),
        ({"device": "gpu"}, "String should match pattern"),
    ],
)
def test_mistakes_are_named(own, words):
    with pytest.raises(ValidationError, match=words):
        with_ben(**own)


def test_where_an_agent_runs_does_not_make_another_campaign():
    plain = campaign_digest(tiny())
    assert campaign_digest(with_ben(gpus=[1], attention="eager", update={"token_budget": 64})) != campaign_digest(
        with_ben(update={"learning_rate": 1.0})
    )
    assert campaign_digest(with_ben(gpus=[1], device="cpu", attention="eager")) == plain
    assert campaign_digest(with_ben(update={"learning_rate": 1.0})) != plain

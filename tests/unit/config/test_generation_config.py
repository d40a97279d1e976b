import pytest
from pydantic import ValidationError

from hacrl_core.config.generation import BuiltinEngineConfig, GenerateConfig, VllmEngineConfig
from hacrl_core.generation import create_engine, sampling_params
from hacrl_core.generation.builtin import BuiltinEngine


def test_kind_chooses_the_engine() -> None:
    assert isinstance(GenerateConfig(max_tokens=8).engine, BuiltinEngineConfig)
    assert isinstance(
        GenerateConfig.model_validate({"max_tokens": 8, "engine": {"kind": "vllm"}}).engine, VllmEngineConfig
    )
    with pytest.raises(ValidationError, match="tensor_parallel_size"):
        GenerateConfig.model_validate({"max_tokens": 8, "engine": {"kind": "builtin", "tensor_parallel_size": 2}})


def test_identity_has_what_changes_the_numbers_and_nothing_else() -> None:
    base = GenerateConfig(max_tokens=8)
    same = GenerateConfig(max_tokens=8, batch_size=3, engine=BuiltinEngineConfig(device="cpu", fast_path=False))
    assert base.identity() == same.identity()
    for other in ({"temperature": 0.5}, {"top_k": 4}, {"stop_strings": ("x",)}, {"engine": {"kind": "vllm"}}):
        assert GenerateConfig.model_validate({"max_tokens": 8, **other}).identity() != base.identity()


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValidationError, match="end every response at once"):
        GenerateConfig(max_tokens=8, stop_strings=("",))


def test_factory_passes_the_limits_on() -> None:
    config = GenerateConfig(max_tokens=8, batch_size=5, max_prompt_tokens=77, temperature=0.3, top_p=0.9, top_k=7)
    engine = create_engine(config)
    assert isinstance(engine, BuiltinEngine)
    assert (engine.batch_size, engine.max_prompt_tokens) == (5, 77)
    params = sampling_params(config)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.3, 0.9, 7, 8)

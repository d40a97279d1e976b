"""From a config to an engine."""

from hacrl_core.config.generation import GenerateConfig, VllmEngineConfig
from hacrl_core.generation.protocols import GenerationEngine, SamplingParams


def create_engine(config: GenerateConfig) -> GenerationEngine:
    """The engine the config names; nothing is loaded or started before its first call."""
    if isinstance(config.engine, VllmEngineConfig):
        from hacrl_core.generation.vllm import VllmEngine  # only then: it brings subprocess and HTTP machinery

        return VllmEngine(config.engine, max_prompt_tokens=config.max_prompt_tokens)
    from hacrl_core.generation.builtin import BuiltinEngine

    return BuiltinEngine(config.engine, batch_size=config.batch_size, max_prompt_tokens=config.max_prompt_tokens)


def sampling_params(config: GenerateConfig) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        stop_strings=config.stop_strings,
    )

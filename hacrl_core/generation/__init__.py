"""Sampling responses: the engine protocol, the built-in engine and vLLM."""

from hacrl_core.config.generation import GenerateConfig, VllmEngineConfig
from hacrl_core.generation.protocols import GenerationEngine, SamplingParams


def create_engine(config: GenerateConfig, *, own_code: bool = False) -> GenerationEngine:
    """Return the engine the config names. Nothing is loaded or started before its first call.

    ``own_code`` lets checkpoints run code of their own, which vLLM never does here.
    """
    if isinstance(config.engine, VllmEngineConfig):
        # Imported here: it brings subprocess and HTTP machinery.
        from hacrl_core.generation.vllm import VllmEngine

        return VllmEngine(config.engine, max_prompt_tokens=config.max_prompt_tokens)
    from hacrl_core.generation.builtin import BuiltinEngine

    return BuiltinEngine(
        config.engine, batch_size=config.batch_size, max_prompt_tokens=config.max_prompt_tokens, own_code=own_code
    )


def sampling_params(config: GenerateConfig) -> SamplingParams:
    """Return the config's settings of a single call, as the engine takes them."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        stop_strings=config.stop_strings,
    )

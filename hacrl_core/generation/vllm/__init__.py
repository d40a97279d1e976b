"""Generation by vLLM in an environment of its own: a worker that we start, or a server that the user runs."""

from hacrl_core.generation.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]

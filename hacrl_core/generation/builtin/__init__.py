"""The engine of torch and transformers alone: continuous batching, shared prefill, a random stream per request."""

from hacrl_core.generation.builtin.engine import BuiltinEngine

__all__ = ["BuiltinEngine"]

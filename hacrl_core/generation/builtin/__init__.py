"""Sampling with nothing but torch and transformers: continuous batching, shared prefill, one random stream per request.
"""

from hacrl_core.generation.builtin.engine import BuiltinEngine

__all__ = ["BuiltinEngine"]

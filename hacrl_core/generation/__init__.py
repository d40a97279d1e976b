"""Sampling responses: the engine protocol, the built-in engine and vLLM."""

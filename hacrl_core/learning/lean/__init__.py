"""The body of a Llama-style decoder with its own forward and backward pass: ``update.body: lean``."""

from hacrl_core.learning.lean.body import lean_states, runs_lean

__all__ = ["lean_states", "runs_lean"]

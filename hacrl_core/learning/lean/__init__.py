"""The body of a small Llama-style model in few and large operations: design and numbers in docs/update.md."""

from hacrl_core.learning.lean.body import depends_on_prefixes, lean_states, runs_lean

__all__ = ["depends_on_prefixes", "lean_states", "runs_lean"]

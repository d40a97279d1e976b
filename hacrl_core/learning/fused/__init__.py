"""The fused linear log-prob loss: design and numbers in docs/update.md."""

from hacrl_core.learning.fused.head import Head, hidden_states, read_head
from hacrl_core.learning.fused.linear_loss import (
    Chunk,
    Gradients,
    Objective,
    Outcome,
    Settles,
    chunk_rows,
    fused_linear_loss,
    fused_pass,
    loss_node,
    plan_chunks,
)
from hacrl_core.learning.fused.rowwise import kernel_metrics

__all__ = [
    "Chunk",
    "Gradients",
    "Head",
    "Objective",
    "Outcome",
    "Settles",
    "chunk_rows",
    "fused_linear_loss",
    "fused_pass",
    "hidden_states",
    "kernel_metrics",
    "loss_node",
    "plan_chunks",
    "read_head",
]

"""First agents by supervised training: ordinary ``transformers`` checkpoints, small enough for a demonstration."""

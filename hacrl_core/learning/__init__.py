"""Log-probs and updates: scoring, the trainer and the fused loss."""

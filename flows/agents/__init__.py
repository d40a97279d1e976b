"""Trained agents: finding, evaluating and exporting them."""

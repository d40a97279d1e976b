"""Sweeps: many campaigns that share one store, what they cost, and what can be said about them."""

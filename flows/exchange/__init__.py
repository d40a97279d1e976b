"""Parties: each runs the stages of its own agents, and a bucket stands between them."""

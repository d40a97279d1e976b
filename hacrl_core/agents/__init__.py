"""Agents as files and in memory: adoption, checkpoints, warm starts."""

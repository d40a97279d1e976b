"""Checks before anything runs: of the machine and of a campaign."""

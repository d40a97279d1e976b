"""``hacrl plan``: what a campaign will take before it runs: memory, time, disk, idle GPUs and the critical path."""

"""Seeds by purpose: every random number is a function of the campaign's seed and of what it is used for."""

import hashlib

import numpy as np


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose, e.g. ``derive_seed(0, "generate", "alice", 7)``."""
    text = "\x1f".join([str(seed), *(str(part) for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derive_rng(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return a random generator for one purpose."""
    return np.random.default_rng(derive_seed(seed, *purpose))

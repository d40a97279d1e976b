"""The reward from a verdict: correct 1, else 0, with an optional format reward and an optional overlong penalty."""

from hacrl_core.config.verification import OverlongConfig
from hacrl_core.verification.verdict import VerdictKind


def base_reward(kind: VerdictKind, *, well_formed: bool, format_reward: float) -> float:
    """1 for a correct answer. A wrong one in a complete box gets ``format_reward``: the form is never worth a right answer."""
    if kind is VerdictKind.CORRECT:
        return 1.0
    if kind is VerdictKind.ERROR:
        return 0.0
    return format_reward if well_formed else 0.0


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """0 up to ``max_tokens − buffer_tokens``, then linear, ``penalty`` from ``max_tokens`` on."""
    start = config.max_tokens - config.buffer_tokens
    return config.penalty * min(1.0, max(0.0, (tokens - start) / config.buffer_tokens))


def shaped_reward(reward: float, tokens: int | None, overlong: OverlongConfig | None) -> float:
    """Never below 0: an agent's capability is a mean of rewards and a ratio of two of them must stay positive."""
    if overlong is None or tokens is None:
        return reward
    return max(0.0, reward - overlong_penalty(tokens, overlong))

"""HACPO in slow, obvious loops of plain floats: a reference for the arrays that shares no code with them."""

import math


def capability(history: list[list[float]], window: int) -> list[float]:
    out = []
    for agent in range(len(history[0])):
        present = [row[agent] for row in history[-window:] if not math.isnan(row[agent])]
        out.append(max(sum(present) / len(present), 1e-8) if present else math.nan)
    return out


def clamped(a: float, b: float) -> float:
    return min(max(a / b, 0.1), 10.0)


def advantages(rewards, capabilities, learner):
    """``rewards[p][n][g]``, None where the verifier failed."""
    all_advantages, baselines = [], []
    for prompt in rewards:
        weighted, raw = [], []
        for sampler, group in enumerate(prompt):
            for reward in group:
                if reward is not None:
                    weighted.append(reward / clamped(capabilities[sampler], capabilities[learner]))
                    raw.append(reward)
        silent = not raw or all(reward == raw[0] for reward in raw)
        if silent:
            mu, sigma = (raw[0] if raw else 0.0), 0.0
        else:
            mu = sum(weighted) / len(weighted)
            if mu > 1 + 1e-9:
                own = [reward for reward in prompt[learner] if reward is not None] or raw
                mu = sum(own) / len(own)
            mean = sum(raw) / len(raw)
            sigma = math.sqrt(sum((reward - mean) ** 2 for reward in raw) / (len(raw) - 1))
        baselines.append(mu)
        all_advantages.append(
            [
                [0.0 if silent or reward is None else (reward - mu) / (sigma + 1e-6) for reward in group]
                for group in prompt
            ]
        )
    return all_advantages, baselines


def gspo_term(log_s, a, low, high, limit):
    """Value of min(s·A, clip(s)·A) and its derivative by the learner's log-prob."""
    inside_limit = abs(log_s) <= limit
    s = math.exp(min(max(log_s, -limit), limit))
    clipped = min(max(s, low), high)
    if s * a <= clipped * a:
        return s * a, s * a if inside_limit else 0.0
    return clipped * a, 0.0


def foreign_term(log_s, a, omega, low, alpha, limit, *, clip=True, pessimistic=False):
    inside_limit = abs(log_s) <= limit
    s = math.exp(min(max(log_s, -limit), limit))
    if not clip:
        value = s * s**alpha * omega * a
        return value, value if inside_limit else 0.0
    clipped = min(max(s, low), 1.0)
    if pessimistic:
        factor = min(s, 1.0) ** alpha * omega
        if s * a <= clipped * a:
            return s * a * factor, s * a * factor if inside_limit else 0.0
        return clipped * a * factor, 0.0
    value = clipped * clipped**alpha * omega * a
    return value, value if inside_limit and low <= s <= 1.0 else 0.0


def loss(learner, sampler, advantage, is_own, omega, *, update_index, config):
    """−mean of the terms, and its gradient by the learner's mean log-probs; ``config`` is a plain dict."""
    limit = config["max_abs_log_ratio"]
    step = config["cross_clip_step"] if config["stepwise_clip"] else 0.0
    low = min(1.0, 1.0 - config["cross_clip_delta"] + update_index * step)
    total, gradient = 0.0, []
    for lp, sp, a, own, w in zip(learner, sampler, advantage, is_own, omega, strict=True):
        factor = w if config["capability_in_gradient"] else 1.0
        gspo = gspo_term(lp - sp, a, 1 - config["self_clip_low"], 1 + config["self_clip_high"], limit)
        if own:
            value, slope = gspo
        elif config["foreign_treatment"] != "hacpo":
            value, slope = factor * gspo[0], factor * gspo[1]
        else:
            value, slope = foreign_term(
                lp - sp,
                a,
                factor,
                low,
                config["alpha"],
                limit,
                clip=config["cross_clip"],
                pessimistic=config["pessimistic"],
            )
        total += value
        gradient.append(-slope / len(learner))
    return -total / len(learner), gradient

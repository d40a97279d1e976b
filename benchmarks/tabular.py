"""A tabular world: policies so small that every method's gradient is an exact sum, not an estimate.

    python benchmarks/tabular.py [--worlds 2000] [--methods hacpo topr]

A world has one prompt. A text is three tokens of a vocabulary of three: 27 texts. A policy is a table of logits, one
row per prefix, so a text's log-prob and its gradient are exact. The sampler's table is the learner's plus noise of a
given size; a random third of the texts is right. Expectations are sums over all texts, with the groups' mean and
deviation replaced by those of the policies (the limit of large groups). Weights come from the code that trains
(`hacpo.response_terms`).

For every method: the cosine between the gradient of the foreign responses and the exact policy gradient of the learner,
the share of worlds in which it is positive (the paper's theorem says that HACPO's is), how much shorter or longer the
foreign gradient is (bias in size), and the noise of one foreign response, as root trace of its covariance over the norm
of its mean.
"""

import argparse
import itertools
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hacrl_core.algorithm.hacpo import response_terms
from hacrl_core.config.algorithm import HacpoConfig, preset

Floats = npt.NDArray[np.float64]
TOKENS, LENGTH, SAMPLES = 3, 3, 8
TEXTS = list(itertools.product(range(TOKENS), repeat=LENGTH))
PREFIXES = [prefix for length in range(LENGTH) for prefix in itertools.product(range(TOKENS), repeat=length)]
RIGHT = 1 / 3
METHODS = (
    "hacpo", "alpha_0", "alpha_3", "without_clipping", "hacpo_pessimistic", "naive", "shared_gspo", "raft_foreign",
    "topr", "cispo", "luffy", "prp", "sgt", "alpha_minus_1", "alpha_minus_half", "shared_gspo_capped",
    "pessimistic_capped",
)  # fmt: skip
# Methods with a switch that has no preset of its own.
SWITCHES: dict[str, tuple[str, dict[str, float]]] = {
    "alpha_minus_1": ("hacpo", {"alpha": -1.0}),
    "alpha_minus_half": ("hacpo", {"alpha": -0.5}),
    "shared_gspo_capped": ("shared_gspo", {"foreign_failure_cap": 1.0}),
    "pessimistic_capped": ("hacpo_pessimistic", {"foreign_failure_cap": 1.0}),
}


def config_of(name: str) -> HacpoConfig:
    """Return a method's settings, the switches here included."""
    base, changes = SWITCHES.get(name, (name, {}))
    return preset(base, **changes)


@dataclass(frozen=True)
class World:
    """Two policies and the right texts."""

    learner: Floats  # logits [prefix, token]
    sampler: Floats
    reward_Y: Floats


def random_world(rng: np.random.Generator, distance: float) -> World:
    """Return a world in which both policies are right sometimes and wrong sometimes."""
    learner = rng.standard_normal((len(PREFIXES), TOKENS))
    sampler = learner + distance * rng.standard_normal(learner.shape)
    right = rng.permutation(len(TEXTS)) < round(RIGHT * len(TEXTS))
    return World(learner, sampler, right.astype(np.float64))


def logprobs(logits: Floats) -> Floats:
    """Return the log-prob of every text."""
    table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return np.array([sum(table[PREFIXES.index(y[:t]), y[t]] for t in range(LENGTH)) for y in TEXTS])


def scores(logits: Floats) -> Floats:
    """Return the gradient of every text's mean log-prob by the logits, [text, parameter]."""
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = np.zeros((len(TEXTS), *logits.shape))
    for row, y in enumerate(TEXTS):
        for t in range(LENGTH):
            place = PREFIXES.index(y[:t])
            found[row, place] -= probabilities[place] / LENGTH
            found[row, place, y[t]] += 1 / LENGTH
    return found.reshape(len(TEXTS), -1)


def advantages(world: World, name: str) -> Floats:
    """Return the advantage of a foreign text in the limit of large groups."""
    own, other = np.exp(logprobs(world.learner)), np.exp(logprobs(world.sampler))
    mixed = (own + other) / 2
    rate, pooled = float(own @ world.reward_Y), float(mixed @ world.reward_Y)
    sigma = np.sqrt(pooled * (1 - pooled))
    if name == "sgt":  # imitated where none of the learner's samples succeeds
        return world.reward_Y * (1 - rate) ** SAMPLES
    # HACPO's baseline with the exact ω is the learner's own rate.
    config = config_of(name)
    baseline = rate if config.capability_aware_advantage and config.method == "hacpo" else pooled
    advantage: Floats = (world.reward_Y - baseline) / sigma
    return advantage


def weights(world: World, name: str) -> Floats:
    """Return what the gradient of a foreign text's mean log-prob is multiplied with, beside its advantage."""
    config = config_of(name)
    learner, sampler, advantage = (
        torch.from_numpy(values)
        for values in (logprobs(world.learner) / LENGTH, logprobs(world.sampler) / LENGTH, advantages(world, name))
    )
    if config.foreign_treatment == "as_own":
        sampler = learner  # the ratio to itself, before the first update
    foreign, ones = torch.zeros(len(TEXTS), dtype=torch.bool), torch.ones(len(TEXTS), dtype=torch.float64)
    found: Floats = response_terms(
        learner, sampler, advantage, foreign, ones, update_index=0, config=config
    ).weight.numpy()
    return found


def policy_gradient(world: World) -> Floats:
    """Return Σ π(y)·A(y)·∇(mean log π(y)), the exact gradient that the own responses estimate."""
    own = np.exp(logprobs(world.learner))
    rate = float(own @ world.reward_Y)
    found: Floats = (own * (world.reward_Y - rate) / np.sqrt(rate * (1 - rate))) @ scores(world.learner)
    return found


def foreign_gradient(world: World, name: str) -> tuple[Floats, float]:
    """Return the expected gradient of one foreign response, and the trace of its covariance."""
    other = np.exp(logprobs(world.sampler))
    pull = (weights(world, name) * advantages(world, name))[:, None] * scores(world.learner)
    mean: Floats = other @ pull
    return mean, float(other @ (pull**2).sum(axis=1) - mean @ mean)


def cosine(a: Floats, b: Floats) -> float:
    """Return the cosine of two vectors; 0 where one of them is zero."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else 0.0


def measure(
    worlds: int, distance: float, names: tuple[str, ...] = METHODS, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Return cosine, share of positive cosines, size and noise of every method over random worlds."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(worlds):
        world = random_world(rng, distance)
        true = policy_gradient(world)
        for name in names:
            mean, variance = foreign_gradient(world, name)
            size = float(np.linalg.norm(mean))
            noise = np.sqrt(max(variance, 0.0)) / size if size > 0 else np.inf
            found[name].append((cosine(mean, true), size / float(np.linalg.norm(true)), noise))
    table = {}
    for name, rows in found.items():
        angle, size_, noise_ = np.array(rows).T
        error = float(angle.std(ddof=1) / np.sqrt(len(angle)))
        table[name] = {
            "cosine": float(angle.mean()),
            "cosine_error": error,
            "positive": float((angle > 0).mean()),
            "size": float(np.median(size_)),
            "noise": float(np.median(noise_)),
        }
    return table


def main() -> None:
    """Print the table for three distances between the policies, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=2000)
    parser.add_argument("--distances", type=float, nargs="+", default=[0.1, 0.5, 1.0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parser.parse_args()
    tables = {
        str(distance): measure(options.worlds, distance, tuple(options.methods)) for distance in options.distances
    }
    for distance, table in tables.items():
        print(f"\ndistance {distance}, {options.worlds} worlds")
        print(f"{'method':18} {'cosine':>15} {'positive':>9} {'size':>6} {'noise':>6}")
        for name, row in table.items():
            angle = f"{row['cosine']:.3f} ± {row['cosine_error']:.3f}"
            print(f"{name:18} {angle:>15} {row['positive']:>9.3f} {row['size']:>6.2f} {row['noise']:>6.1f}")
    print(json.dumps({"name": "tabular", "worlds": options.worlds, "tables": tables}))


if __name__ == "__main__":
    main()

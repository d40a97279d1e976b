"""The checks on answers, against honest and hostile samplers whose policies are known exactly."""

import numpy as np
import pytest

from hacrl_core.exchange.plausibility import Answer, examine

ALARM = 1e-6
PROMPTS, SAMPLES, TEXTS = 48, 8, 12


class World:
    """Two policies over the same texts, some of them right; both know one another as much as real agents do."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        sharp = self.random.uniform(0.5, 3.0, (PROMPTS, 1))
        common = self.random.normal(size=(PROMPTS, TEXTS))
        self.theirs = self.policy(sharp * (common + self.random.normal(size=common.shape)))
        self.ours = self.policy(sharp * (common + self.random.normal(size=common.shape)))
        self.right = self.random.integers(0, TEXTS, PROMPTS)

    def policy(self, logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits)
        return weights / weights.sum(axis=1, keepdims=True)

    def draw(self, policy: np.ndarray, prompt: int, count: int = SAMPLES) -> np.ndarray:
        return self.random.choice(TEXTS, count, p=policy[prompt])

    def own(self) -> list[np.ndarray]:
        return [self.draw(self.ours, p) for p in range(PROMPTS)]

    def answers(self, drawn: list[np.ndarray], claim=lambda logprob: logprob) -> list[Answer]:
        return [
            Answer(
                str(p),
                str(text),
                claim(float(np.log(self.theirs[p, text]))),
                float(np.log(self.ours[p, text])),
                4,
                bool(text == self.right[p]),
            )
            for p in range(PROMPTS)
            for text in drawn[p]
        ]

    def alarms(self, drawn: list[np.ndarray], own: list[np.ndarray], claim=lambda logprob: logprob) -> set[str]:
        texts = {str(p): [str(t) for t in own[p]] for p in range(PROMPTS)}
        found = examine(self.answers(drawn, claim), texts, frequencies=True)
        return {finding.name for finding in found if finding.chance < ALARM}


def honest(world: World, own):
    return world.alarms([world.draw(world.theirs, p) for p in range(PROMPTS)], own)


def low_claims(world: World, own):
    drawn = [world.draw(world.theirs, p) for p in range(PROMPTS)]
    return world.alarms(drawn, own, lambda logprob: logprob - 3.0)


def high_claims(world: World, own):
    drawn = [world.draw(world.theirs, p) for p in range(PROMPTS)]
    return world.alarms(drawn, own, lambda logprob: 0.2 * logprob)


def copied(world: World, own):
    return world.alarms([drawn.copy() for drawn in own], own)


def picked(world: World, own):
    """The best eight of 64."""
    drawn = []
    for p in range(PROMPTS):
        many = world.draw(world.theirs, p, 8 * SAMPLES)
        drawn.append(many[np.argsort(many != world.right[p], kind="stable")][:SAMPLES])
    return world.alarms(drawn, own)


def repeated(world: World, own):
    return world.alarms([np.repeat(world.draw(world.theirs, p, 1), SAMPLES) for p in range(PROMPTS)], own)


def test_honest_parties_are_left_alone() -> None:
    assert [honest(world, world.own()) for world in map(World, range(30))] == [set()] * 30


@pytest.mark.parametrize(
    ("attack", "name"),
    [(low_claims, "ratio"), (high_claims, "mass"), (copied, "copies"), (picked, "picks"), (repeated, "repeats")],
)
def test_attacks_are_found_in_one_round(attack, name: str) -> None:
    found = [name in attack(world, world.own()) for world in map(World, range(10))]
    assert sum(found) >= 9, f"{attack.__name__}: {sum(found)} of 10 rounds"


def test_what_the_sampler_finds_likely_is_not_alien() -> None:
    """A badly trained agent writes what another finds impossible; the window is there for that."""
    odd = [Answer(str(p), f"text {p}", -9.0, -40.0, 5) for p in range(10)]
    [finding] = [f for f in examine(odd, {}, frequencies=True) if f.name == "alien"]
    assert finding.chance == 1.0
    fitted = [Answer(str(p), f"text {p}", -39.0, -40.0, 5) for p in range(10)]
    [finding] = [f for f in examine(fitted, {}, frequencies=True) if f.name == "alien"]
    assert finding.chance == 0.0


def test_texts_that_the_learner_finds_impossible() -> None:
    alien = [Answer(str(p), f"buy {p}", None, -40.0, 5) for p in range(10)]
    [finding] = [f for f in examine(alien, {}, frequencies=True) if f.name == "alien"]
    assert finding.chance == 0.0
    assert "100%" in finding.what

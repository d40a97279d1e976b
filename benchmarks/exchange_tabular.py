"""What staleness and hostile parties cost in accuracy, in a world so small that many seeds cost seconds.

    python benchmarks/exchange_tabular.py [--seeds 40] [--stale-seeds 500]

A prompt has 24 texts of four tokens; a policy is a table of logits. Two of the texts are right. A third one, the trap,
is accepted by the verifier and is not wanted: it stands for poisoned text and for what fools a verifier. The step size
was chosen so that ten honest rounds gain about ten points, as in the demo. Two agents answer, are rewarded and learn
with the code that trains (`learner_advantages`, `gradient_omega`, `response_terms`). Ben is hostile. Ada applies the
checks of an exchange (`plausibility.examine`): from the round in which one of them alarms, nothing of ben is used.
Accuracy is the probability of a wanted right text under ada's policy. Prints its mean, and paired differences to the
honest exchange with an interval of 95 %.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from hacrl_core.algorithm.advantage import learner_advantages
from hacrl_core.algorithm.capability import gradient_omega
from hacrl_core.algorithm.hacpo import response_terms
from hacrl_core.config.algorithm import preset
from hacrl_core.exchange.plausibility import Answer, examine

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PROMPTS, TEXTS, LENGTH, SAMPLES, ROUNDS = 24, 24, 4, 8, 10
TRAP = 2  # texts 0 and 1 are right
UPDATES, RATE = 2, 2.0
SKILL = 2.5  # what the logits of right texts have more than others at the beginning
ALARM = 1e-6
CONFIG = preset("hacpo")


def policy(logits_PY: Floats) -> Floats:
    """Return the log-prob of every text."""
    shifted = logits_PY - logits_PY.max(axis=1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def draw(rng: np.random.Generator, logprob_PY: Floats, count: int = SAMPLES) -> Ints:
    """Return texts that a policy samples, [prompt, sample]."""
    chances = np.exp(logprob_PY)
    chances /= chances.sum(axis=1, keepdims=True)
    return np.array([rng.choice(TEXTS, count, p=row) for row in chances])


@dataclass
class Shown:
    """What the hostile sampler shows of a round: texts and the log-probs that it claims. It knows everything."""

    rng: np.random.Generator
    texts_PG: Ints
    claims_PG: Floats
    truth_PY: Floats  # its own log-probs
    learner_PY: Floats
    learner_texts_PG: Ints


Attack = Callable[[Shown], None]


def too_low(points: float) -> Attack:
    """Claim less per token than is true."""

    def attack(shown: Shown) -> None:
        shown.claims_PG -= points * LENGTH

    return attack


def copies(shown: Shown) -> None:
    """Show the learner's own answers, and claim what the learner thinks of them."""
    shown.texts_PG[:] = shown.learner_texts_PG
    shown.claims_PG[:] = np.take_along_axis(shown.learner_PY, shown.texts_PG, axis=1)


def picks(shown: Shown, *, right: bool = True, fit: bool = False) -> None:
    """Show the best (or the worst) eight of 64; ``fit``: claim the probabilities that their frequencies suggest."""
    many = draw(shown.rng, shown.truth_PY, 8 * SAMPLES)
    order = np.argsort((many < TRAP) != right, axis=1, kind="stable")
    shown.texts_PG[:] = np.take_along_axis(many, order, axis=1)[:, :SAMPLES]
    shown.claims_PG[:] = np.take_along_axis(shown.truth_PY, shown.texts_PG, axis=1)
    if fit:
        for texts, claims in zip(shown.texts_PG, shown.claims_PG, strict=True):
            claims[:] = np.log([(texts == text).sum() / (SAMPLES + 1) for text in texts])


def repeats(shown: Shown) -> None:
    """Show the first answer again and again."""
    shown.texts_PG[:] = shown.texts_PG[:, :1]
    shown.claims_PG[:] = shown.claims_PG[:, :1]


def traps(one_of: int) -> Attack:
    """Show the trap in one answer of so many, and claim what puts it into the middle of the learner's window."""

    def attack(shown: Shown) -> None:
        shown.texts_PG[:, ::one_of] = TRAP
        shown.claims_PG[:, ::one_of] = shown.learner_PY[:, TRAP : TRAP + 1]

    return attack


ATTACKS: dict[str, Attack] = {
    "claims 2 per token too low": too_low(2.0),
    "claims 0.05 per token too low": too_low(0.05),
    "copies the learner's answers": copies,
    "best 8 of 64, true claims": picks,
    "best 8 of 64, claims made to fit": lambda shown: picks(shown, fit=True),
    "worst 8 of 64, true claims": lambda shown: picks(shown, right=False),
    "repeats one answer": repeats,
    "traps only, claims made to fit": traps(1),
    "a trap in one answer of eight, claims made to fit": traps(SAMPLES),
}


def campaign(seed: int, attack: Attack | None = None, *, stale: bool = False, alone: bool = False) -> tuple[float, int]:
    """Return ada's accuracy after all rounds, and the round in which ben was found out (-1: never)."""
    rng = np.random.default_rng(seed)
    common = 1.5 * rng.standard_normal((PROMPTS, TEXTS))
    logits = [common + rng.standard_normal(common.shape) for _ in range(2)]
    for one in logits:
        prepare(one)
    before, caught = [one.copy() for one in logits], -1
    for number in range(ROUNDS):
        answering = before if stale else logits
        before = [one.copy() for one in logits]
        sampled = [policy(one) for one in answering]
        drawn = [draw(rng, one) for one in sampled]
        # As in a campaign, stale answers are scored by the newest version of their sampler.
        claims = [np.take_along_axis(policy(logits[n]), drawn[n], axis=1) for n in range(2)]
        shown = Shown(rng, drawn[1].copy(), claims[1].copy(), sampled[1], policy(logits[0]), drawn[0])
        if attack is not None and caught < 0:
            attack(shown)
            caught = number if is_found(shown, drawn[0]) else -1
        heard = not alone and caught < 0
        seen = ([drawn[0], shown.texts_PG], [claims[0], shown.claims_PG])
        logits = [
            learn(logits[0], 0, *seen, heard=heard),
            learn(logits[1], 1, drawn, claims, heard=True),
        ]
    return float(np.exp(policy(logits[0]))[:, :TRAP].sum(axis=1).mean()), caught


def prepare(logits_PY: Floats) -> None:
    """Make right texts likelier than others, and the trap rare: nobody has taught it yet."""
    logits_PY[:, :TRAP] += SKILL
    logits_PY[:, TRAP] = logits_PY.min(axis=1) - 1.0


def learn(logits_PY: Floats, learner: int, texts: list[Ints], claims: list[Floats], *, heard: bool) -> Floats:
    """Return a learner's logits after the updates of one round."""
    rewards_PNG = np.stack([(one <= TRAP).astype(np.float64) for one in texts], axis=1)
    capability = rewards_PNG.mean(axis=(0, 2))
    credit = CONFIG.credit if heard else CONFIG.credit.model_copy(update={"share_rollouts": False})
    advantages_PNG, _ = learner_advantages(rewards_PNG, capability, learner=learner, config=credit)
    omega = gradient_omega(capability, learner=learner)
    for update in range(UPDATES):
        now_PY = policy(logits_PY)
        gradient = np.zeros_like(logits_PY)
        for sampler in range(2) if heard else (learner,):
            now = np.take_along_axis(now_PY, texts[sampler], axis=1) / LENGTH
            is_own = torch.full(now.shape, sampler == learner)
            terms = response_terms(
                torch.from_numpy(now),
                torch.from_numpy(claims[sampler] / LENGTH),
                torch.from_numpy(advantages_PNG[:, sampler]),
                is_own,
                torch.full(now.shape, float(omega[sampler]), dtype=torch.float64),
                update_index=update,
                config=CONFIG,
            )
            pull_PG = terms.weight.numpy() * advantages_PNG[:, sampler]
            for g in range(SAMPLES):
                np.add.at(gradient, (np.arange(PROMPTS), texts[sampler][:, g]), pull_PG[:, g])
            gradient -= pull_PG.sum(axis=1, keepdims=True) * np.exp(now_PY)
        logits_PY = logits_PY + RATE * gradient / (LENGTH * SAMPLES * 2) / UPDATES
    return logits_PY


def is_found(shown: Shown, own_PG: Ints) -> bool:
    """Whether one of ada's checks alarms."""
    answers = [
        Answer(str(p), str(text), float(claim), float(shown.learner_PY[p, text]), LENGTH, bool(text <= TRAP))
        for p in range(PROMPTS)
        for text, claim in zip(shown.texts_PG[p], np.minimum(shown.claims_PG[p], 0.0), strict=True)
    ]
    own = {str(p): [str(text) for text in own_PG[p]] for p in range(PROMPTS)}
    return any(finding.chance < ALARM for finding in examine(answers, own, frequencies=True))


def show(name: str, values: Floats, honest: Floats, found: str = "") -> None:
    """Print an arm's mean and its paired difference."""
    differences = 100 * (values - honest[: len(values)])
    half = stats.t.ppf(0.975, len(values) - 1) * differences.std(ddof=1) / np.sqrt(len(values))
    print(f"{name}: {100 * values.mean():.2f} %, {differences.mean():+.2f} ± {half:.2f} points{found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--stale-seeds", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = np.array([100 * start(seed) for seed in range(options.seeds)])
    honest = np.array([campaign(seed)[0] for seed in range(max(options.seeds, options.stale_seeds))])
    print(f"before: {before.mean():.2f} %; honest exchange: {100 * honest.mean():.2f} % ({len(honest)} seeds)")
    stale = np.array([campaign(seed, stale=True)[0] for seed in range(options.stale_seeds)])
    show(f"staleness 1, {options.stale_seeds} seeds", stale, honest)
    print(f"ada, {options.seeds} seeds:")
    show("alone", np.array([campaign(seed, alone=True)[0] for seed in range(options.seeds)]), honest)
    for name, attack in ATTACKS.items():
        rows = [campaign(seed, attack) for seed in range(options.seeds)]
        caught = [number for _, number in rows if number >= 0]
        when = f", in round {np.mean(caught) + 1:.1f} on average" if caught else ""
        show(name, np.array([value for value, _ in rows]), honest, f"; found in {len(caught)} of {len(rows)}{when}")


def start(seed: int) -> float:
    """Return ada's accuracy before the first round."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((PROMPTS, TEXTS)) + rng.standard_normal((PROMPTS, TEXTS))
    prepare(logits)
    return float(np.exp(policy(logits))[:, :TRAP].sum(axis=1).mean())


if __name__ == "__main__":
    main()

"""Whether answers can be what their sampler says they are.

A receiver has the texts T of a party, the log-probs S that the party claims for them, and two things that nobody else
made: its own log-probs L of the same texts, and its own answers to the same prompts. For an honest sampler five
quantities are bounded in expectation, whatever its policy. Each is compared over the prompts of a round with a margin,
by a one-sided t-test; a hard bound needs no test.

* mass: distinct texts of one prompt are disjoint events, so their claimed probabilities sum to at most 1. Always.
* ratio: E[exp(L − S)] ≤ 1 under the sampler. Claims that are too low break it. A text that is longer than the
  learner's limit is left out here and nowhere else: its beginning is likelier than the whole.
* repeats: two answers to one prompt are equal as often as claimed: E[exp(S)] estimates the same number. Repeated
  answers are equal more often.
* picks: a right text that occurs at all occurs as often as its claimed probability says. Answers that were picked from
  many have right texts more often.
* copies: how many of its answers are also ours follows from L alone, since ours were drawn without it.

A text that was cut off at the sampler's limit counts like any other: S and L are then of texts that begin like this.

One more says nothing about honesty: *alien* texts are hardly possible for anybody, and with claims that say so they
would lie inside the learner's window. Such a round is left out.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

FloatArray = npt.NDArray[np.float64]
# Of the mean over prompts; covers texts that have several tokenizations, each with a log-prob of its own.
MARGIN = 0.1
RATIO_MARGIN = 0.5
# A single text that the learner likes better must not decide.
_RATIO_CAP = 20.0
_MASS_SLACK = 1e-3
# A text may have further tokenizations: its probability is at most so many times the claimed one, and so much more.
_SLACK = (1.2, 0.01)
# Fewer prompts say nothing.
_FEWEST = 4
# Texts that are as good as impossible for the learner, and by the claims for the sampler too: mean log-prob of a token,
# and the share that a round may have. What the sampler finds likely and the learner impossible is left to the window.
ALIEN_LOGPROB = -6.0
ALIEN_CLAIM = -4.0
ALIEN_SHARE = 0.1


@dataclass(frozen=True)
class Answer:
    """One answer of another party."""

    prompt: str
    text: str
    claimed: float | None  # log-prob of the whole text by its sampler; None where nothing is claimed
    scored: float  # by the learner
    tokens: int  # in the learner's tokens
    is_right: bool = False
    is_part: bool = False  # the learner has scored only the text's beginning, as much as its own limit allows


@dataclass(frozen=True)
class Finding:
    """One check: how often an honest party would look like this at most, and in words what was found."""

    name: str
    chance: float
    what: str


def examine(answers: Sequence[Answer], own: Mapping[str, Sequence[str]], *, frequencies: bool) -> list[Finding]:
    """Return what the checks say about a party's answers; ``own`` are the learner's texts by prompt.

    ``frequencies``: whether texts are drawn with the probabilities that are scored; a cut distribution is not.
    """
    groups: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.prompt].append(answer)
    findings = [_alien(answers)]
    if all(answer.claimed is not None for answer in answers):
        findings.append(_mass(groups))
        findings.append(_ratio(groups))
        if frequencies:
            findings += [_repeats(groups), _picks(groups)]
    if frequencies:
        findings.append(_copies(groups, own))
    return findings


def _mass(groups: Mapping[str, Sequence[Answer]]) -> Finding:
    largest = max(
        (sum({a.text: float(np.exp(_claim(a))) for a in group}.values()) for group in groups.values()), default=0.0
    )
    impossible = largest > 1 + _MASS_SLACK
    return Finding(
        "mass", 0.0 if impossible else 1.0, f"the claimed probabilities of one prompt's answers sum to {largest:.2f}"
    )


def _ratio(groups: Mapping[str, Sequence[Answer]]) -> Finding:
    excess = []
    for group in groups.values():
        ratios = [min(np.exp(min(a.scored - _claim(a), 10.0)), _RATIO_CAP) for a in group if not a.is_part]
        if not ratios:
            continue
        excess.append(float(np.mean(ratios)) - 1 - RATIO_MARGIN)
    mean = np.mean(excess) + 1 + RATIO_MARGIN if excess else 0.0
    return Finding(
        "ratio", _chance(excess), f"claimed log-probs are too low: the mean ratio to the learner's is {mean:.2f}"
    )


def _repeats(groups: Mapping[str, Sequence[Answer]]) -> Finding:
    excess, rates = [], []
    for group in groups.values():
        size = len(group)
        if size < 2:
            continue
        counts = Counter(a.text for a in group)
        equal = sum(n * (n - 1) for n in counts.values()) / (size * (size - 1))
        rates.append(equal)
        excess.append(equal - float(np.mean([np.exp(_claim(a)) for a in group])) - MARGIN)
    claimed = float(np.mean(rates)) - float(np.mean(excess)) - MARGIN if rates else 0.0
    return Finding(
        "repeats",
        _chance(excess),
        f"two answers to a prompt are equal in {np.mean(rates) if rates else 0:.0%} of pairs, claimed {claimed:.0%}",
    )


def _picks(groups: Mapping[str, Sequence[Answer]]) -> Finding:
    counts: list[int] = []
    numbers: list[FloatArray] = []  # of each right text: how likely it occurs once, twice, … given that it occurs
    for group in groups.values():
        likely = {a.text: min(_SLACK[0] * float(np.exp(_claim(a))) + _SLACK[1], 1.0) for a in group}
        for text, count in Counter(a.text for a in group if a.is_right).items():
            chances = stats.binom.pmf(np.arange(1, len(group) + 1), len(group), likely[text])
            counts.append(count)
            numbers.append(chances / chances.sum())
    usual = sum(float(chances @ np.arange(1, len(chances) + 1)) for chances in numbers)
    return Finding(
        "picks",
        _chernoff(sum(counts), numbers),
        f"{sum(counts)} answers are right, {usual:.0f} would be by the claimed probabilities",
    )


def _chernoff(total: int, numbers: Sequence[FloatArray]) -> float:
    """Return a bound on the chance that independent numbers of 1, 2, … sum to ``total`` or more."""
    if not numbers:
        return 1.0
    longest = max(map(len, numbers))
    chances = np.array([np.pad(one, (0, longest - len(one))) for one in numbers])
    tilts = np.linspace(0.05, 4.0, 40)
    grown = np.log(chances @ np.exp(np.outer(np.arange(1, longest + 1), tilts))).sum(axis=0)
    return float(np.exp(min(0.0, float((grown - tilts * total).min()))))


def _copies(groups: Mapping[str, Sequence[Answer]], own: Mapping[str, Sequence[str]]) -> Finding:
    excess, shares = [], []
    for prompt, group in groups.items():
        ours = Counter(own.get(prompt, ()))
        draws = sum(ours.values())
        if not draws:
            continue
        theirs = Counter(a.text for a in group)
        likely = {a.text: float(np.exp(min(a.scored, 0.0))) for a in group}
        shared = sum(min(n, ours[text]) for text, n in theirs.items())
        expected = sum(_expected_least(draws, likely[text], n) for text, n in theirs.items())
        shares.append(shared / len(group))
        excess.append((shared - expected) / len(group) - MARGIN)
    usual = float(np.mean(shares)) - float(np.mean(excess)) - MARGIN if shares else 0.0
    return Finding(
        "copies",
        _chance(excess),
        f"{np.mean(shares) if shares else 0:.0%} of the answers are also the learner's, {usual:.0%} would be by chance",
    )


def _alien(answers: Sequence[Answer]) -> Finding:
    strange = [
        a.scored / max(a.tokens, 1) < ALIEN_LOGPROB
        and (a.claimed is None or a.claimed / max(a.tokens, 1) < ALIEN_CLAIM)
        for a in answers
    ]
    share = float(np.mean(strange)) if strange else 0.0
    return Finding(
        "alien",
        0.0 if share > ALIEN_SHARE else 1.0,
        f"{share:.0%} of the texts are as good as impossible for the learner (mean log-prob below {ALIEN_LOGPROB:g})",
    )


def _expected_least(draws: int, probability: float, most: int) -> float:
    """E[min(Binomial(draws, probability), most)]."""
    return float(stats.binom.sf(np.arange(most), draws, probability).sum())


def _chance(excess: Sequence[float]) -> float:
    """How likely a mean excess this large is at most, where none is expected: one-sided t-test over prompts."""
    if len(excess) < _FEWEST:
        return 1.0
    mean, deviation = float(np.mean(excess)), float(np.std(excess, ddof=1))
    if mean <= 0:
        return 1.0
    # Prompts that agree by accident in a small round must not look certain.
    floor = 0.02
    return float(stats.t.sf(mean / (max(deviation, floor) / np.sqrt(len(excess))), len(excess) - 1))


def _claim(answer: Answer) -> float:
    assert answer.claimed is not None
    return answer.claimed

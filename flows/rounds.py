"""One iteration of a campaign whose agents belong to several parties, on one page.

It has the stages of any iteration and one more, ``share``: what a learner reads of another party's agent is never that
agent's rollouts and scores but the table of answers and the table of claims that were made of them. The same stages
with the same keys make up the campaign whether one process runs all of them or each party runs those of its own agents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flows.stage_calls import StageCalls
from hacrl_core.config.campaign import CampaignConfig
from stages.spec import Handle, StageCall

Handles = dict[str, Handle]


class Runner(Protocol):
    """Takes a campaign's stage calls: runs them, looks them up, or only counts them."""

    def submit(self, call: StageCall) -> Handle:
        """Accept a call and return a handle at once."""

    def iteration_done(self, iteration: int) -> None:
        """Every agent has its version of this iteration."""


@dataclass(frozen=True)
class Asked:
    """The prompts of a round and what the agents answer; agent → handle."""

    prompts: Handle
    rollouts: Handles
    answers: Handles


@dataclass(frozen=True)
class Offered:
    """What a round offers its learners, before they decide whom to trust; agent → handle."""

    asked: Asked
    verdicts: Handles
    scores: Handles
    claims: Handles


@dataclass(frozen=True)
class State:
    """All that one iteration passes to the next."""

    versions: Handles  # agent → its newest version
    credit: Handles  # agent → its credit of the last iteration, with the capability history
    asked: Asked | None = None  # what was asked ahead of the next round, where parties allow staleness
    # Learner → credit and scores of the iterations it replays, by name of the update's input, the newest first.
    past: Mapping[str, Sequence[Mapping[str, Handle]]] = field(default_factory=dict)


class Membership(Protocol):
    """Says whose answers count in a round."""

    def answered(self, iteration: int, asked: Asked) -> Sequence[str]:
        """Return the agents whose answers are in the round; may wait for them."""

    def trusted(self, iteration: int, learner: str, heard: Sequence[str], offered: Offered) -> Sequence[str]:
        """Return those of the samplers a learner has heard that it learns from; may wait until that can be said."""


class Everybody:
    """Everyone is there and trusted: one process runs all agents."""

    def answered(self, iteration: int, asked: Asked) -> Sequence[str]:
        """Return all agents."""
        return list(asked.answers)

    def trusted(self, iteration: int, learner: str, heard: Sequence[str], offered: Offered) -> Sequence[str]:
        """Return all that were heard."""
        return heard


EVERYBODY = Everybody()


def run_round(
    config: CampaignConfig,
    calls: StageCalls,
    run: Runner,
    membership: Membership,
    state: State,
    origins: Mapping[str, Handle],
    previous: Mapping[str, Handle | None],
    iteration: int,
) -> State:
    """Submit the stages of one round: ask, share, verify, score, claim, then credit and update with who is trusted."""
    agents, now, versions = config.present(iteration), iteration, state.versions
    asked = state.asked or ask(config, calls, run, versions, now)
    verdicts = _verify(calls, run, asked, [s for s in agents if config.has_weights_of(s)], origins, now)
    answered = membership.answered(now, asked)
    verdicts |= _verify(calls, run, asked, [s for s in answered if s not in verdicts], origins, now)
    heard = {a: _heard(config, a, agents, answered) for a in agents}
    scores = {
        a: run.submit(
            calls.score(a, versions, {s: _read_by(config, a, s, asked) for s in heard[a]}, asked.prompts, now)
        )
        for a in agents
    }
    claims = {s: run.submit(calls.share("claims", s, scores[s], now)) for s in agents if claims_matter(config, s)}
    offered = Offered(asked, verdicts, scores, claims)
    ahead = None
    if config.exchange.staleness and now + 1 < config.iterations:
        # The next round is answered with the versions that this one began with, while agents still learn.
        ahead = ask(config, calls, run, versions, now + 1)
    credit: Handles = {}
    following: Handles = {}
    for a in agents:
        trusted = membership.trusted(now, a, heard[a], offered)
        credit[a] = run.submit(calls.credit(a, {s: verdicts[s] for s in trusted if s in verdicts}, previous[a], now))
        told = {s: _told_to(config, a, s, offered) for s in trusted}
        known = {s: handle for s, handle in told.items() if handle is not None}
        reference = calls.reference(a, origins[a], asked.rollouts[a], asked.prompts, now)
        kl = run.submit(reference) if reference is not None else None
        following[a] = run.submit(calls.update(a, versions[a], known, credit[a], now, kl, trusted))
    return State({**versions, **following}, {**state.credit, **credit}, ahead)


def ask(
    config: CampaignConfig, calls: StageCalls, run: Runner, versions: Mapping[str, Handle], iteration: int
) -> Asked:
    """Have every agent answer a round's prompts, and make of that what other parties may see."""
    agents = config.present(iteration)
    prompts = run.submit(calls.sample({}, iteration))
    rollouts = {a: run.submit(calls.generate(a, versions[a], prompts, iteration)) for a in agents}
    answers = {a: run.submit(calls.share("answers", a, rollouts[a], iteration)) for a in agents}
    return Asked(prompts, rollouts, answers)


def _verify(
    calls: StageCalls, run: Runner, asked: Asked, samplers: Sequence[str], origins: Mapping[str, Handle], iteration: int
) -> Handles:
    """Judge answers as other parties see them: whoever has them comes to the same verdicts under the same key."""
    return {s: run.submit(calls.verify(s, asked.answers[s], asked.prompts, iteration, origins)) for s in samplers}


def claims_matter(config: CampaignConfig, sampler: str) -> bool:
    """Whether a learner of another party needs the sampler's log-probs; a method may do without any claim."""
    here = config.party_of(sampler)
    others = [config.objective(a) for a in config.agents if config.party_of(a) != here]
    return any(one.share_rollouts and one.foreign_treatment != "as_own" for one in others)


def _heard(config: CampaignConfig, learner: str, agents: Sequence[str], answered: Sequence[str]) -> list[str]:
    if not config.objective(learner).share_rollouts:
        return [learner]
    here = config.party_of(learner)
    return [s for s in agents if s in answered or config.party_of(s) == here]


def _read_by(config: CampaignConfig, learner: str, sampler: str, asked: Asked) -> Handle:
    """The sampler's responses as the learner may see them."""
    same = config.party_of(learner) == config.party_of(sampler)
    return asked.rollouts[sampler] if same else asked.answers[sampler]


def _told_to(config: CampaignConfig, learner: str, sampler: str, offered: Offered) -> Handle | None:
    """The sampler's log-probs of its own responses as the learner may see them; None where it needs none."""
    if config.party_of(learner) == config.party_of(sampler):
        return offered.scores[sampler]
    return None if config.objective(learner).foreign_treatment == "as_own" else offered.claims[sampler]

"""A campaign on one page: in each iteration every agent answers, is verified and credited, scores all responses and
learns.

``run.submit`` hands a stage call to a runner and returns a handle at once. Handles are inputs of later calls, so stages
of different agents run side by side and wait only for what they need. An agent that has learned goes on to the next
iteration while others still learn. Only the agents' versions and the capability pass from one iteration to the next,
and both are artifacts: to resume, run the same command again.
"""

from dataclasses import dataclass
from typing import Protocol

from flows.stage_calls import StageCalls
from hacrl_core.config.campaign import CampaignConfig
from stages.spec import Handle, StageCall


class Runner(Protocol):
    """Takes a campaign's stage calls: runs them, looks them up, or only counts them."""

    def submit(self, call: StageCall) -> Handle:
        """Accept a call and return a handle at once."""

    def iteration_done(self, iteration: int) -> None:
        """Every agent has its version of this iteration."""


Handles = dict[str, Handle]
# Iterations under way at a time: an agent that is ahead works on the next one while others finish this one.
UNDER_WAY = 2


@dataclass(frozen=True)
class State:
    """All that one iteration passes to the next."""

    versions: Handles  # agent → its newest version
    credit: Handles  # agent → its credit of the last iteration, with the capability history


def run_campaign(config: CampaignConfig, calls: StageCalls, run: Runner) -> State:
    """Submit all stages of a campaign, iteration by iteration; returns the agents' last versions."""
    origins = {agent: run.submit(calls.origin(agent)) for agent in config.agents}
    state = State(versions=origins, credit={})
    evaluate(config, calls, run, state, origins, iteration=0)
    under_way: dict[int, Handles] = {}
    for iteration in range(config.iterations):
        conclude(run, under_way, at_most=UNDER_WAY - 1)
        state = run_iteration(config, calls, run, state, origins, iteration)
        evaluate(config, calls, run, state, origins, iteration + 1)
        under_way[iteration] = state.versions
    conclude(run, under_way, at_most=0)
    return state


def conclude(run: Runner, under_way: dict[int, Handles], at_most: int) -> None:
    """Report the iterations in which every agent has its version; wait for the oldest while too many are under way."""
    for iteration, versions in list(under_way.items()):
        if len(under_way) <= at_most and not all(handle.done() for handle in versions.values()):
            return
        for handle in versions.values():
            handle.outcome()
        del under_way[iteration]
        run.iteration_done(iteration)


def run_iteration(
    config: CampaignConfig, calls: StageCalls, run: Runner, state: State, origins: Handles, iteration: int
) -> State:
    """Submit the stages of one iteration: sample, generate, verify, score, credit, update."""
    agents, now = config.present(iteration), iteration
    prompts = run.submit(calls.sample({a: origins[a] for a in agents}, now))
    rollouts = {a: run.submit(calls.generate(a, state.versions[a], prompts, now)) for a in agents}
    verdicts = {a: run.submit(calls.verify(a, rollouts[a], prompts, now, origins)) for a in agents}
    # Whom each learner learns from.
    heard = {a: agents if config.objective(a).share_rollouts else [a] for a in agents}
    scores = {
        a: run.submit(calls.score(a, state.versions, {s: rollouts[s] for s in heard[a]}, prompts, now)) for a in agents
    }
    credit = {
        a: run.submit(calls.credit(a, {s: verdicts[s] for s in heard[a]}, previous_credit(config, state, a, now), now))
        for a in agents
    }
    references = {a: calls.reference(a, origins[a], rollouts[a], prompts, now) for a in agents}
    reference = {a: run.submit(call) for a, call in references.items() if call is not None}
    versions = {
        a: run.submit(
            calls.update(a, state.versions[a], {s: scores[s] for s in heard[a]}, credit[a], now, reference.get(a))
        )
        for a in agents
    }
    return State({**state.versions, **versions}, {**state.credit, **credit})


def previous_credit(config: CampaignConfig, state: State, learner: str, iteration: int) -> Handle | None:
    """Return the credit that holds the capability history so far.

    It is the learner's own last credit or, for one that has just joined, that of an agent that was there and learns
    from everyone.
    """
    before = config.present(iteration - 1) if iteration else []
    if learner in before:
        return state.credit[learner]
    return next((state.credit[a] for a in before if config.objective(a).share_rollouts), None)


def evaluate(
    config: CampaignConfig, calls: StageCalls, run: Runner, state: State, origins: Handles, iteration: int
) -> None:
    """Submit the benchmarks due after ``iteration`` iterations, for agents that take part; nothing waits for them."""
    for agent, settings in config.agents.items():
        last = min(settings.leaves or config.iterations, config.iterations)
        for benchmark in config.evaluate.due(iteration, last, settings.joins):
            run.submit(calls.evaluate(agent, state.versions[agent], benchmark, iteration, origins))

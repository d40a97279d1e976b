"""A campaign on one page: each iteration everybody answers, is checked, is credited, scores and learns.

``run.submit`` hands a stage call to whoever runs it and returns a handle at once; handles are inputs of later calls, so stages of
different agents run side by side and wait only for what they need. Nothing is carried from one iteration to the next but the agents'
versions and the capability, and both are artifacts: to resume, run the same command again.
"""

from dataclasses import dataclass
from typing import Protocol

from flows.stage_calls import Calls, Planned
from hacrl_core.config.campaign import CampaignConfig
from stages.runner import Outcome


class Handle(Protocol):
    def outcome(self) -> Outcome:
        """Wait for the stage; raises what it raised."""


class Runner(Protocol):
    def submit(self, planned: Planned) -> Handle: ...

    def iteration_done(self, iteration: int) -> None: ...


Handles = dict[str, Handle]


@dataclass(frozen=True)
class State:
    """All that one iteration hands to the next."""

    versions: Handles  # agent → its newest version
    credit: Handles  # agent → its credit of the last iteration, with the capability history


def run_campaign(config: CampaignConfig, calls: Calls, run: Runner) -> State:
    origins = {agent: run.submit(calls.origin(agent)) for agent in config.agents}
    state = State(versions=origins, credit={})
    evaluate(config, calls, run, state, iteration=0)
    for iteration in range(config.iterations):
        state = run_iteration(config, calls, run, state, origins, iteration)
        evaluate(config, calls, run, state, iteration + 1)
        for handle in state.versions.values():
            handle.outcome()
        run.iteration_done(iteration)
    return state


def run_iteration(
    config: CampaignConfig, calls: Calls, run: Runner, state: State, origins: Handles, iteration: int
) -> State:
    agents, now = config.present(iteration), iteration
    prompts = run.submit(calls.sample({a: origins[a] for a in agents}, now))
    rollouts = {a: run.submit(calls.generate(a, state.versions[a], prompts, now)) for a in agents}
    verdicts = {a: run.submit(calls.verify(a, rollouts[a], prompts, now)) for a in agents}
    heard = {a: agents if config.objective(a).share_rollouts else [a] for a in agents}  # whom each learner learns from
    scores = {
        a: run.submit(calls.score(a, state.versions[a], {s: rollouts[s] for s in heard[a]}, prompts, now))
        for a in agents
    }
    credit = {
        a: run.submit(calls.credit(a, {s: verdicts[s] for s in heard[a]}, previous_credit(config, state, a, now), now))
        for a in agents
    }
    watched = {a: calls.reference(a, origins[a], rollouts[a], prompts, now) for a in agents}
    first = {a: run.submit(planned) for a, planned in watched.items() if planned is not None}
    versions = {
        a: run.submit(
            calls.update(a, state.versions[a], {s: scores[s] for s in heard[a]}, credit[a], now, first.get(a))
        )
        for a in agents
    }
    return State({**state.versions, **versions}, {**state.credit, **credit})


def previous_credit(config: CampaignConfig, state: State, learner: str, iteration: int) -> Handle | None:
    """Where the capability history is: the learner's own last credit or, for one that has just joined, that of somebody who
    was there and heard everyone."""
    before = config.present(iteration - 1) if iteration else []
    if learner in before:
        return state.credit[learner]
    return next((state.credit[a] for a in before if config.objective(a).share_rollouts), None)


def evaluate(config: CampaignConfig, calls: Calls, run: Runner, state: State, iteration: int) -> None:
    """Benchmarks that are due after ``iteration`` iterations, for agents that take part; nothing waits for them."""
    for agent, settings in config.agents.items():
        last = min(settings.leaves or config.iterations, config.iterations)
        for benchmark in config.evaluate.due(iteration, last, settings.joins):
            run.submit(calls.evaluate(agent, state.versions[agent], benchmark, iteration))

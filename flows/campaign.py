"""A campaign on one page: in each iteration every agent answers, is verified and credited, scores all responses and
learns.

``run.submit`` hands a stage call to a runner and returns a handle at once. Handles are inputs of later calls, so stages
of different agents run side by side and wait only for what they need. An agent that has learned goes on to the next
iteration while others still learn. Only the agents' versions and the capability pass from one iteration to the next,
and credit and scores where their successes are replayed. All of them are artifacts: to resume, run the same command
again.
"""

from collections.abc import Mapping, Sequence

from flows.rounds import EVERYBODY, Handles, Membership, Runner, State, run_round
from flows.stage_calls import StageCalls
from hacrl_core.config.campaign import CampaignConfig
from stages.spec import Handle

# Iterations under way at a time: an agent that is ahead works on the next one while others finish this one.
UNDER_WAY = 2


def run_campaign(config: CampaignConfig, calls: StageCalls, run: Runner, membership: Membership = EVERYBODY) -> State:
    """Submit all stages of a campaign, iteration by iteration; returns the agents' last versions.

    ``membership`` says whose answers count where the agents belong to several parties.
    """
    origins = {agent: run.submit(calls.origin(agent)) for agent in config.agents}
    state = State(versions=origins, credit={})
    evaluate(config, calls, run, state, origins, iteration=0)
    under_way: dict[int, Handles] = {}
    for iteration in range(config.iterations):
        conclude(run, under_way, at_most=UNDER_WAY - 1)
        if config.parties:
            previous = {a: previous_credit(config, state, a, iteration) for a in config.present(iteration)}
            state = run_round(config, calls, run, membership, state, origins, previous, iteration)
        else:
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
    rollouts, verdicts = answer(config, calls, run, state.versions, prompts, origins, now)
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
            calls.update(
                a,
                state.versions[a],
                {s: scores[s] for s in heard[a]},
                credit[a],
                now,
                reference.get(a),
                past=state.past.get(a, ()),
            )
        )
        for a in agents
    }
    past = {a: remember(config, state, a, credit[a], {s: scores[s] for s in heard[a]}) for a in agents}
    return State({**state.versions, **versions}, {**state.credit, **credit}, past=past)


def answer(
    config: CampaignConfig,
    calls: StageCalls,
    run: Runner,
    versions: Handles,
    prompts: Handle,
    origins: Handles,
    iteration: int,
) -> tuple[Handles, Handles]:
    """Have every agent answer and be verified; and, up to ``resample`` times, again where its answers have one reward.

    Return the rollouts and verdicts that count.
    """
    agents = config.present(iteration)
    before: dict[str, Handles] = {}
    rollouts: Handles = {}
    verdicts: Handles = {}
    for number in range(len(config.attempts)):
        rollouts = {
            a: run.submit(calls.generate(a, versions[a], prompts, iteration, number, before.get(a))) for a in agents
        }
        verdicts = {
            a: run.submit(calls.verify(a, rollouts[a], prompts, iteration, origins, number, before.get(a)))
            for a in agents
        }
        before = {a: {"rollouts": rollouts[a], "verdicts": verdicts[a]} for a in agents}
    return rollouts, verdicts


def remember(
    config: CampaignConfig, state: State, learner: str, credit: Handle, scores: Mapping[str, Handle]
) -> Sequence[Mapping[str, Handle]]:
    """Return the iterations that the learner replays in its next one, the newest first."""
    now = {"credit": credit, **{f"scores/{sampler}": handle for sampler, handle in scores.items()}}
    return (now, *state.past.get(learner, ()))[: config.objective(learner).replay_iterations]


def previous_credit(config: CampaignConfig, state: State, learner: str, iteration: int) -> Handle | None:
    """Return the credit that holds the capability history so far.

    It is the learner's own last credit or, for one that has just joined, that of an agent that was there and learns
    from everyone. A party has the credit of its own agents only.
    """
    before = config.present(iteration - 1) if iteration else []
    if learner in before:
        return state.credit[learner]
    before = [a for a in before if config.party_of(a) == config.party_of(learner)]
    return next((state.credit[a] for a in before if config.objective(a).share_rollouts), None)


def evaluate(
    config: CampaignConfig, calls: StageCalls, run: Runner, state: State, origins: Handles, iteration: int
) -> None:
    """Submit the benchmarks due after ``iteration`` iterations, for agents that take part; nothing waits for them."""
    for agent, settings in config.agents.items():
        last = min(settings.leaves or config.iterations, config.iterations)
        for benchmark in config.evaluate.due(iteration, last, settings.joins):
            run.submit(calls.evaluate(agent, state.versions[agent], benchmark, iteration, origins))

"""Rules over metrics: distance travelled, mismatch, windows, groups without a signal, drift."""

import statistics
from collections.abc import Iterator

from flows.diagnose.evidence import Evidence
from flows.diagnose.finding import Finding, Weight

# Where the ratio is clamped: e^10.
_CLAMP = 2e4


def _series(values: list[float], shown: int = 6) -> str:
    """Return values as a line of evidence, the middle left out where there are many."""
    if len(values) > shown:
        half = shown // 2
        return f"{_list(values[:half])} … {_list(values[-half:])}"
    return _list(values)


def _list(values: list[float]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _evidence(evidence: Evidence, agent: str, *names: str) -> list[str]:
    return [f"{name} of {agent}: {_series(found)}" for name in names if (found := evidence.values(agent, name))]


def skipped(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """Updates that were skipped because numbers were not finite, or because the verifier failed."""
    for name, cause, remedy in (
        ("not_finite", "loss, gradient or weights were not finite", "lower update.learning_rate by a factor of ten"),
        ("verifier_failed", "too many verdicts were errors", "run hacrl task check TASK, and mend the verifier"),
    ):
        count = sum(evidence.values(agent, f"update/{name}"))
        if count:
            lines = _evidence(evidence, agent, f"update/{name}", "update/gradient_norm_max")
            text = f"{count:.0f} of {evidence.done} updates were skipped"
            yield Finding(f"skipped_{name}", agent, Weight.BROKEN, 0.5, text, cause, remedy, lines)


def rate_too_high(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """The agent has gone far from its start, or is far from itself within one iteration, and answers worse."""
    rewards = evidence.values(agent, "verify/reward_mean")
    distance = evidence.recent(agent, "update/kl_to_start") or 0.0
    within = max([abs(v) for v in evidence.values(agent, "update/own_ratio_max")], default=1.0)
    best, now = max(rewards, default=0.0), evidence.recent(agent, "verify/reward_mean", 2) or 0.0
    worse = best > 0 and now < 0.6 * best
    if (distance > 0.3 and worse) or within > 3.0:
        rate = evidence.config.training(agent).learning_rate
        yield Finding(
            "learning_rate_too_high",
            agent,
            # Nothing that such an agent writes means anything any more.
            Weight.BROKEN if distance > 1.0 else Weight.TRAINING,
            min(1.0, max(distance, within / 10)),
            f"after {evidence.done} iterations the agent is {distance:.2g} nats per token from its start, its ratio "
            f"within one iteration reached {within:.2g}, and its reward fell from {best:.2f} to {now:.2f}",
            f"update.learning_rate {rate:g} moves it too far in each step",
            f"set update.learning_rate: {rate / 10:g}",
            _evidence(evidence, agent, "verify/reward_mean", "update/kl_to_start", "update/own_ratio_max"),
        )


def rate_too_low(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """The agent has not moved, though its responses carried a signal."""
    distances = evidence.values(agent, "update/kl_to_start")
    signal = 1.0 - (evidence.recent(agent, "credit/no_signal_share", 100) or 0.0)
    gradient = evidence.recent(agent, "update/gradient_norm_mean") or 0.0
    if len(distances) < 3 or signal < 0.1 or gradient <= 0:
        return
    # What was measured before the agent's third update says nothing yet.
    distance = max(abs(value) for value in distances[2:])
    if distance < 1e-6:
        rate = evidence.config.training(agent).learning_rate
        yield Finding(
            "learning_rate_too_low",
            agent,
            Weight.TRAINING,
            0.8,
            f"after {evidence.done} iterations the agent is {distance:.1g} nats per token from its start",
            f"update.learning_rate {rate:g} hardly moves it: gradients are there ({gradient:.2g}), and "
            f"{signal:.0%} of the prompts carry a signal",
            f"set update.learning_rate: {rate * 10:g}",
            _evidence(evidence, agent, "update/kl_to_start", "update/gradient_norm_mean", "verify/reward_mean"),
        )


def mismatch(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """Sampling, scoring and training disagree on the same response."""
    exact = evidence.config.training(agent).autocast == "none"
    for name, limit, between in (
        ("score/sampling_mismatch_mean", 0.02, "sampling and scoring"),
        ("update/score_mismatch_max", 1e-3 if exact else 0.1, "scoring and training"),
    ):
        value = evidence.recent(agent, name)
        if value is not None and value > limit:
            engine = evidence.config.generation(agent).engine.kind
            remedy = (
                "compare engine.dtype, temperature and chat_template of sampling and scoring; set "
                "generate.engine.dtype: float32"
                if between.startswith("sampling")
                else "set score.autocast and update.autocast to the same value, and run hacrl doctor --smoke"
            )
            yield Finding(
                "score_mismatch",
                agent,
                Weight.TRAINING,
                min(1.0, value / limit / 10),
                f"{between} differ by {value:.2g} nats per token on the agent's own responses",
                f"they are not one policy ({engine} samples), so ratios are wrong from the first update on",
                remedy,
                _evidence(evidence, agent, name),
            )
            return


def clipped(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """Most own responses are clipped: later updates of an iteration teach nothing."""
    share = evidence.recent(agent, "update/own_clip_fraction")
    if share is not None and share > 0.8:
        yield Finding(
            "own_clipped",
            agent,
            Weight.TRAINING,
            share / 2,
            f"{share:.0%} of the own responses are clipped over the updates of an iteration",
            "the policy has moved out of the clip range before most updates: too many updates per iteration, or a "
            "learning rate that is too high",
            f"raise update.minibatch_prompts to {2 * evidence.config.minibatch_size(agent)}, or lower "
            "update.learning_rate",
            _evidence(evidence, agent, "update/own_clip_fraction", "update/own_ratio_max", "update/updates"),
        )


def sharing(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """Foreign responses that do not count: outside the window, cut off, impossible to spell, or a few that dominate."""
    inside = evidence.recent(agent, "update/foreign_inside_fraction")
    if inside is None:
        return
    lines = _evidence(
        evidence, agent, "update/foreign_inside_fraction", "update/foreign_ratio_mean", "update/foreign_ess"
    )
    others = " and ".join(name for name in evidence.agents if name != agent)
    responses = evidence.recent(agent, "score/responses") or 1.0
    unscorable = (evidence.recent(agent, "score/unscorable") or 0.0) / responses
    cut = evidence.recent(agent, "score/truncated_share") or 0.0
    if unscorable > 0.1:
        yield Finding(
            "unscorable",
            agent,
            Weight.SHARING,
            1.0,
            f"{unscorable:.0%} of the responses cannot be read in {agent}'s tokens",
            "its tokenizer cannot spell what others write, or they are longer than its context",
            f"compare the agents in hacrl doctor --config CONFIG; lower generate.max_tokens or exchange {agent}",
            _evidence(evidence, agent, "score/unscorable", "score/responses"),
        )
    elif cut > 0.3:
        yield Finding(
            "foreign_cut_off",
            agent,
            Weight.SHARING,
            0.95,
            f"{cut:.0%} of the responses are cut off when {agent} reads them in its own tokens",
            f"its tokens are shorter than those of {others}, and generate.max_tokens counts its own",
            f"raise agents.{agent}.generate.max_tokens",
            _evidence(evidence, agent, "score/truncated_share"),
        )
    if inside < 0.05:
        yield _nothing_shared(evidence, agent, others, inside, lines)
    elif (evidence.recent(agent, "update/foreign_ratio_max") or 0.0) > _CLAMP:
        yield Finding(
            "ratio_at_clamp",
            agent,
            Weight.SHARING,
            0.8,
            "ratios of foreign responses reach the clamp e^10",
            "a score is broken, or the learner reads the responses behind a wrong chat template",
            f"compare the prompts of {agent} and {others} in hacrl doctor --config CONFIG",
            _evidence(evidence, agent, "update/foreign_ratio_max", "update/foreign_ratio_mean"),
        )
    else:
        ess = evidence.recent(agent, "update/foreign_ess_fraction")
        if ess is not None and inside > 0.2 and ess < 0.1 * inside:
            yield Finding(
                "few_dominate",
                agent,
                Weight.SHARING,
                0.6,
                f"{inside:.0%} of the foreign responses are inside the window, and they weigh like {ess:.1%} of all",
                "a few foreign responses have nearly all the weight",
                "lower algorithm.alpha, or use algorithm.preset: hacpo with its clipping",
                _evidence(evidence, agent, "update/foreign_ess_fraction", "update/foreign_weight_max"),
            )


def _nothing_shared(evidence: Evidence, agent: str, others: str, inside: float, lines: list[str]) -> Finding:
    inner = evidence.recent(agent, "score/foreign_inner_logprob") or 0.0
    edges = [
        edge
        for edge in ("first", "last")
        if (evidence.recent(agent, f"score/foreign_{edge}_logprob") or 0.0) < inner - 3.0
    ]
    what = f"{inside:.1%} of the responses of {others} are inside {agent}'s window: it learns from itself alone"
    if edges:
        return Finding(
            "boundary",
            agent,
            Weight.SHARING,
            0.9,
            what,
            f"the {' and the '.join(edges)} token of their responses is far less likely to {agent} than those between: "
            "agents begin or end their responses differently",
            "set score.boundary: settled, and compare both ends in hacrl doctor --config CONFIG",
            [
                *lines,
                *_evidence(
                    evidence,
                    agent,
                    "score/foreign_first_logprob",
                    "score/foreign_inner_logprob",
                    "score/foreign_last_logprob",
                ),
            ],
        )
    delta = evidence.config.objective(agent).cross_clip_delta
    return Finding(
        "window_too_narrow",
        agent,
        Weight.SHARING,
        0.85,
        what,
        f"the agents are far apart on this task, and the window (cross_clip_delta {delta:g}) is too narrow for them",
        f"set agents.{agent}.algorithm.cross_clip_delta: {min(0.9, 2 * delta):g}",
        lines,
    )


def direction(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """Foreign responses that pull against the agent's own."""
    both, own = (evidence.values(agent, f"update/gradient_cosine{end}") for end in ("", "_own"))
    if len(both) >= 3 and statistics.fmean(both) < -0.05 and max(both) < 0.0 and statistics.fmean(own or [0.0]) > 0.05:
        yield Finding(
            "foreign_pulls_back",
            agent,
            Weight.SHARING,
            0.7,
            f"own and foreign gradients point apart (cosine {statistics.fmean(both):.2f}), and the own one is no noise",
            "what others answer works against this agent",
            f"narrow agents.{agent}.algorithm.cross_clip_delta, or set its preset to gspo",
            _evidence(evidence, agent, "update/gradient_cosine", "update/gradient_cosine_own"),
        )


def signal(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """Groups that are all right or all wrong, and samples that are all alike."""
    silent = evidence.recent(agent, "credit/no_signal_share")
    reward = evidence.recent(agent, "verify/reward_mean")
    distinct = evidence.recent(agent, "generate/distinct_share")
    size = evidence.config.group_size
    # An agent that is sure and right has all its samples alike, too.
    if distinct is not None and size > 2 and distinct < 1.5 / size and (reward or 0.0) < 0.9:
        yield Finding(
            "samples_alike",
            agent,
            Weight.SIGNAL,
            1.0,
            f"{distinct:.0%} of the responses are distinct: all {size} answers to a prompt are the same text",
            "sampling hardly varies: the temperature is too low, top_k is 1, or the policy has collapsed",
            "set generate.temperature, score.temperature and update.temperature to 1",
            _evidence(evidence, agent, "generate/distinct_share"),
        )
    if silent is None or reward is None or silent <= (0.6 if reward > 0.9 else 0.8):
        return
    start = evidence.first(agent, "verify/reward_mean") or 0.0
    if reward > 0.8 and start > 0.7:
        cause, remedy = "the prompts are too easy", "choose harder problems (problems.levels, problems.filters)"
        rule, what = "all_right", "right"
    elif reward < 0.2:
        cause = "the prompts are too hard for this agent: no response is right, so none can be preferred"
        remedy = "begin with easier problems (problems.levels, problems.filters), or raise samples_per_prompt"
        rule, what = "all_wrong", "wrong"
    else:
        return
    lines = _evidence(evidence, agent, "credit/no_signal_share", "verify/reward_mean", "credit/capability")
    text = f"{silent:.0%} of the prompts teach nothing: all answers to them are {what}"
    yield Finding(rule, agent, Weight.SIGNAL, silent, text, cause, remedy, lines)


def weaker(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """An agent that never scored, beside others that do."""
    reward = evidence.recent(agent, "verify/reward_mean", 100)
    others = [evidence.recent(name, "verify/reward_mean", 100) or 0.0 for name in evidence.agents if name != agent]
    if reward is not None and others and reward < 0.01 and min(others) > 0.1:
        yield Finding(
            "never_scored",
            agent,
            Weight.CUT_OR_UNREAD,
            0.2,
            f"{agent} has a mean reward of {reward:.3f}, the others {min(others):.2f} and more",
            "it starts too weak for this task, so its weights stay at the clamp and its own groups are silent",
            f"warm-start {agent}, give it easier problems, or look at its answers: hacrl rollouts --agent {agent}",
            _evidence(evidence, agent, "verify/reward_mean", "credit/capability"),
        )


def drift(evidence: Evidence, agent: str) -> Iterator[Finding]:
    """Entropy, length and reward that run away."""
    if evidence.done < 3:
        return
    before, now = (
        None if (value := get(agent, "score/own_mean_logprob")) is None else -value
        for get in (evidence.first, evidence.recent)
    )
    rewards = (evidence.first(agent, "verify/reward_mean") or 0.0, evidence.recent(agent, "verify/reward_mean") or 0.0)
    if before and now is not None and now < 0.15 * before and rewards[1] < 0.9 and rewards[1] <= rewards[0] + 0.1:
        yield Finding(
            "entropy_collapse",
            agent,
            Weight.DRIFT,
            0.9,
            f"the agent's own responses have {now:.2g} nats per token, {before:.2g} at first, and no more reward",
            "the policy has become certain without being right; nothing new is tried",
            "set algorithm.kl_coefficient: 0.001, or lower update.learning_rate",
            _evidence(evidence, agent, "score/own_mean_logprob", "generate/distinct_share", "verify/reward_mean"),
        )
    elif before and now is not None and now > 3 * before + 0.3 and rewards[1] < rewards[0]:
        yield Finding(
            "entropy_grows",
            agent,
            Weight.DRIFT,
            0.9,
            f"the agent's own responses have {now:.2g} nats per token, {before:.2g} at first, and less reward",
            "the policy dissolves: updates push wrong answers down and nothing up",
            "lower update.learning_rate, or set algorithm.kl_coefficient: 0.001",
            _evidence(evidence, agent, "score/own_mean_logprob", "verify/reward_mean"),
        )
    lengths = (
        evidence.first(agent, "generate/response_length_mean"),
        evidence.recent(agent, "generate/response_length_mean"),
    )
    if lengths[0] and lengths[1] and rewards[1] < rewards[0] + 0.05 and not 0.4 < lengths[1] / lengths[0] < 2.5:
        longer = lengths[1] > lengths[0]
        yield Finding(
            "length_grows" if longer else "length_shrinks",
            agent,
            Weight.DRIFT,
            0.8,
            f"responses went from {lengths[0]:.0f} to {lengths[1]:.0f} tokens, and the reward did not rise",
            "length is rewarded, or nothing holds it"
            if longer
            else "short answers are rewarded, or nothing else works",
            "compare hacrl rollouts -i 0 with the last ones; weigh length as a reward of its own under verify.rewards",
            _evidence(evidence, agent, "generate/response_length_mean", "verify/reward_mean"),
        )
    series = evidence.values(agent, "verify/reward_mean")
    if len(series) >= 6 and max(series) > 0.1 and rewards[1] < 0.4 * max(series):
        yield Finding(
            "reward_fell",
            agent,
            Weight.DRIFT,
            0.5,
            f"the mean reward fell from {max(series):.2f} to {rewards[1]:.2f}",
            "training went wrong after its best iteration",
            f"go on from the best version with a lower rate: hacrl export {evidence.config.name}/{agent}@best DIR",
            _evidence(evidence, agent, "verify/reward_mean", "update/kl_to_start"),
        )


RULES = (
    skipped,
    rate_too_high,
    rate_too_low,
    mismatch,
    clipped,
    sharing,
    direction,
    signal,
    weaker,
    drift,
)

"""``verify_batch``: the one call through which everything is verified."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ConfigError, VerificationError
from hacrl_core.verification.maths import MathsVerifier, response_is_boxed
from hacrl_core.verification.pool import Group, Limits, close_pool, shared_pool
from hacrl_core.verification.strict import StrictVerifier
from hacrl_core.verification.verdict import Judgement, Verdict, VerdictKind, Verifier, base_reward, shaped_reward
from hacrl_core.verification.verifiers import UserVerifier, find_verifier

_MAX_GROUP = 32
_MATHS = (StrictVerifier, MathsVerifier)
# How many times timeout_seconds an answer may use in its second try, alone.
_ALONE = 2


@dataclass(slots=True)
class _Outcome:
    kind: VerdictKind
    answer: str
    milliseconds: float
    reward: float | None = None


def verify_batch(
    responses: Sequence[str],
    golds: Sequence[str],
    config: VerifyConfig | None = None,
    *,
    token_counts: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Verdict]:
    """Return one verdict per response, in order. Equal (response, gold) and (answer, gold) pairs are verified once.

    ``on_progress(done, total)`` counts responses. ``token_counts`` is needed by the overlong penalty only.
    ``truncated`` tells which responses were cut off by their length limit; ``config.truncated`` says what follows.
    """
    config = config or VerifyConfig()
    if len(responses) != len(golds):
        raise ConfigError(
            f"verify_batch: {len(responses)} responses but {len(golds)} golds; pass one gold per response"
        )
    if config.overlong and token_counts is None:
        raise ConfigError(
            "verify_batch: 'overlong' is set but token_counts is missing; pass the length of each response"
        )
    verifier = find_verifier(config.verifier)
    judged = responses if isinstance(verifier, UserVerifier) else _without_guesses(responses, truncated, config)
    pairs: dict[tuple[str, str], int] = {}
    rows = [pairs.setdefault(pair, len(pairs)) for pair in zip(judged, golds, strict=True)]
    weights = [0] * len(pairs)
    for row in rows:
        weights[row] += 1
    outcomes = _outcomes(list(pairs), weights, verifier, config, on_progress)
    return [
        _verdict(outcomes[row], response, verifier.name, config, None if token_counts is None else token_counts[index])
        for index, (row, response) in enumerate(zip(rows, responses, strict=True))
    ]


def _without_guesses(responses: Sequence[str], truncated: Sequence[bool] | None, config: VerifyConfig) -> Sequence[str]:
    """Return the responses as they are judged: one that was cut off before its answer was complete is empty."""
    if config.truncated == "judge":
        return responses
    if truncated is None:
        raise ConfigError(
            "verify_batch: 'truncated' is complete_only but nothing tells which responses were cut off; pass truncated"
        )
    rows = zip(responses, truncated, strict=True)
    return ["" if cut and not response_is_boxed(response) else response for response, cut in rows]


def check_verifier(config: VerifyConfig) -> None:
    """Raise ConfigError unless the user's own function can be loaded, in a worker; it is not called."""
    verifier = find_verifier(config.verifier)
    if not isinstance(verifier, UserVerifier):
        return
    failures: list[dict[str, Any]] = []
    group = Group([0], [], config.verifier, {})
    try:
        with shared_pool() as pool:
            pool.run([group], _limits(config), "", lambda key, result: failures.append(result))
    finally:
        close_pool()
    if failures:
        raise ConfigError(
            f"verifier {config.verifier!r} cannot be loaded: importing it crashes, or takes more than timeout_seconds "
            f"{config.timeout_seconds}; import less at the top of the module, or raise verify.timeout_seconds"
        )


def check_error_share(verdicts: Sequence[Verdict], config: VerifyConfig) -> None:
    """Raise when the verifier itself failed too often; a single error is always allowed."""
    errors = sum(verdict.verdict is VerdictKind.ERROR for verdict in verdicts)
    if errors > 1 and errors > config.max_error_share * len(verdicts):
        raise VerificationError(
            f"verifier {config.verifier!r}: {errors} of {len(verdicts)} answers ended in an error, more than "
            f"max_error_share {config.max_error_share}; look at the verdicts, or raise memory_mb or max_error_share"
        )


def _outcomes(
    pairs: list[tuple[str, str]],
    weights: list[int],
    verifier: Verifier,
    config: VerifyConfig,
    on_progress: Callable[[int, int], None] | None,
) -> list[_Outcome]:
    outcomes: list[_Outcome | None] = [None] * len(pairs)
    done, total = 0, sum(weights)
    waiting: dict[tuple[str, str], list[int]] = {}
    for index, (response, gold) in enumerate(pairs):
        started = time.perf_counter()
        judgement = verifier.judge(response, gold, config) if gold.strip() else Judgement(VerdictKind.ERROR, "")
        if judgement.kind is None:
            waiting.setdefault((gold, judgement.answer), []).append(index)
            continue
        outcomes[index] = _Outcome(judgement.kind, judgement.answer, (time.perf_counter() - started) * 1000)
        done += weights[index]
    if on_progress and done:
        on_progress(done, total)
    keys = list(waiting)

    def take(key: int, result: dict[str, Any]) -> None:
        nonlocal done
        for index in waiting[keys[key]]:
            outcomes[index] = _from_worker(result, keys[key][1], verifier)
            done += weights[index]
        if on_progress:
            on_progress(done, total)

    if keys:
        _run_workers(keys, verifier, config, take)
    return [outcome for outcome in outcomes if outcome is not None]


def _run_workers(
    keys: list[tuple[str, str]], verifier: Verifier, config: VerifyConfig, take: Callable[[int, dict[str, Any]], None]
) -> None:
    """Have workers compare every pair; one that runs out of time beside others gets twice the time, alone.

    The load of a machine must not decide between a verdict and a timeout. A user's function has no second try.
    """
    late: list[int] = []

    def take_in_time(key: int, result: dict[str, Any]) -> None:
        if result["verdict"] == "timeout" and not isinstance(verifier, UserVerifier):
            late.append(key)
        else:
            take(key, result)

    groups = _groups(keys, verifier, config)
    with shared_pool() as pool:
        pool.run(groups, _limits(config), _preload(verifier), take_in_time)
        again = [_alone(group, key) for group in groups for key in group.keys if key in late]
        if again:
            pool.run(again, _limits(config, alone=True), _preload(verifier), take)


def _groups(keys: list[tuple[str, str]], verifier: Verifier, config: VerifyConfig) -> list[Group]:
    """Group by gold, so that each is parsed once; short answers first, so that a costly one delays few others."""
    assert verifier.task is not None
    by_gold: dict[str, list[tuple[int, tuple[str, str]]]] = {}
    for key, (gold, answer) in enumerate(keys):
        prepared = verifier.payload(gold, answer) if isinstance(verifier, _MATHS) else (gold, answer)
        by_gold.setdefault(prepared[0], []).append((key, prepared))
    groups = []
    for members in by_gold.values():
        members.sort(key=lambda member: len(member[1][1]))
        for start in range(0, len(members), _MAX_GROUP):
            part = members[start : start + _MAX_GROUP]
            options = {"tolerance": config.tolerance}
            groups.append(Group([key for key, _ in part], [pair for _, pair in part], verifier.task, options))
    groups.sort(key=lambda group: len(group.pairs[-1][1]))
    return groups


def _alone(group: Group, key: int) -> Group:
    return Group([key], [group.pairs[group.keys.index(key)]], group.task, group.options)


def _limits(config: VerifyConfig, *, alone: bool = False) -> Limits:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = _ALONE if alone else 1
    return Limits(
        cpu_seconds=config.timeout_seconds * times,
        wall_seconds=(config.wall_timeout_seconds or 10 * config.timeout_seconds) * times,
        memory_mb=config.memory_mb,
        workers=1 if alone else config.workers or min(8, cores),
        environment=config.environment,
        sandbox=config.sandbox,
        read=config.sandbox_read,
        network=config.sandbox_network,
    )


def _preload(verifier: Verifier) -> str:
    return "hacrl_core.verification.symbolic" if isinstance(verifier, _MATHS) else ""


def _from_worker(result: dict[str, Any], answer: str, verifier: Verifier) -> _Outcome:
    if isinstance(verifier, UserVerifier):
        answer = str(result.get("answer", ""))
    return _Outcome(
        VerdictKind(result["verdict"]), answer, float(result.get("milliseconds", 0.0)), result.get("reward")
    )


def _verdict(outcome: _Outcome, response: str, name: str, config: VerifyConfig, tokens: int | None) -> Verdict:
    reward = outcome.reward
    if reward is None:
        well_formed = config.format_reward > 0 and response_is_boxed(response)
        reward = base_reward(outcome.kind, well_formed=well_formed, format_reward=config.format_reward)
    if outcome.kind is not VerdictKind.ERROR:
        reward = shaped_reward(reward, tokens, config.overlong)
    return Verdict(reward, outcome.kind, outcome.answer, outcome.milliseconds, name)

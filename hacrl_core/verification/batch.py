"""``verify_batch``: the one call through which everything is verified."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hacrl_core.config.verification import JUDGE, TASK, VerifyConfig
from hacrl_core.contracts.manifest import canonical_json
from hacrl_core.errors import ConfigError, VerificationError
from hacrl_core.place import module
from hacrl_core.problems.problem import Problem
from hacrl_core.tasks.digest import function_takes_batches
from hacrl_core.tasks.forms import BATCHED
from hacrl_core.tasks.loading import LIBRARIES
from hacrl_core.verification.judge import Judging, judge_responses
from hacrl_core.verification.maths import MathsVerifier, response_is_boxed
from hacrl_core.verification.pool import Group, Limits, close_pool, shared_pool
from hacrl_core.verification.results import checked_result, checked_rows, further_fields
from hacrl_core.verification.rewards import combine
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
    # What a user's own function said besides.
    further: dict[str, Any] = field(default_factory=dict)


def verify_batch(
    responses: Sequence[str],
    golds: Sequence[str],
    config: VerifyConfig | None = None,
    *,
    problems: Sequence[Problem] | None = None,
    judging: Judging | None = None,
    token_counts: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Verdict]:
    """Return one verdict per response, in order. Equal (response, gold) and (answer, gold) pairs are verified once.

    ``problems``, one per response, are what a task's verifier and reward functions read; without them they get the gold
    alone. ``judging`` says where a judge's answers are kept.
    ``on_progress(done, total)`` counts responses. ``token_counts`` is needed by the overlong penalty only.
    ``truncated`` tells which responses were cut off by their length limit; ``config.complete_only`` says what follows.
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
    if config.rewards:
        return _several(responses, golds, config, problems, judging, token_counts, truncated, on_progress)
    if config.judge is not None:
        asked = problems or [Problem("", (), gold, "") for gold in golds]
        found = judge_responses(responses, asked, config.judge, judging or Judging())
        return _shaped(found, token_counts, config)
    verifier = find_verifier(config.verifier)
    judged = responses
    if isinstance(verifier, UserVerifier):
        golds = _rows(golds, problems)
    else:
        judged = _without_guesses(responses, truncated, config)
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


def _several(
    responses: Sequence[str],
    golds: Sequence[str],
    config: VerifyConfig,
    problems: Sequence[Problem] | None,
    judging: Judging | None,
    token_counts: Sequence[int] | None,
    truncated: Sequence[bool] | None,
    on_progress: Callable[[int, int], None] | None,
) -> list[Verdict]:
    """Verify with each of several rewards and add them up; the overlong penalty comes off the sum."""
    found = {}
    for name, reward in config.rewards.items():
        own = {"verifier": reward.verifier, "form": reward.form, "reward_range": reward.range, "judge": reward.judge}
        alone = config.model_copy(update={**own, "rewards": {}, "overlong": None})
        found[name] = verify_batch(responses, golds, alone, problems=problems, judging=judging, truncated=truncated)
    if on_progress:
        on_progress(len(responses), len(responses))
    return _shaped(combine(found, config.rewards), token_counts, config)


def _shaped(verdicts: list[Verdict], token_counts: Sequence[int] | None, config: VerifyConfig) -> list[Verdict]:
    """Take the overlong penalty off."""
    if token_counts is None or config.overlong is None:
        return verdicts
    return [
        replace(verdict, reward=shaped_reward(verdict.reward, tokens, config.overlong))
        for verdict, tokens in zip(verdicts, token_counts, strict=True)
    ]


def _rows(golds: Sequence[str], problems: Sequence[Problem] | None) -> list[str]:
    """Return what a user's function reads of each problem, as JSON."""
    if problems is None:
        empty = {"id": "", "messages": [], "source": "", "tags": {}, "columns": {}}
        return [canonical_json({**empty, "answer": gold}) for gold in golds]
    return [
        canonical_json(
            {
                "id": p.problem_id,
                "messages": list(p.messages),
                "answer": p.answer,
                "source": p.source,
                "tags": dict(p.tags),
                "columns": dict(p.columns),
            }
        )
        for p in problems
    ]


def _without_guesses(responses: Sequence[str], truncated: Sequence[bool] | None, config: VerifyConfig) -> Sequence[str]:
    """Return the responses as they are judged: one that was cut off before its answer was complete is empty."""
    if not config.complete_only or (truncated is None and config.truncated == "auto"):
        return responses
    if truncated is None:
        raise ConfigError(
            "verify_batch: 'truncated' is complete_only but nothing tells which responses were cut off; pass truncated"
        )
    rows = zip(responses, truncated, strict=True)
    return ["" if cut and not response_is_boxed(response) else response for response, cut in rows]


def check_verifier(config: VerifyConfig) -> None:
    """Raise ConfigError unless the user's own functions can be loaded, in a worker; they are not called."""
    for name in [reward.verifier for reward in config.rewards.values()] or [config.verifier]:
        verifier = find_verifier(name)
        if name not in (TASK, JUDGE) and isinstance(verifier, UserVerifier):
            _check_loading(verifier, config)


def _check_loading(verifier: UserVerifier, config: VerifyConfig) -> None:
    failures: list[dict[str, Any]] = []
    assert verifier.task is not None
    group = Group([0], [], verifier.task, {})
    try:
        with shared_pool() as pool:
            pool.run([group], _limits(config), _preload(verifier), lambda key, result: failures.append(result))
    finally:
        close_pool()
    if failures:
        raise ConfigError(
            f"verifier {verifier.name!r} cannot be loaded: importing it crashes, or takes more than timeout_seconds "
            f"{config.timeout_seconds}; import less at the top of the module, or raise verify.timeout_seconds"
        )


def check_error_share(verdicts: Sequence[Verdict], config: VerifyConfig) -> None:
    """Raise when the verifier itself failed too often; a single error is always allowed."""
    errors = sum(verdict.verdict is VerdictKind.ERROR for verdict in verdicts)
    if errors > 1 and errors > config.max_error_share * len(verdicts):
        messages = Counter(v.message for v in verdicts if v.verdict is VerdictKind.ERROR and v.message)
        why = f" (most often: {messages.most_common(1)[0][0]})" if messages else ""
        raise VerificationError(
            f"verifier {'+'.join(config.rewards) or config.verifier!r}: {errors} of {len(verdicts)} answers ended in "
            f"an error{why}, more than max_error_share {config.max_error_share}; look at the verdicts, or "
            "raise memory_mb or max_error_share"
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
    """Have workers compare every pair; one that runs out of time or memory gets a second try, alone, with more time.

    The load of a machine must not decide between a verdict and a timeout, nor what a worker had read before between a
    verdict and an error. A user's function has no second try.
    """
    late: set[int] = set()

    def take_in_time(key: int, result: dict[str, Any]) -> None:
        if result["verdict"] in ("timeout", "error") and not isinstance(verifier, UserVerifier):
            late.add(key)
        else:
            take(key, result)

    chosen: Sequence[int] = range(len(keys))
    if isinstance(verifier, UserVerifier) and _is_batched(verifier, config):
        chosen = _run_batches(keys, verifier, config, take)
    groups = _groups(keys, chosen, verifier, config)
    with shared_pool() as pool:
        pool.run(groups, _limits(config), _preload(verifier), take_in_time)
        again = [_alone(group, key) for group in groups for key in group.keys if key in late]
        if again:
            pool.run(again, _limits(config, alone=True), _preload(verifier), take)


def _is_batched(verifier: UserVerifier, config: VerifyConfig) -> bool:
    """Return whether the function takes many responses in one call; one that cannot be found fails in the worker."""
    if config.form != "auto":
        return config.form in BATCHED
    try:
        return function_takes_batches(verifier.name)
    except (ConfigError, SyntaxError):
        return False


def _run_batches(
    keys: list[tuple[str, str]],
    verifier: UserVerifier,
    config: VerifyConfig,
    take: Callable[[int, dict[str, Any]], None],
) -> list[int]:
    """Have a function that takes many responses judge batches of them; return those whose batch failed.

    They are judged again one by one, so that a response that hangs or raises costs its own verdict and no other.
    """
    assert verifier.task is not None
    parts = [range(start, min(start + _MAX_GROUP, len(keys))) for start in range(0, len(keys), _MAX_GROUP)]
    groups = []
    for number, part in enumerate(parts):
        problems = json.dumps([json.loads(keys[key][0]) for key in part])
        pair = (problems, json.dumps([keys[key][1] for key in part]))
        groups.append(Group([number], [pair], verifier.task, {**_options(verifier, config), "batch": True}))
    failed: list[int] = []

    def take_batch(number: int, result: dict[str, Any]) -> None:
        rows = checked_rows(result, len(parts[number]))
        if rows is None:
            failed.extend(parts[number])
            return
        for key, row in zip(parts[number], rows, strict=True):
            take(key, row)

    with shared_pool() as pool:
        pool.run(groups, _limits(config), _preload(verifier), take_batch)
    return failed


def _options(verifier: Verifier, config: VerifyConfig) -> dict[str, Any]:
    if isinstance(verifier, UserVerifier):
        return {"form": config.form, "range": config.reward_range}
    return {"tolerance": config.tolerance}


def _groups(
    keys: list[tuple[str, str]], chosen: Sequence[int], verifier: Verifier, config: VerifyConfig
) -> list[Group]:
    """Group by gold, so that each is parsed once; short answers first, so that a costly one delays few others."""
    assert verifier.task is not None
    by_gold: dict[str, list[tuple[int, tuple[str, str]]]] = {}
    for key in chosen:
        gold, answer = keys[key]
        prepared = verifier.payload(gold, answer) if isinstance(verifier, _MATHS) else (gold, answer)
        by_gold.setdefault(prepared[0], []).append((key, prepared))
    groups = []
    for members in by_gold.values():
        members.sort(key=lambda member: len(member[1][1]))
        for start in range(0, len(members), _MAX_GROUP):
            part = members[start : start + _MAX_GROUP]
            options = _options(verifier, config)
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
    """Return what the spawner imports once for all workers; never the user's own code."""
    if isinstance(verifier, _MATHS):
        return module("hacrl_core.verification.symbolic")
    return LIBRARIES.get(verifier.name.partition(":")[0], "") if isinstance(verifier, UserVerifier) else ""


def _from_worker(result: Mapping[str, Any], answer: str, verifier: Verifier) -> _Outcome:
    milliseconds = float(result.get("milliseconds", 0.0))
    if not isinstance(verifier, UserVerifier):
        return _Outcome(VerdictKind(result["verdict"]), answer, milliseconds, result.get("reward"))
    result = checked_result(result)
    kind, reward = VerdictKind(result["verdict"]), result.get("reward")
    return _Outcome(kind, result.get("answer", ""), milliseconds, reward, further_fields(result))


def _verdict(outcome: _Outcome, response: str, name: str, config: VerifyConfig, tokens: int | None) -> Verdict:
    reward = outcome.reward
    if reward is None:
        well_formed = config.format_reward > 0 and response_is_boxed(response)
        reward = base_reward(outcome.kind, well_formed=well_formed, format_reward=config.format_reward)
    if outcome.kind is not VerdictKind.ERROR:
        reward = shaped_reward(reward, tokens, config.overlong)
    return Verdict(reward, outcome.kind, outcome.answer, outcome.milliseconds, name, **outcome.further)

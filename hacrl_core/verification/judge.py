"""A language model as verifier. Its answers are kept by what was asked, so that nothing is asked twice.

A request that fails, an answer without a score, a score outside the range: each is an ``error`` verdict, from which
nothing is learned, and never a reward of zero.
"""

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hacrl_core.config.judge import JudgeConfig
from hacrl_core.contracts.manifest import canonical_json, digest_of
from hacrl_core.errors import ConfigError
from hacrl_core.problems.problem import Problem
from hacrl_core.verification.verdict import Verdict, VerdictKind

NAME = "judge"
# Asks prompts and returns the answers, or why there is none.
Ask = Callable[[Sequence[str]], "list[str | Failure]"]

_SCORE = re.compile(r"(?i)score\W{0,4}(-?\d+(?:\.\d+)?)")
_BETTER = re.compile(r"(?i)better\W{0,4}(a|b|tie)\b")
_RETRY_SECONDS = 0.5
_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Failure:
    """Why the judge gave no answer."""

    reason: str


@dataclass(frozen=True)
class JudgeAgent:
    """An agent of the campaign that judges: how to ask it, and what identifies its version."""

    ask: Ask
    model: str


@dataclass(frozen=True)
class Judging:
    """What judging needs besides the config: where answers are kept, and the agents that judge, by name."""

    answers: Path | None = None
    agents: Mapping[str, JudgeAgent] = field(default_factory=dict)


def judge_responses(
    responses: Sequence[str], problems: Sequence[Problem], config: JudgeConfig, judging: Judging
) -> list[Verdict]:
    """Return the judge's verdict on each response."""
    started = time.perf_counter()
    rows = list(zip(responses, problems, strict=True))
    prompts = [prompt for response, problem in rows for prompt in _prompts(response, problem, config)]
    answers = dict(zip(dict.fromkeys(prompts), _answers(list(dict.fromkeys(prompts)), config, judging), strict=True))
    milliseconds = (time.perf_counter() - started) * 1000 / max(1, len(rows))
    found = []
    for response, problem in rows:
        given = [answers[prompt] for prompt in _prompts(response, problem, config)]
        failed = next((answer for answer in given if isinstance(answer, Failure)), None)
        if failed is not None:
            found.append(_error(failed.reason, milliseconds))
            continue
        texts = [str(answer) for answer in given]
        read = _scored if config.mode == "score" else _compared
        found.append(read(texts, config, milliseconds))
    return found


def _prompts(response: str, problem: Problem, config: JudgeConfig) -> list[str]:
    """What the judge is asked about a response: once for a score, in both orders for a pair."""
    question = "\n".join(message["content"] for message in problem.messages)
    if config.mode == "score":
        return [_filled(config.asked, {"problem": question, "response": response, "answer": problem.answer})]
    reference = str(problem.columns.get("reference") or problem.answer)
    orders = ((response, reference), (reference, response))
    return [_filled(config.asked, {"problem": question, "first": a, "second": b}) for a, b in orders]


def _filled(template: str, values: dict[str, str]) -> str:
    """Put the values into the template at once: a response that contains {answer} stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match.group(1), match.group()), template)


def _scored(texts: list[str], config: JudgeConfig, milliseconds: float) -> Verdict:
    low, high = config.range
    pattern = re.compile(config.pattern) if config.pattern else _SCORE
    matches = list(pattern.finditer(texts[0]))
    if not matches:
        return _error(f"the judge's answer has no score: {_short(texts[0])}", milliseconds)
    try:
        score = float(matches[-1].group(1))
    except (TypeError, ValueError):
        return _error(f"the judge's score {matches[-1].group(1)!r} is no number", milliseconds)
    if not low <= score <= high:
        return _error(f"the judge's score {score:g} is outside [{low:g}, {high:g}]", milliseconds)
    right = score >= (high if config.correct_from is None else config.correct_from)
    return _verdict((score - low) / (high - low), score, config.range, right, texts, milliseconds)


def _compared(texts: list[str], config: JudgeConfig, milliseconds: float) -> Verdict:
    """1 where the response wins in both orders, 0 where it loses in both, else a half: position is no merit."""
    pattern = re.compile(config.pattern) if config.pattern else _BETTER
    wins = []
    for text, ours in zip(texts, ("a", "b"), strict=True):
        matches = list(pattern.finditer(text))
        if not matches:
            return _error(f"the judge's answer names no winner: {_short(text)}", milliseconds)
        winner = str(matches[-1].group(1)).lower()
        wins.append({ours: 1.0, "tie": 0.5}.get(winner, 0.0))
    reward = 0.5 if len(set(wins)) > 1 else wins[0]
    return _verdict(reward, reward, (0.0, 1.0), reward == 1.0, texts, milliseconds)


def _verdict(
    reward: float, raw: float, ends: tuple[float, float], right: bool, texts: list[str], milliseconds: float
) -> Verdict:
    kind = VerdictKind.CORRECT if right else VerdictKind.INCORRECT
    answer = _short(texts[0], 2000)
    return Verdict(reward, kind, answer, milliseconds, NAME, raw_reward=raw, raw_range=ends)


def _error(reason: str, milliseconds: float) -> Verdict:
    return Verdict(0.0, VerdictKind.ERROR, "", milliseconds, NAME, message=reason)


def _answers(prompts: list[str], config: JudgeConfig, judging: Judging) -> "list[str | Failure]":
    """The answers to prompts, from those kept where possible."""
    agent = _agent(config, judging)
    model = agent.model if agent else config.model
    paths = [None if judging.answers is None else _place(judging.answers, model, prompt, config) for prompt in prompts]
    found: list[str | Failure | None] = [_read(path) for path in paths]
    missing = [index for index, answer in enumerate(found) if answer is None]
    ask = agent.ask if agent else partial(_ask_endpoint, config=config)
    given = ask([prompts[index] for index in missing]) if missing else []
    for index, answer in zip(missing, given, strict=True):
        found[index] = answer
        if isinstance(answer, str):
            _write(paths[index], {"model": model, "prompt": prompts[index], "answer": answer})
    return [answer if answer is not None else Failure("not asked") for answer in found]


def _agent(config: JudgeConfig, judging: Judging) -> JudgeAgent | None:
    if config.agent is None:
        return None
    if config.agent not in judging.agents:
        raise ConfigError(
            f"judge.agent {config.agent}: only a campaign's own stages can ask it; choose another verifier, e.g. with "
            "--verifier"
        )
    return judging.agents[config.agent]


def _place(folder: Path, model: str, prompt: str, config: JudgeConfig) -> Path:
    """Where an answer is kept: by the model, the filled-in template and what else decides the answer."""
    key = digest_of({"model": model, "prompt": prompt, "max_tokens": config.max_tokens, "temperature": 0})
    return folder / key[:2] / f"{key}.json"


def _read(path: Path | None) -> str | None:
    """A kept answer; None where there is none or it is damaged."""
    if path is None or not path.exists():
        return None
    try:
        kept = json.loads(path.read_bytes())
        seal = kept.pop("sha256")
        answer = kept["answer"]
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return answer if seal == digest_of(kept) and isinstance(answer, str) else None


def _write(path: Path | None, kept: dict[str, str]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(canonical_json({**kept, "sha256": digest_of(kept)}))
    os.replace(draft, path)


def _ask_endpoint(prompts: Sequence[str], config: JudgeConfig) -> "list[str | Failure]":
    with ThreadPoolExecutor(min(config.concurrency, len(prompts))) as pool:
        return list(pool.map(lambda prompt: _ask_once(prompt, config), prompts))


def _ask_once(prompt: str, config: JudgeConfig) -> "str | Failure":
    """Ask the endpoint, several times if it fails in a way that may pass."""
    body: dict[str, Any] = {"model": config.model, "messages": [{"role": "user", "content": prompt}]}
    body |= {"temperature": 0, "max_tokens": config.max_tokens}
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(config.key_variable or "", "")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        f"{str(config.url).rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
    )
    reason = ""
    for number in range(config.tries):
        if number:
            time.sleep(_RETRY_SECONDS * 2**number)
        try:
            with urllib.request.urlopen(request, timeout=config.timeout_seconds) as reply:
                content = json.loads(reply.read(_MOST_BYTES))["choices"][0]["message"]["content"]
            return str(content or "")
        except urllib.error.HTTPError as problem:
            reason = (
                f"the judge at {config.url} says {problem.code}: {_short(problem.read(2000).decode(errors='replace'))}"
            )
            if problem.code < 500 and problem.code not in (408, 409, 429):
                break
        except (OSError, ValueError, LookupError, TypeError) as problem:
            reason = f"the judge at {config.url} does not answer: {type(problem).__name__}: {_short(str(problem))}"
    return Failure(reason)


def _short(text: str, most: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"

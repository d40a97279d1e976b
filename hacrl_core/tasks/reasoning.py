"""Tasks of reasoning-gym: ``reasoning_gym:chain_sum`` is its generator of problems with its own scorer.

Options of the problems are those of the generator, e.g. ``options: {min_terms: 2, max_terms: 3}``; ``preamble`` is put
before each question. The scorer sees what a response says between ``<answer>`` tags, in its last box, or the whole
response.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from hacrl_core.errors import ConfigError
from hacrl_core.tasks.api import Problem, Verdict
from hacrl_core.tasks.loading import Task

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
# Problems of one seed; the next ones have another seed.
BLOCK = 512


def warm_up() -> None:
    """Import the library once, for all workers."""
    _library()


def load(name: str) -> Task:
    """Return the task of this name; ConfigError where reasoning-gym is not installed or has no such task."""
    known = _library().factory.DATASETS
    if name not in known:
        import difflib

        close = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {len(known)}, e.g. chain_sum, gcd, sudoku"
        raise ConfigError(f"task reasoning_gym:{name}: reasoning-gym has no task {name}; {hint}")

    def problems(seed: int = 0, preamble: str = "", **options: Any) -> Iterator[Problem]:
        return _problems(name, seed, preamble, options)

    return Task(f"reasoning_gym:{name}", problems, verify)


def verify(response: str, problem: Problem) -> Verdict:
    """Score the response's answer with the task's own scorer; it gives 1 for a right answer and may give less.

    The problem is made again from its seed and number: what a scorer reads of it need not survive JSON.
    """
    name = problem.source.partition(":")[2]
    generator = _generator(name, problem.seed, json.dumps(problem.options, sort_keys=True))
    entry = _entry(name, problem.seed, json.dumps(problem.options, sort_keys=True), problem.number)
    answer = answer_in(response)
    try:
        reward = float(generator.score_answer(answer, entry=entry))
    except Exception:
        # Some scorers raise on what they cannot read.
        return Verdict(answer=answer)
    return Verdict(min(1.0, max(0.0, reward)), correct=reward >= 1.0, answer=answer)


def answer_in(response: str) -> str:
    """Return what a response gives as its answer: the last tag, else the last box, else all of it."""
    found = _TAGGED.findall(response) or _BOXED.findall(response) or [response]
    return str(found[-1]).strip()


def _problems(name: str, seed: int, preamble: str, options: dict[str, Any]) -> Iterator[Problem]:
    text = json.dumps(options, sort_keys=True)
    while True:
        for number in range(BLOCK):
            entry = _generator(name, seed, text)[number]
            # Seeds repeat questions: a problem is its question, not its seed and number.
            content = f"{preamble}\x1f{entry['question']}\x1f{entry['answer']}"
            yield Problem(
                f"{preamble}{entry['question']}",
                answer="" if entry["answer"] is None else str(entry["answer"]),
                id=hashlib.sha256(content.encode()).hexdigest()[:16],
                source=f"reasoning_gym:{name}",
                seed=seed,
                number=number,
                options=options,
            )
        seed = (seed + 1_000_003) % 2**31


@lru_cache(maxsize=8)
def _generator(name: str, seed: int, options: str) -> Any:
    library = _library()
    try:
        return library.create_dataset(name, seed=seed, size=BLOCK, **json.loads(options))
    except (TypeError, AssertionError, ValueError) as problem:
        reason = " ".join(str(problem).split())[:300] or type(problem).__name__
        raise ConfigError(f"task reasoning_gym:{name}: options {options}: {reason}") from None


@lru_cache(maxsize=64)
def _entry(name: str, seed: int, options: str, number: int) -> Any:
    return _generator(name, seed, options)[number]


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as problem:
        raise ConfigError(
            f"task reasoning_gym: reasoning-gym is not installed ({problem}); install the extra hacrl[tasks]"
        ) from None
    return reasoning_gym

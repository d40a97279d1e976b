"""A set of problems and the order in which a campaign goes through it."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hacrl_core.contracts.manifest import canonical_json
from hacrl_core.errors import ConfigError
from hacrl_core.problems.problem import Message, Problem
from hacrl_core.seeding import derive_rng


@dataclass(frozen=True)
class ProblemSet:
    """Problems as they were read; ``content_digest`` is part of the identity of whatever uses them."""

    problems: tuple[Problem, ...]
    content_digest: str
    # Rows not used, by reason.
    left_out: Mapping[str, int] = field(default_factory=dict)
    # Where given, problems are made anew for every iteration, from (seed, iteration, count).
    generator: Callable[[int, int, int], list[Problem]] | None = None

    def for_iteration(self, seed: int, iteration: int, count: int) -> list[Problem]:
        """Return the problems of one iteration."""
        return problems_for_iteration(self, seed, iteration, count)


def problem_order(seed: int, epoch: int, n: int) -> list[int]:
    """Return the order of one epoch: a permutation that depends on the arguments alone."""
    return [int(index) for index in derive_rng(seed, "problems", epoch).permutation(n)]


def problems_for_iteration(problem_set: ProblemSet, seed: int, iteration: int, count: int) -> list[Problem]:
    """Return the ``count`` problems of an iteration (counted from 0), no two alike.

    A pure function of its arguments: a campaign that resumes at iteration 7 reads what it would have read. An epoch has
    as many iterations as are full; what remains of its order is left out (other problems in every epoch), because an
    iteration across two epochs could ask one problem twice.
    """
    if problem_set.generator is not None:
        made = problem_set.generator(seed, iteration, count)
        if len(made) < count:
            raise ConfigError(
                f"problems: {count} per iteration are wanted, the task made {len(made)} different ones; "
                "lower prompts_per_iteration or make the task's problems more varied"
            )
        return made
    n = len(problem_set.problems)
    if not 0 < count <= n:
        out = ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in problem_set.left_out.items())
        raise ConfigError(
            f"problems: {count} per iteration are wanted, the set has {n} after filters"
            f"{f' (rows left out: {out})' if out else ''}; lower prompts_per_iteration or relax the filters"
        )
    epoch, position = divmod(iteration, n // count)
    order = problem_order(seed, epoch, n)
    return [problem_set.problems[index] for index in order[position * count : (position + 1) * count]]


@dataclass(frozen=True)
class WithinLength:
    """The problems whose prompts fit, and how many each agent's limit leaves out."""

    problems: tuple[Problem, ...]
    too_long: Mapping[str, int]


def within_length(
    problems: Sequence[Problem],
    renderers: Mapping[str, Callable[[Sequence[Message]], Sequence[int]]],
    max_prompt_tokens: int,
) -> WithinLength:
    """Keep the problems whose prompt fits ``max_prompt_tokens`` for every agent: all agents answer the same prompts.

    ``renderers`` maps an agent to its ``render_prompt`` with tokenizer, template and options filled in.
    """
    lengths_NP = np.array(
        [[len(render(p.messages)) for p in problems] for render in renderers.values()], dtype=np.int64
    )
    fits_NP = lengths_NP.reshape(len(renderers), len(problems)) <= max_prompt_tokens
    kept = tuple(problem for problem, fits in zip(problems, np.all(fits_NP, axis=0).tolist(), strict=True) if fits)
    if problems and not kept:
        shortest = dict(zip(renderers, lengths_NP.min(axis=1).tolist(), strict=True))
        raise ConfigError(
            f"problems: no prompt has at most {max_prompt_tokens} tokens (shortest by agent: {shortest}); "
            "raise the limit"
        )
    return WithinLength(kept, {agent: int((~fits).sum()) for agent, fits in zip(renderers, fits_NP, strict=True)})


def content_digest(problems: Sequence[Problem]) -> str:
    """Return the sha256 of everything that a stage could read from the problems, in order."""
    digest = hashlib.sha256()
    for p in problems:
        parts = [
            p.problem_id,
            [[m["role"], m["content"]] for m in p.messages],
            p.answer,
            p.source,
            sorted(p.tags.items()),
            *([json.loads(canonical_json(dict(p.columns)))] if p.columns else ()),
        ]
        digest.update(json.dumps(parts, ensure_ascii=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()

"""Load a set of problems from its config: the built-in arithmetic, a dataset or a preset."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from hacrl_core.config.exchange import WithholdConfig
from hacrl_core.config.problems import (
    AnswerFormat,
    ArithmeticProblems,
    Columns,
    DatasetProblems,
    PresetProblems,
    ProblemFilters,
    TaskProblems,
)
from hacrl_core.errors import ConfigError
from hacrl_core.problems.arithmetic import held_out_problems, training_problems
from hacrl_core.problems.presets import resolve_preset
from hacrl_core.problems.problem import Message, Problem
from hacrl_core.problems.rows import Row, read_rows
from hacrl_core.problems.sets import ProblemSet, content_digest
from hacrl_core.problems.tasks import json_columns, task_problems

# Problems that stand for an unbounded generator in its digest.
_WITNESSES = 64
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def load_problems(
    config: ArithmeticProblems | DatasetProblems | PresetProblems | TaskProblems,
    withheld: Sequence[WithholdConfig] = (),
) -> ProblemSet:
    """Read, filter and name the problems. The same content gives the same digest wherever it was read from.

    Rows of a dataset that are ``withheld`` count as if they were not there: whoever never had them reads the same set.
    """
    if isinstance(config, ArithmeticProblems):
        return _arithmetic(config)
    if isinstance(config, TaskProblems):
        return task_problems(config, load_dataset)
    return load_dataset(resolve_preset(config) if isinstance(config, PresetProblems) else config, withheld)


def _arithmetic(config: ArithmeticProblems) -> ProblemSet:
    """Make the problems once per process: they depend on the settings alone, and a thousand take half a second."""
    return _made(config.model_dump_json())


@lru_cache(maxsize=16)
def _made(settings_json: str) -> ProblemSet:
    config = ArithmeticProblems.model_validate_json(settings_json)
    if config.split == "held_out":
        problems = tuple(held_out_problems(config.size or 0, config))
    elif config.size is not None:
        problems = tuple(training_problems(0, 0, config.size, config))
    else:
        settings = repr(sorted(config.kinds.items())) + repr(sorted(config.levels.items()))
        witnesses = content_digest([training_problems(0, i, 1, config)[0] for i in range(_WITNESSES)])
        return ProblemSet(
            (),
            hashlib.sha256((settings + witnesses).encode()).hexdigest(),
            generator=partial(training_problems, config=config),
        )
    return ProblemSet(problems, content_digest(problems))


def load_dataset(config: DatasetProblems, withheld: Sequence[WithholdConfig] = ()) -> ProblemSet:
    """Read the rows of a dataset, filter them and make problems of them."""
    columns = config.columns
    named = [columns.messages or columns.problem, columns.answer, columns.context, columns.id, *columns.tags.values()]
    named += columns.extra
    rows = read_rows(config, list(dict.fromkeys(name for name in named if name)))
    source = config.source or config.hub or (config.path.stem if config.path else "")
    kept: dict[str, Problem] = {}
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows, start=1):
        problem = _problem(row, config, source, number)
        is_withheld = any(policy.matches(problem.problem_id, problem.tags) for policy in withheld)
        reason = "withheld" if is_withheld else _reason_to_leave_out(problem, row, config)
        known = kept.get(problem.problem_id)
        if reason is None and known is not None:
            if (known.messages, known.answer) != (problem.messages, problem.answer):
                raise ConfigError(
                    f"dataset {source}: row {number}: id {problem.problem_id} names an earlier, different row; "
                    "give a column with unique ids or leave columns.id out"
                )
            reason = "repeated"
        if reason is not None:
            left_out[reason] += 1
            continue
        kept[problem.problem_id] = problem
        if len(kept) == config.filters.max_problems:
            break
    if not kept:
        raise ConfigError(
            f"dataset {source}: all {len(rows)} rows were left out ({dict(left_out)}); relax filters or check columns"
        )
    problems = tuple(kept.values())
    return ProblemSet(problems, content_digest(problems), dict(left_out))


def _problem(row: Row, config: DatasetProblems, source: str, number: int) -> Problem:
    columns = config.columns
    messages = _given_messages(row[columns.messages], source, number) if columns.messages else _messages(row, config)
    answer = extract_answer(row[columns.answer], config.answer_format)
    tags = {name: _tag(row[column]) for name, column in columns.tags.items() if row[column] not in (None, "")}
    extra = {name: row[name] for name in columns.extra if row[name] is not None}
    further = json_columns(extra, f"dataset {source}: row {number}")
    return Problem(_identify(row, columns, messages, answer), messages, answer, source, tags, further)


def _messages(row: Row, config: DatasetProblems) -> tuple[Message, ...]:
    # Not str.format: LaTeX is full of braces.
    user: Message = {"role": "user", "content": config.prompt.replace("{problem}", _text(row, config.columns))}
    return (user,) if config.system is None else ({"role": "system", "content": config.system}, user)


def _text(row: Row, columns: Columns) -> str:
    """Return what the row itself asks: context and problem, or the contents of its messages."""
    if columns.messages:
        return "\n".join(str(message["content"]) for message in row[columns.messages])
    context = row[columns.context] if columns.context else None
    problem = row[columns.problem]
    return "\n".join(str(part).strip() for part in (context, problem) if part is not None and str(part).strip())


def _given_messages(value: Any, source: str, number: int) -> tuple[Message, ...]:
    proper = (
        isinstance(value, list)
        and value
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in value)
    )
    if not proper:
        raise ConfigError(
            f"dataset {source}: row {number}: messages are {str(value)[:80]!r}; they must be a list of role and content"
        )
    return tuple({"role": str(m["role"]), "content": str(m["content"])} for m in value)


def _identify(row: Row, columns: Columns, messages: tuple[Message, ...], answer: str) -> str:
    """Return the problem's id, without "/" and other characters that would need quoting in rollout ids."""
    given = row[columns.id] if columns.id else None
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(given)).strip("-") if given is not None else ""
    content = "\x1f".join([*(part for m in messages for part in (m["role"], m["content"])), answer])
    return name or hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()[:16]


def _tag(value: Any) -> str:
    """Return a tag as text; MATH writes "Level 5" where MATH-500 writes 5."""
    return re.sub(r"^Level\s+", "", str(value).strip())


def _reason_to_leave_out(problem: Problem, row: Row, config: DatasetProblems) -> str | None:
    text, filters = _text(row, config.columns), config.filters
    if not problem.answer:
        return "no answer"
    if not text:
        return "no problem text"
    if len(text) < filters.min_characters:
        return "too short"
    if filters.max_characters is not None and len(text) > filters.max_characters:
        return "too long"
    return None if _has_wanted_tags(problem, filters) else "tags"


def _has_wanted_tags(problem: Problem, filters: ProblemFilters) -> bool:
    return all(problem.tags.get(name) in values for name, values in filters.tags.items())


def extract_answer(value: Any, answer_format: AnswerFormat) -> str:
    """Return the answer in an answer column as text; empty where there is none, and the row is left out."""
    text = _as_text(value)
    if answer_format == "boxed":
        text = last_boxed(text) or ""
    elif answer_format == "after_hashes":
        _, mark, text = text.rpartition("####")
        # GSM8K sometimes writes 1,000.
        text = text.strip().replace(",", "") if mark else ""
    return _without_dollars(text.strip())


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete ``\\boxed{…}`` or ``\\fbox{…}``, or the word after a bare ``\\boxed``."""
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if text[start : start + 1] != "{":
            word = re.match(r"[^\s$]+", text[start:])
            if word:
                return word.group()
            continue
        end = _closing_brace(text, start)
        if end is not None:
            return text[start + 1 : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 0, start
    while position < len(text):
        if text[position] == "\\":
            # An escaped brace opens and closes nothing.
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
        position += 1
    return None


def _as_text(value: Any) -> str:
    """Write numbers as people do, and a list as its members (OlympiadBench keeps answers in lists)."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ", ".join(_as_text(part) for part in value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _without_dollars(text: str) -> str:
    inner = text[1:-1]
    wrapped = len(text) > 2 and text[0] == text[-1] == "$" and "$" not in inner
    return inner.strip() if wrapped else text

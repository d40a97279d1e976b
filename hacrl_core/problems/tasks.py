"""The problems of a task: from its generator, its rows or its dataset to a set with ids, a split and a digest."""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hacrl_core.config.problems import DatasetProblems, TaskProblems
from hacrl_core.contracts.manifest import canonical_json, digest_of
from hacrl_core.errors import ConfigError
from hacrl_core.problems.problem import Message, Problem
from hacrl_core.problems.sets import ProblemSet, content_digest
from hacrl_core.seeding import derive_seed
from hacrl_core.tasks import api
from hacrl_core.tasks.digest import task_digest
from hacrl_core.tasks.loading import Task, load_task

HELD_OUT_SHARE = 0.2
# Problems that stand for an endless generator in its digest.
_WITNESSES = 64
# A task that yields more than this without a size counts as endless.
_MOST = 200_000
# Repeats in a row, or rows of the other split, after which a generator counts as exhausted.
_PATIENCE = 5_000
_PROMPT_NAMES = ("prompt", "messages", "question", "problem")


def task_problems(config: TaskProblems, load_dataset: Callable[[DatasetProblems], ProblemSet]) -> ProblemSet:
    """Make the problems of a task; ``load_dataset`` reads the dataset of a task that names one."""
    task = load_task(config.task)
    if task.problems is None:
        raise ConfigError(f"task {config.task}: has no 'problems'; define a function or a list, or set problems")
    if isinstance(task.problems, Mapping):
        rows = load_dataset(_dataset_settings(task, config)).problems
        chosen = [problem for problem in rows if _in_split(problem, config, task)][: config.size]
        return _fixed(chosen, config)
    if config.size is None and "seed" in _parameters(task):
        _check_options(task, config)
        generator = partial(_fresh, task, config)
        witnesses = content_digest(generator(0, 0, _WITNESSES))
        return ProblemSet(
            (), digest_of([task_digest(config.task), config.split, config.options, witnesses]), {}, generator
        )
    _check_options(task, config)
    return _fixed(_distinct(_rows(task, config, 0), task, config, config.size), config)


def json_columns(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return columns that JSON can hold, or raise ConfigError naming the first that it cannot."""
    for name, value in values.items():
        try:
            canonical_json(value)
        except (TypeError, ValueError) as problem:
            raise ConfigError(f"{where}: column {name} cannot be written as JSON ({problem}); make it text") from None
    return dict(values)


def _fresh(task: Task, config: TaskProblems, seed: int, iteration: int, count: int) -> list[Problem]:
    """Return the problems of one iteration, no two alike; fewer where there are not so many."""
    drawn = derive_seed(seed, "task", config.task, iteration) % 2**31
    return _distinct(_rows(task, config, drawn), task, config, count, strict=False)


def _fixed(problems: list[Problem], config: TaskProblems) -> ProblemSet:
    if not problems:
        raise ConfigError(f"task {config.task}: no problem in the split {config.split}; give more problems")
    return ProblemSet(tuple(problems), content_digest(problems))


def _rows(task: Task, config: TaskProblems, seed: int) -> Iterator[Problem]:
    """Yield the task's problems, of either split."""
    given = task.problems
    if callable(given):
        offered = {"seed": seed, "split": config.split, "size": config.size}
        wanted = _parameters(task)
        try:
            given = given(**{name: value for name, value in offered.items() if name in wanted}, **config.options)
        except Exception as problem:
            raise _failed(task, problem) from problem
    if not isinstance(given, Iterable):
        raise ConfigError(f"task {task.name}: problems is a {type(given).__name__}; yield or list Problem objects")
    rows = iter(given)
    for number in range(1, 2**62):
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as problem:
            raise _failed(task, problem) from problem
        yield as_problem(row, task.name, number)


def _distinct(
    rows: Iterator[Problem], task: Task, config: TaskProblems, count: int | None, *, strict: bool = True
) -> list[Problem]:
    found: dict[str, Problem] = {}
    missed = 0
    for problem in rows:
        if problem.problem_id in found or not _in_split(problem, config, task):
            missed += 1
            if missed > _PATIENCE and count is not None:
                break
            continue
        missed = 0
        found[problem.problem_id] = problem
        if len(found) == count:
            break
        if count is None and len(found) > _MOST:
            raise ConfigError(f"task {config.task}: yields more than {_MOST} problems; give problems.size")
    if strict and count is not None and len(found) < count:
        raise ConfigError(
            f"task {config.task}: has {len(found)} different problems in the split {config.split}, {count} were asked "
            "for; ask for fewer"
        )
    return list(found.values())


def _in_split(problem: Problem, config: TaskProblems, task: Task) -> bool:
    """Return whether a problem is in the wanted split: the task's own, else one by a hash of the question."""
    if config.split == "all" or "split" in _parameters(task):
        return True
    question = "\x1f".join(message["content"] for message in problem.messages)
    digest = hashlib.sha256(question.encode("utf-8", "replace")).digest()
    held_out = int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64
    return held_out == (config.split == "held_out")


def as_problem(row: Any, source: str, number: int) -> Problem:
    """Return a problem from what a task yields: a ``hacrl.Problem``, or a mapping with prompt, answer and columns."""
    where = f"task {source}: problem {number}"
    if isinstance(row, Mapping):
        row = _from_mapping(row, where)
    if not isinstance(row, api.Problem):
        raise ConfigError(f"{where} is a {type(row).__name__}; yield hacrl.Problem, or a dict with prompt and answer")
    messages: tuple[Message, ...] = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in row.messages)
    if not messages:
        raise ConfigError(f"{where} has no prompt; give a text or a list of messages")
    columns = json_columns(row.columns, where)
    tags = {str(name): str(value) for name, value in row.tags.items()}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(row.id)).strip("-")
    if not name:
        content = [[m["role"], m["content"]] for m in messages], row.answer, columns
        name = digest_of(content)[:16]
    return Problem(name, messages, str(row.answer), row.source or Path(source).stem, tags, columns)


def _from_mapping(row: Mapping[str, Any], where: str) -> api.Problem:
    values = dict(row)
    key = next((name for name in _PROMPT_NAMES if name in values), None)
    if key is None:
        raise ConfigError(f"{where} has no prompt; it has {', '.join(map(str, values))}: name one of them prompt")
    prompt, answer = values.pop(key), values.pop("answer", "")
    fields = {name: values.pop(name) for name in ("id", "tags", "source") if name in values}
    try:
        return api.Problem(prompt, "" if answer is None else str(answer), **fields, **values)
    except (TypeError, KeyError) as problem:
        raise ConfigError(f"{where}: {problem}; give a text or messages with role and content") from None


def _parameters(task: Task) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(task.problems).parameters if callable(task.problems) else {}


def _check_options(task: Task, config: TaskProblems) -> None:
    known = _parameters(task)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    unknown = [name for name in config.options if name not in known]
    if unknown:
        allowed = ", ".join(name for name in known if name not in ("seed", "split", "size")) or "none"
        raise ConfigError(f"task {config.task}: problems() has no option {unknown[0]}; it has {allowed}")


def _dataset_settings(task: Task, config: TaskProblems) -> DatasetProblems:
    """Return the settings of a task's dataset; a relative path starts at the task's own folder."""
    raw = {"source": Path(task.name).stem, **task.problems, **config.options}
    if raw.get("path") is not None and task.folder is not None:
        raw["path"] = task.folder / Path(raw["path"]).expanduser()
    try:
        return DatasetProblems.model_validate(raw)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"task {config.task}: problems.{where}: {first['msg']}") from None


def _failed(task: Task, problem: Exception) -> ConfigError:
    reason = " ".join(str(problem).split())[:300]
    return ConfigError(f"task {task.name}: problems() failed: {type(problem).__name__}: {reason}")

"""Single-turn environments of the package ``verifiers``: ``verifiers:my-env`` gives its problems and its own rewards.

An environment is a ``Taskset`` whose tasks score a trace, the interface of verifiers 0.4. Environments with tools,
several turns, a container or a runtime of their own are refused: a part of their reward would be missing.
"""

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from hacrl_core.errors import ConfigError
from hacrl_core.tasks.api import Problem, Verdict
from hacrl_core.tasks.loading import Task

_NAME = "verifiers"


def warm_up() -> None:
    """Import the library once, for all workers; it takes seconds."""
    _library()


def module_of(name: str) -> str:
    """Return the module of an environment, whose name may be that of a package (``my-env``) or of a hub."""
    return name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")


def load(name: str) -> Task:
    """Return an environment as a task; ConfigError where it is not installed or has more than one turn."""
    _library()
    try:
        low, high = _taskset_range(name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as problem:
        reason = " ".join(str(problem).split())[:300]
        raise ConfigError(
            f"task verifiers:{name}: cannot be loaded: {type(problem).__name__}: {reason}; install the environment's "
            "package, or put its module on PYTHONPATH"
        ) from problem

    def problems(**options: Any) -> Iterator[Problem]:
        return _taskset_problems(name, options)

    return Task(f"{_NAME}:{name}", problems, verify, (low, high))


async def verify(response: str, problem: Problem) -> Verdict:
    """Score a response with the environment's own rewards; each is a part, weighted in the sum."""
    name, options = problem.source.partition(":")[2], json.dumps(problem.options, sort_keys=True)
    v1 = _library()
    task = _task(name, _taskset(name, options), problem.row)
    nodes = []
    for number, message in enumerate([*problem.messages, {"role": "assistant", "content": response}]):
        sampled = number == len(problem.messages)
        nodes.append({"message": message, "sampled": sampled, "parent": number - 1 if number else None})
    state = importlib.import_module("verifiers.v1.state").state_cls(type(task))
    trace = v1.Trace(
        task=v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state(),
        agent=v1.AgentInfo(config=v1.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
    )
    await task.score(trace)
    missing = [reward for reward, value in trace.rewards.items() if value is None]
    if missing or not trace.rewards:
        raise ValueError(f"reward {missing[0]} was not computed" if missing else "the task has no reward")
    metrics = {key: value for key, value in trace.metrics.items() if value is not None}
    return Verdict(trace.reward, parts={k: r.score for k, r in trace.rewards.items()}, metrics=metrics)


@lru_cache(maxsize=8)
def _taskset(name: str, options: str) -> Any:
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    single = importlib.import_module("verifiers.v1.envs.single_agent").SingleAgentEnv
    if loaders.environment_class(name) is not single:
        raise _refused(name, "it has an environment class of its own, so more than one turn or agent")
    settings = loaders.taskset_config_type(name).model_validate({**json.loads(options), "id": name})
    taskset = loaders.load_taskset(settings)
    if taskset.toolsets(settings) or taskset.task_type().toolsets(settings.task):
        raise _refused(name, "it has tools")
    return taskset


def _task(name: str, taskset: Any, row: Mapping[str, Any] | None) -> Any:
    """Return a task of the taskset; without a row, one that only says what it would score."""
    kind = taskset.task_type()
    data = kind.data_type()
    task = kind(data.model_construct() if row is None else data.model_validate(row), taskset.config.task)
    base = _library().Task
    if kind.NEEDS_CONTAINER or kind.setup is not base.setup or kind.finalize is not base.finalize:
        raise _refused(name, "it prepares a runtime of its own")
    for hook in [*task.hooks("reward"), *task.hooks("metric")]:
        runtime = inspect.signature(hook).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise _refused(name, f"its reward {hook.__name__} needs a runtime")
    return task


def _taskset_range(name: str) -> tuple[float, float]:
    task = _task(name, _taskset(name, "{}"), None)
    weights = [float(getattr(hook, "_vf_weight", 1.0)) for hook in task.hooks("reward")]
    return _range([*weights, *(float(judge.weight) for judge in task.config.judges)])


def _taskset_problems(name: str, options: dict[str, Any]) -> Iterator[Problem]:
    taskset = _taskset(name, json.dumps(options, sort_keys=True))
    for task in taskset:
        row = task.data.model_dump(mode="json", exclude_defaults=True)
        if task.data.prompt is None:
            raise _refused(name, "a task has no prompt: another model opens the conversation")
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if task.data.system_prompt:
            messages.insert(0, {"role": "system", "content": task.data.system_prompt})
        yield _problem(name, messages, row.get("answer"), row, options)


def _problem(
    name: str, messages: list[Any], answer: Any, row: Mapping[str, Any], options: Mapping[str, Any]
) -> Problem:
    text = answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer)
    return Problem(messages, answer=text, source=f"{_NAME}:{name}", row=dict(row), options=dict(options))


def _range(weights: list[float]) -> tuple[float, float]:
    """Return the range of a sum of rewards that are each between 0 and 1."""
    low, high = sum(min(0.0, weight) for weight in weights), sum(max(0.0, weight) for weight in weights)
    return (low, high) if low < high else (0.0, 1.0)


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"task verifiers:{name}: {reason}; a task is one prompt, one response and rewards that need nothing else"
    )


def _library() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as problem:
        raise ConfigError(
            f"task verifiers: verifiers 0.4 is not installed ({problem}); install the extra hacrl[verifiers]"
        ) from None

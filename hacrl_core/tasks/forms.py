"""The forms in which people write verifiers, each turned into one: a batch of responses in, a verdict for each out.

The form is recognised by the names of a function's parameters:

=============================================================  =========================================================
``verify(response, problem)``                                  ours; the second parameter is called ``problem``
``verify(responses, problems)``                                ours, a batch at a time
``f(response, gold)``                                          any other two parameters: two strings
``f(completions, **columns)``, with ``prompts`` if wanted       TRL's reward functions, plain text
the same, reading ``completion[0]["content"]``                 TRL's reward functions, conversations
``compute_score(data_source, solution_str, ground_truth, …)``  verl's, also with ``data_sources``, ``solution_strs``, …
=============================================================  =========================================================

Each may be ``async``.
"""

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

from hacrl_core.tasks.api import Problem, Verdict

# Forms that take many responses in one call.
BATCHED = ("batch", "trl", "trl_chat", "verl_batch")
# A TRL reward function returned None: the reward does not apply to this response.
NOT_APPLICABLE = "not applicable"

Row = tuple[str, Problem]
Found = Verdict | str


def form_of(function: Callable[..., Any]) -> str:
    """Return the form of a verifier by the names of its parameters."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "pair"
    names = list(parameters)
    if "completions" in names:
        return "trl_chat" if _reads_content(function) else "trl"
    if "solution_strs" in names:
        return "verl_batch"
    if "solution_str" in names:
        return "verl"
    if "responses" in names:
        return "batch"
    return "problem" if names[1:2] == ["problem"] else "pair"


def takes_batches(source: str, name: str) -> bool:
    """Return whether the function of this name in a source text takes many responses in one call; nothing is run."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            names = {argument.arg for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}
            return bool(names & {"completions", "responses", "solution_strs"})
    return False


def judge(function: Callable[..., Any], form: str, rows: Sequence[Row]) -> list[Found]:
    """Call a verifier of any form; return a Verdict for each row, or why there is none."""
    if form in BATCHED:
        results = list(_finished(_BATCHED[form](function, rows)))
        if len(results) != len(rows):
            raise ValueError(f"{len(results)} results for {len(rows)} responses; return one for each, in order")
    else:
        results = [_SINGLE[form](function, *row) for row in rows]
        if results and inspect.isawaitable(results[0]):
            results = _gathered(results)
    read = {"verl": _read_score, "verl_batch": _read_score, "trl": _read_trl, "trl_chat": _read_trl}.get(
        form, as_verdict
    )
    return [read(result) for result in results]


def as_verdict(value: Any) -> Verdict:
    """Read what a verifier returned: a Verdict, a bool, a reward, None for "no answer", or (one of these, answer)."""
    if isinstance(value, Verdict):
        return value
    answer = ""
    if isinstance(value, tuple):
        value, answer = value
    if value is None:
        return Verdict(answer=str(answer))
    return Verdict(float(value), answer=str(answer))


def _pair(function: Callable[..., Any], response: str, problem: Problem) -> Any:
    return function(response, problem.answer)


def _problem(function: Callable[..., Any], response: str, problem: Problem) -> Any:
    return function(response, problem)


def _verl(function: Callable[..., Any], response: str, problem: Problem) -> Any:
    arguments = {"solution_str": response, **_verl_row(problem)}
    return function(**_accepted(function, arguments))


def _verl_batch(function: Callable[..., Any], rows: Sequence[Row]) -> Any:
    columns = [_verl_row(problem) for _, problem in rows]
    arguments: dict[str, Any] = {"solution_strs": [response for response, _ in rows]}
    arguments |= {f"{name}s": [row[name] for row in columns] for name in ("data_source", "ground_truth", "extra_info")}
    return function(**_accepted(function, arguments))


def _verl_row(problem: Problem) -> dict[str, Any]:
    """Return verl's own names for a problem: its datasets keep the answer below ``reward_model``."""
    below = problem.columns.get("reward_model")
    truth = below.get("ground_truth", problem.answer) if isinstance(below, Mapping) else problem.answer
    return {
        "data_source": problem.columns.get("data_source", problem.source),
        "ground_truth": problem.columns.get("ground_truth", truth),
        "extra_info": problem.columns.get("extra_info", dict(problem.columns)),
    }


def _batch(function: Callable[..., Any], rows: Sequence[Row]) -> Any:
    return function([response for response, _ in rows], [problem for _, problem in rows])


def _trl(function: Callable[..., Any], rows: Sequence[Row], *, chat: bool = False) -> Any:
    """Call a TRL reward function: lists of prompts and completions, and every column of the dataset by name."""
    prompts: list[Any] = [problem.messages if chat else problem.prompt for _, problem in rows]
    completions: list[Any] = [
        [{"role": "assistant", "content": response}] if chat else response for response, _ in rows
    ]
    names = dict.fromkeys(name for _, problem in rows for name in problem.columns)
    columns: dict[str, list[Any]] = {"answer": [problem.answer for _, problem in rows]}
    columns |= {name: [problem.columns.get(name) for _, problem in rows] for name in names}
    # What is usual in TRL's examples and may have another name here.
    for usual in ("solution", "ground_truth"):
        columns.setdefault(usual, columns["answer"])
    arguments = {"prompts": prompts, "completions": completions, "completion_ids": [[] for _ in rows], **columns}
    return function(**_accepted(function, arguments))


def _trl_chat(function: Callable[..., Any], rows: Sequence[Row]) -> Any:
    return _trl(function, rows, chat=True)


_SINGLE: dict[str, Callable[[Callable[..., Any], str, Problem], Any]] = {
    "pair": _pair,
    "problem": _problem,
    "verl": _verl,
}
_BATCHED: dict[str, Callable[[Callable[..., Any], Sequence[Row]], Any]] = {
    "batch": _batch,
    "trl": _trl,
    "trl_chat": _trl_chat,
    "verl_batch": _verl_batch,
}
FORMS = (*_SINGLE, *_BATCHED)


def _read_trl(value: Any) -> Found:
    return NOT_APPLICABLE if value is None else as_verdict(value)


def _read_score(value: Any) -> Verdict:
    """Read verl's result: a number, or a dict with ``score``, ``acc`` (whether it is right), ``pred`` and others."""
    if not isinstance(value, Mapping):
        return as_verdict(value)
    correct = value.get("acc")
    numbers = {name: float(v) for name, v in value.items() if isinstance(v, int | float) and name != "score"}
    return Verdict(
        float(value["score"]),
        correct=None if correct is None else bool(correct),
        metrics=numbers,
        answer=str(value.get("pred") or ""),
    )


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function has parameters for; all of them where it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _gathered(waiting: Iterable[Any]) -> list[Any]:
    import asyncio  # large, and most verifiers do not need it

    async def together() -> list[Any]:
        return list(await asyncio.gather(*waiting))

    return asyncio.run(together())


def _finished(value: Any) -> Any:
    """Return the value itself, or what a coroutine returns."""
    return _gathered([value])[0] if inspect.isawaitable(value) else value


def _reads_content(function: Callable[..., Any]) -> bool:
    """Return whether a function, or a helper beside it that it calls, reads ``["content"]`` of a message."""
    inner = inspect.unwrap(function)
    inner = inner if inspect.isroutine(inner) else getattr(type(inner), "__call__", inner)  # noqa: B004
    code = getattr(inner, "__code__", None)
    if code is None:
        return False
    helpers = [getattr(inner, "__globals__", {}).get(name) for name in _names(code)]
    codes = [code, *(helper.__code__ for helper in helpers if inspect.isfunction(helper))]
    return any("content" in _constants(each) for each in codes)


def _names(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names, *(name for each in inner for name in _names(each))}


def _constants(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {*(c for c in code.co_consts if isinstance(c, str)), *(c for each in inner for c in _constants(each))}

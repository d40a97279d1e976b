"""``hacrl task try`` and ``hacrl task check`` in the terminal."""

from collections import Counter
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flows.doctor.task import check_task, faults_of, first_problems
from flows.home import Home
from flows.views.rollouts import STYLES
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.printable import printable
from hacrl_core.problems import Problem
from hacrl_core.verification import Verdict, check_error_share, check_verifier, verify_batch

_MOST_CHARACTERS = 600
_MOST_FAULTS = 10


def show_solutions(console: Console, task: str, options: dict[str, Any], count: int) -> None:
    """Print problems with the verdicts on their own solution and on an empty response."""
    config = VerifyConfig(verifier=task)
    check_verifier(config)
    asked = first_problems(task, options, count)
    responses = [[str(p.columns.get("solution") or p.answer), ""] for p in asked]
    problems = [p for p in asked for _ in range(2)]
    texts = [text for pair in responses for text in pair]
    verdicts = verify_batch(texts, [p.answer for p in problems], config, problems=problems)
    for index, problem in enumerate(asked):
        rows = zip(responses[index], verdicts[2 * index : 2 * index + 2], strict=True)
        console.print(_panel(problem, list(rows)))
    check_error_share(verdicts, config)


def show_answers(
    console: Console, task: str, options: dict[str, Any], count: int, agent: str, max_tokens: int | None, home: Home
) -> None:
    """Print an agent's responses to a few problems of a task, with their verdicts."""
    from flows.agents.evaluate import evaluate_agent
    from flows.agents.find import Changes, task_benchmark
    from hacrl_core.contracts.tables import EVALUATION, read_table

    chosen = task_benchmark(task, options, count, max_tokens or 256, split="all")
    name, (found,) = evaluate_agent(agent, [chosen], Changes(), home, console)
    by_id = {p.problem_id: p for p in first_problems_of(chosen)}
    console.print(Text(f"{name} on {task}", style="bold"))
    for row in read_table(found.table, EVALUATION).to_pylist():
        problem = by_id[row["problem_id"]]
        shown = _Row(row["verdict"], row["reward"], row["extracted_answer"])
        console.print(_panel(problem, [(row["response_text"], shown)]))


def first_problems_of(benchmark: Any) -> list[Problem]:
    """Return the problems of a benchmark."""
    from hacrl_core.problems import load_problems

    return list(load_problems(benchmark.problems).problems)


def show_check(console: Console, task: str, options: dict[str, Any], timeout: float) -> bool:
    """Print what a check of the task's examples found, and return whether all is well."""
    checked, seconds = check_task(task, options, VerifyConfig(verifier=task, timeout_seconds=timeout))
    faults = faults_of(checked)
    totals = Counter(each.kind for each in checked)
    failed = Counter(each.kind for each in faults)
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("responses", "checked", "as they should be"):
        table.add_column(title, justify="left" if title == "responses" else "right")
    for kind in ("right", "wrong", "hostile"):
        table.add_row(kind, str(totals[kind]), str(totals[kind] - failed[kind]))
    console.print(table)
    for each in faults[:_MOST_FAULTS]:
        asked, response = _short(each.problem.messages[-1]["content"], 60), _short(each.response, 60)
        console.print(Text(f"{each.kind}: {each.fault}: asked {asked!r}, response {response!r}", style="red"))
    if len(faults) > _MOST_FAULTS:
        console.print(f"… and {len(faults) - _MOST_FAULTS} more")
    verdict = f"{len(faults)} of {len(checked)} are not as they should be" if faults else "all as they should be"
    console.print(Text(f"{task}: {verdict}, in {seconds:.1f} s", style="bold red" if faults else "bold green"))
    return not faults


class _Row:
    """The part of a verdict that an evaluation keeps."""

    def __init__(self, verdict: str, reward: float, answer: str) -> None:
        self.verdict, self.raw, self.extracted_answer = verdict, reward, answer
        self.parts: dict[str, float] = {}
        self.message = ""


def _panel(problem: Problem, rows: list[tuple[str, Verdict | _Row]]) -> Panel:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("verdict", "reward", "answer found", "response"):
        table.add_column(title, overflow="fold")
    for text, verdict in rows:
        kind = str(verdict.verdict)
        parts = "".join(f"\n{name} {value:g}" for name, value in verdict.parts.items())
        note = f"\n{verdict.message}" if verdict.message else ""
        table.add_row(
            Text(kind, style=STYLES[kind]),
            f"{verdict.raw:g}{parts}",
            Text(printable(_short(verdict.extracted_answer, 80))),
            Text(printable(_short(text, _MOST_CHARACTERS) or "(empty)") + note),
        )
    question = Text(printable(_short("\n".join(m["content"] for m in problem.messages), _MOST_CHARACTERS)))
    columns = ", ".join(problem.columns)
    subtitle = " · ".join(
        part for part in (f"answer {printable(problem.answer)}" if problem.answer else "", columns) if part
    )
    grid = Table.grid()
    grid.add_row(question)
    grid.add_row(table)
    return Panel(grid, subtitle=Text(_short(subtitle, 100)), subtitle_align="right")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"

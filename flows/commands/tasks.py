"""``hacrl task``: look at a task and check it before anything is trained."""

from typing import Annotated, Any

import typer
from rich.console import Console

from flows.commands.common import HomeOption, one_line_errors
from flows.home import Home

app = typer.Typer(
    no_args_is_help=True,
    help="Look at a task and check it before anything is trained.\n\nA task is a Python file with "
    "[bold]problems[/bold] and [bold]verify(response, problem)[/bold]: my_task.py, a package's folder, "
    "module:my_package.tasks, or a task of a library such as reasoning_gym:chain_sum. docs/tasks.md is the tutorial.",
)

TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help="my_task.py, a package's folder, reasoning_gym:chain_sum, …")
]
OptionOption = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An argument of the task's problems(). Repeatable."),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="CPU seconds that one response may take in the verifier.")
]


@app.command("try")
@one_line_errors
def try_task(
    task: TaskArgument,
    agent: Annotated[
        str | None,
        typer.Option(
            help="Who answers: an agent of a campaign (campaign/agent@best), a checkpoint's folder or a hub id. "
            "Without one, the task's own solutions and an empty response are judged."
        ),
    ] = None,
    problems: Annotated[int, typer.Option("--problems", "-n", min=1, help="How many problems to show.")] = 3,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest response of the agent, in tokens.")] = None,
    option: OptionOption = None,
    home: HomeOption = None,
) -> None:
    """Show a few problems, responses and verdicts."""
    from flows.views.tasks import show_answers, show_solutions

    console = Console()
    if agent is None:
        show_solutions(console, task, _options(option), problems)
    else:
        show_answers(console, task, _options(option), problems, agent, max_tokens, Home.find(home))


@app.command()
@one_line_errors
def check(task: TaskArgument, option: OptionOption = None, timeout: TimeoutOption = 2.0) -> None:
    """Run the task's own examples: right answers must pass, wrong ones must fail, hostile ones must not hang.

    A task without examples is checked with the solutions of its first problems. The exit code is 1 where something
    fails.
    """
    from flows.views.tasks import show_check

    if not show_check(Console(), task, _options(option), timeout):
        raise typer.Exit(1)


def _options(given: list[str] | None) -> dict[str, Any]:
    from hacrl_core.config.loading import apply_override

    found: dict[str, Any] = {}
    for text in given or ():
        apply_override(found, text)
    return found

"""The ``hacrl`` command."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from flows.home import Home
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from hacrl_core.errors import HacrlError

# A user's own verifier lies beside the config; a console script does not look there by itself.
sys.path.append(str(Path.cwd()))

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train several different language models together on one verifiable task (HACPO), as a pipeline of cached stages.\n\n"
    "Start with [bold]hacrl run configs/demo.yaml[/bold]; run the same command again to resume after a crash or to see the result again.",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at configs: their schema, and what one resolves to.")
app.add_typer(config_app, name="config")

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="Folder for all state. Default: $HACRL_HOME, else .hacrl here.", show_default=False),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Change one setting, e.g. --set update.learning_rate=1e-4. Repeatable."
    ),
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A campaign's YAML file.")]
CampaignArgument = Annotated[str | None, typer.Argument(help="Name of a campaign; the latest one unless given.")]


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """The user's mistakes and known failures end in one line and an exit code, never in a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except HacrlError as problem:
            Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {_escape(str(problem))}", highlight=False)
            raise typer.Exit(problem.exit_code) from None
        except KeyboardInterrupt:
            Console(stderr=True, soft_wrap=True).print(
                "stopped; everything finished so far is saved. Run the same command again to go on."
            )
            raise typer.Exit(130) from None

    return wrapped


@app.command()
@one_line_errors
def run(config: ConfigArgument, set_: SetOption = None, home: HomeOption = None) -> None:
    """Run a campaign, or go on with it: stages whose artifacts exist are not run again."""
    from flows.launch import launch
    from flows.summary import show_summary

    console = Console()
    campaign = load_config(config, CampaignConfig, set_ or ())
    show_summary(console, launch(campaign, Home.find(home), console))


@app.command()
@one_line_errors
def status(home: HomeOption = None) -> None:
    """Show campaigns: how far each is, its rewards and accuracies, whether it is running."""
    from flows.looking import show_status

    show_status(Console(), Home.find(home))


@app.command()
@one_line_errors
def rollouts(
    campaign: CampaignArgument = None,
    iteration: Annotated[
        int | None,
        typer.Option("--iteration", "-i", help="Which iteration, from 0; the last complete one unless given."),
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Only what this agent wrote.")] = None,
    learner: Annotated[
        str | None, typer.Option(help="Whose advantages to show; the sampler's own unless given.")
    ] = None,
    verdict: Annotated[
        str | None, typer.Option(help="Only these: correct, incorrect, unparseable, timeout, error.")
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", "-n", min=1, help="How many prompts to show.")] = 3,
    home: HomeOption = None,
) -> None:
    """Look at the texts, verdicts and advantages of an iteration."""
    from flows.looking import show_rollouts

    show_rollouts(Console(), Home.find(home), campaign, iteration, agent, learner, verdict, prompts)


@app.command("eval")
@one_line_errors
def evaluate(
    agent: Annotated[
        str,
        typer.Argument(
            help="campaign/agent (newest version; campaign/agent@12 after 12 iterations), a checkpoint's folder, a .gguf file, "
            "or a hub id (org/model, org/model@revision)."
        ),
    ],
    benchmark: Annotated[
        list[str] | None,
        typer.Option(
            "--benchmark",
            "-b",
            help="A preset (math500, gsm8k_test, aime2025, …), arithmetic (held-out), one of the campaign's, or a YAML file. "
            "Repeatable; a campaign's agent is evaluated on all of its campaign's unless given.",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Answers to each problem; the benchmark's unless given.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy; the benchmark's unless given.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer; the benchmark's unless given.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many problems.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="builtin or vllm; the campaign's, else builtin, unless given.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Answers written at a time; lower it to save memory.")
    ] = None,
    home: HomeOption = None,
) -> None:
    """Evaluate any agent, trained here or not, on benchmarks; what was computed before is only shown."""
    from flows.evaluating import Changes, evaluate_agent
    from flows.scoreboard import show_evaluations

    console = Console()
    changes = Changes(samples, temperature, max_tokens, limit, engine, batch_size)
    show_evaluations(console, *evaluate_agent(agent, benchmark or (), changes, Home.find(home), console))


@app.command()
@one_line_errors
def doctor(home: HomeOption = None) -> None:
    """Say what is installed, what is missing and how to get it."""
    from flows.doctor import show_doctor

    raise typer.Exit(show_doctor(Console(), Home.find(home)))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a campaign's config, for editors and other tools."""
    import json

    sys.stdout.write(json.dumps(CampaignConfig.model_json_schema(), indent=2) + "\n")


@config_app.command("show")
@one_line_errors
def config_show(config: ConfigArgument, set_: SetOption = None) -> None:
    """Print the config with every default filled in."""
    import yaml

    campaign = load_config(config, CampaignConfig, set_ or ())
    sys.stdout.write(yaml.safe_dump(campaign.model_dump(mode="json"), sort_keys=False))


def _escape(text: str) -> str:
    return escape(text)


if __name__ == "__main__":
    app()

"""Commands that run and evaluate campaigns, and look into their rollouts."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.common import CampaignArgument, ConfigArgument, HomeOption, SetOption, one_line_errors
from flows.home import Home
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config

app = typer.Typer()


@app.command()
@one_line_errors
def run(
    config: ConfigArgument,
    set_: SetOption = None,
    more: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Run so many iterations beyond the last complete one, whatever the config says. Interrupted: the same again.",
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Run a campaign, or go on with it: stages whose artifacts exist are not run again."""
    from flows.run.goals import with_goal
    from flows.run.launch import launch
    from flows.views.summary import show_summary

    console = Console()
    campaign, place = load_config(config, CampaignConfig, set_ or ()), Home.find(home)
    if more is not None:
        campaign = with_goal(campaign, place, more, console.print)
    show_summary(console, launch(campaign, place, console))


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
    from flows.views.rollouts import show_rollouts

    show_rollouts(Console(), Home.find(home), campaign, iteration, agent, learner, verdict, prompts)


@app.command("eval")
@one_line_errors
def evaluate(
    agent: Annotated[
        str,
        typer.Argument(
            help="campaign/agent (newest version; campaign/agent@12 after 12 iterations, @best, @latest), a checkpoint's folder, a .gguf file, "
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
    from flows.agents.evaluate import evaluate_agent
    from flows.agents.find import Changes
    from flows.views.summary import show_evaluations

    console = Console()
    changes = Changes(samples, temperature, max_tokens, limit, engine, batch_size)
    show_evaluations(console, *evaluate_agent(agent, benchmark or (), changes, Home.find(home), console))


@app.command()
@one_line_errors
def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="CONFIG",
            help="Also check a campaign's agents: prompt, tokens, memory. Runs nothing.",
        ),
    ] = None,
    set_: SetOption = None,
    home: HomeOption = None,
) -> None:
    """Say what is installed, what is missing and how to get it; with --config, whether a campaign's agents are ready."""
    if config is None:
        from flows.doctor.machine import show_doctor

        raise typer.Exit(show_doctor(Console(), Home.find(home)))
    from flows.doctor.campaign import check_campaign

    raise typer.Exit(check_campaign(Console(), load_config(config, CampaignConfig, set_ or ())))

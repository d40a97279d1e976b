"""``hacrl run``, ``eval``, ``rollouts`` and ``doctor``: run campaigns, evaluate agents, and check before running."""

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
            help="Run this many iterations beyond the last complete one, whatever the config says. "
            "After an interruption, the same command continues to the same goal.",
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Write a trace of what every process did, for ui.perfetto.dev or speedscope."),
    ] = False,
    profile_ops: Annotated[
        list[str] | None,
        typer.Option(
            "--profile-ops", metavar="STAGE", help="With torch's operations in this stage's second call; repeatable."
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Run a campaign, or resume it: stages whose artifacts exist are not run again."""
    from flows.run.goals import with_goal
    from flows.run.launch import launch
    from flows.views.summary import show_summary

    console = Console()
    asked = ["runtime.profile=true"] if profile or profile_ops else []
    asked += [f"runtime.profile_ops=[{', '.join(profile_ops)}]"] if profile_ops else []
    campaign, place = load_config(config, CampaignConfig, [*(set_ or ()), *asked]), Home.find(home)
    if more is not None:
        campaign = with_goal(campaign, place, more, console.print)
    show_summary(console, launch(campaign, place, console))


@app.command()
@one_line_errors
def rollouts(
    campaign: CampaignArgument = None,
    iteration: Annotated[
        int | None,
        typer.Option("--iteration", "-i", help="Iteration to show, counted from 1. Default: the last complete one."),
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Show only responses of this agent.")] = None,
    learner: Annotated[
        str | None,
        typer.Option(
            help="Show the advantages that this agent learns from. Default: those of the agent that wrote the response."
        ),
    ] = None,
    verdict: Annotated[
        str | None,
        typer.Option(help="Show only responses with this verdict: correct, incorrect, unparseable, timeout or error."),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", "-n", min=1, help="Number of prompts to show.")] = 3,
    home: HomeOption = None,
) -> None:
    """Show the prompts, responses, verdicts and advantages of an iteration."""
    from flows.views.rollouts import show_rollouts

    show_rollouts(Console(), Home.find(home), campaign, iteration, agent, learner, verdict, prompts)


@app.command("eval")
@one_line_errors
def evaluate(
    agent: Annotated[
        str,
        typer.Argument(
            help="An agent of a campaign (campaign/agent is the latest version; campaign/agent@12 the one after 12 "
            "iterations; also @best and @latest), a checkpoint's folder, a .gguf file, or a hub id (org/model, "
            "org/model@revision)."
        ),
    ],
    benchmark: Annotated[
        list[str] | None,
        typer.Option(
            "--benchmark",
            "-b",
            help="A preset (math500, gsm8k_test, aime2025, …), arithmetic (held-out problems), a benchmark of the "
            "agent's campaign, or a YAML file. Repeatable. Default: all benchmarks of the agent's campaign.",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Responses to each problem. Default: as the benchmark says.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy. Default: as the benchmark says.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest response, in tokens. Default: as the benchmark says.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Evaluate only the first N problems.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="builtin or vllm. Default: the engine of the agent's campaign, else builtin.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Responses sampled at a time; a lower number saves memory.")
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            help="strict, math, exact, numeric or my_module:my_fn. Default: the verifier of the agent's campaign, else "
            "strict."
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Evaluate an agent, trained here or elsewhere, on benchmarks. Results in the store are not computed again."""
    from flows.agents.evaluate import evaluate_agent
    from flows.agents.find import Changes
    from flows.views.summary import show_evaluations

    console = Console()
    changes = Changes(samples, temperature, max_tokens, limit, engine, batch_size, verifier)
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
            help="Check the agents of this campaign instead: prompt, tokens, memory. Runs nothing.",
        ),
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="Run a self-test of about two minutes: kernel, score and update, ranks, memory, vLLM. Writes a JSON.",
        ),
    ] = False,
    try_: Annotated[
        bool,
        typer.Option(
            "--try",
            help="With --config: also make the agents, let each answer a few prompts, judge the answers and show them.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="With --smoke: where the JSON goes.")] = Path(
        "hacrl-smoke.json"
    ),
    set_: SetOption = None,
    home: HomeOption = None,
) -> None:
    """Show what is installed, what is missing and how to get it.

    With --config: whether a campaign would run, and with --try what its agents answer. With --smoke: whether this
    machine computes what it should, the first thing to run where there are GPUs. Parts that it cannot run are skipped,
    and the file says why.
    """
    if smoke:
        from flows.doctor.smoke import run_smoke

        raise typer.Exit(run_smoke(Console(), out))
    if config is None:
        from flows.doctor.machine import show_doctor

        raise typer.Exit(show_doctor(Console(), Home.find(home)))
    from flows.doctor.campaign import check_campaign

    campaign = load_config(config, CampaignConfig, set_ or ())
    code = check_campaign(Console(), campaign)
    if try_ and not code:
        from flows.doctor.trial import try_campaign

        code = try_campaign(Console(highlight=False), campaign, Home.find(home))
    raise typer.Exit(code)

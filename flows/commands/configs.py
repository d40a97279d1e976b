"""``hacrl config``: the schema of configs, and what a config resolves to."""

import json
import sys
from typing import Annotated

import typer
import yaml
from rich.console import Console

from flows.commands.common import ConfigArgument, SetOption, one_line_errors
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config

app = typer.Typer(no_args_is_help=True, help="Show the schema of configs, or what a config resolves to.")


@app.command("schema")
def config_schema(
    sweep: Annotated[bool, typer.Option("--sweep", help="Print the schema of sweeps instead.")] = False,
) -> None:
    """Print the JSON schema of a campaign's file, for editors and other tools.

    Save it, and name it in the first line of a config: # yaml-language-server: $schema=hacrl.schema.json
    """
    from hacrl_core.config.schema import campaign_schema, sweep_schema

    sys.stdout.write(json.dumps(sweep_schema() if sweep else campaign_schema(), indent=2) + "\n")


@app.command("show")
@one_line_errors
def config_show(config: ConfigArgument, set_: SetOption = None) -> None:
    """Print the config with every default filled in and every --set applied."""
    campaign = load_config(config, CampaignConfig, set_ or ())
    sys.stdout.write(yaml.safe_dump(campaign.model_dump(mode="json"), sort_keys=False))
    # As a comment: the output can be loaded again, and an agent's own preset still means what it says.
    sys.stdout.write("# What each agent's algorithm comes to:\n")
    for agent in campaign.agents:
        resolved = yaml.safe_dump({agent: campaign.objective(agent).model_dump(mode="json")}, sort_keys=False)
        sys.stdout.write("".join(f"#   {line}\n" for line in resolved.splitlines()))


@app.command("explain")
@one_line_errors
def config_explain(
    key: Annotated[
        str | None, typer.Argument(help="A setting or a group: algorithm, update.lora, alpha. Default: all of them.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Explain the settings of sweeps instead.")] = False,
) -> None:
    """Explain settings: type, default and meaning. An asterisk stands for any name or list element."""
    from flows.views.settings import show_settings
    from hacrl_core.config.reference import campaign_settings, matching, sweep_settings

    settings = sweep_settings() if sweep else campaign_settings()
    show_settings(Console(), settings if key is None else matching(settings, key))

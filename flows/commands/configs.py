"""``hacrl config``: the schema of configs, and what a config resolves to."""

import json
import sys

import typer
import yaml

from flows.commands.common import ConfigArgument, SetOption, one_line_errors
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config

app = typer.Typer(no_args_is_help=True, help="Show the schema of configs, or what a config resolves to.")


@app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a campaign's config, for editors and other tools."""
    sys.stdout.write(json.dumps(CampaignConfig.model_json_schema(), indent=2) + "\n")


@app.command("show")
@one_line_errors
def config_show(config: ConfigArgument, set_: SetOption = None) -> None:
    """Print the config with every default filled in and every --set applied."""
    campaign = load_config(config, CampaignConfig, set_ or ())
    sys.stdout.write(yaml.safe_dump(campaign.model_dump(mode="json"), sort_keys=False))

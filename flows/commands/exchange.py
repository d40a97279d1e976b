"""Commands for parties that share answers through a bucket."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.common import ConfigArgument, HomeOption, SetOption, one_line_errors
from flows.home import Home
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config

app = typer.Typer(no_args_is_help=True, help="Parties that share verified answers through a bucket, and no weights.")


@app.command("keygen")
@one_line_errors
def keygen(
    file: Annotated[Path, typer.Argument(help="Where to write the private key, e.g. north.key. It stays with you.")],
) -> None:
    """Make a party's key; prints the public key that goes under parties in the campaign's config."""
    from hacrl_core.exchange.signing import write_key

    print(write_key(file))


@app.command("status")
@one_line_errors
def status(config: ConfigArgument, set_: SetOption = None, home: HomeOption = None) -> None:
    """Show who has published what in each round, how many bytes it was, and whom this party has refused and why."""
    from flows.exchange.status import show_status

    show_status(Console(), load_config(config, CampaignConfig, set_ or ()), Home.find(home))


@app.command("audit")
@one_line_errors
def audit(
    config: ConfigArgument,
    agent: Annotated[str, typer.Option(help="The agent whose published answers are checked.")],
    iteration: Annotated[int, typer.Option(min=1, help="The round; the first one is 1.")],
    set_: SetOption = None,
    home: HomeOption = None,
) -> None:
    """Sample an agent's answers again with its committed version and seeds, and compare them with what was published.

    Run it in a home that has the agent's versions: that of its own party, or of an auditor who was given them.
    """
    from flows.exchange.audit import audit_answers

    campaign = load_config(config, CampaignConfig, set_ or ())
    raise typer.Exit(audit_answers(Console(), campaign, Home.find(home), agent, iteration - 1))


@app.command("tokenizer")
@one_line_errors
def tokenizer(
    config: ConfigArgument,
    agent: Annotated[str, typer.Option(help="The agent of another party that shares its tokenizer.")],
    file: Annotated[Path, typer.Argument(help="Where to write it, e.g. ben-tokenizer.json.")],
    set_: SetOption = None,
    home: HomeOption = None,
) -> None:
    """Write the tokenizer that a party has published for an agent, checked against the party's signature.

    The file is what the library tokenizers reads. It tells how the agent's answers split into tokens.
    """
    from flows.exchange.tokenizers import fetch_tokenizer

    campaign = load_config(config, CampaignConfig, set_ or ())
    fetch_tokenizer(Console(), campaign, Home.find(home), agent, file)


@app.command("picture")
@one_line_errors
def picture(
    config: ConfigArgument,
    file: Annotated[Path, typer.Argument(help="The SVG or PNG file to write.")],
    homes: Annotated[list[Path], typer.Option("--of", help="Home of a party; repeat it for several.")],
    set_: SetOption = None,
) -> None:
    """Draw who learned how much from whom."""
    from flows.exchange.picture import draw_exchange

    draw_exchange(load_config(config, CampaignConfig, set_ or ()), [Home.find(home) for home in homes], file)
    print(f"written: {file}")

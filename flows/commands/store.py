"""Commands for the care of the store."""

import re
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.common import HomeOption, one_line_errors
from flows.home import Home
from hacrl_core.config.operation import KeepConfig
from hacrl_core.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    help="Look after the store: what is in it, whether it is intact, what may go.",
)
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
VersionsOption = Annotated[bool, typer.Option("--versions", help="Also the weights of all versions.")]
VersionArgument = Annotated[str, typer.Argument(help="campaign/agent@version, e.g. demo/ada@12.")]


@app.command("ls")
@one_line_errors
def ls(
    campaign: Annotated[str | None, typer.Argument(help="Only this campaign's artifacts.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only this agent's.")] = None,
    stage: Annotated[str | None, typer.Option(help="Only this stage's, e.g. update.")] = None,
    versions: Annotated[bool, typer.Option("--versions", help="One line per version of an agent instead.")] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """List the artifacts in the store by campaign, agent and stage, with size and age."""
    from flows.store.inspect import show_ls, show_versions

    if versions:
        show_versions(Console(), Home.find(home), campaign, json)
    else:
        show_ls(Console(), Home.find(home), campaign, agent, stage, json)


@app.command("du")
@one_line_errors
def du(
    json: JsonOption = False,
    price: Annotated[float, typer.Option(help="Of the bucket: dollars per GB and month.", min=0)] = 0.023,
    home: HomeOption = None,
) -> None:
    """Show how much disk space each campaign takes, and how much of it no other campaign shares.

    Of a home with a bucket, also how much is in the bucket and what that costs.
    """
    from flows.store.bucket import show_bucket_size
    from flows.store.inspect import show_du
    from hacrl_core.artifacts import open_store

    found = Home.find(home)
    show_du(Console(), found, json)
    if not json:
        show_bucket_size(Console(), open_store(found.store), price)


@app.command("push")
@one_line_errors
def push(home: HomeOption = None) -> None:
    """Upload every artifact that is not in the bucket yet. Exit code 1 if the bucket does not answer."""
    from flows.store import bucket

    raise typer.Exit(bucket.push(Console(), Home.find(home)))


@app.command("pull")
@one_line_errors
def pull(
    stage: Annotated[str | None, typer.Option(help="Only this stage's artifacts, e.g. evaluate.")] = None,
    versions: VersionsOption = False,
    home: HomeOption = None,
) -> None:
    """Learn every artifact in the bucket, and download the files of tables; of versions only with --versions."""
    from flows.store import bucket

    raise typer.Exit(bucket.pull(Console(), Home.find(home), stage, versions=versions))


@app.command("sync")
@one_line_errors
def sync(versions: VersionsOption = False, home: HomeOption = None) -> None:
    """Push, then pull: afterwards this home and the bucket know the same artifacts."""
    from flows.store import bucket

    found = Home.find(home)
    raise typer.Exit(bucket.push(Console(), found) or bucket.pull(Console(), found, None, versions=versions))


@app.command("verify")
@one_line_errors
def verify(
    repair: Annotated[
        bool, typer.Option("--repair", help="Set damaged artifacts aside; running a campaign again recomputes them.")
    ] = False,
    bucket: Annotated[bool, typer.Option("--bucket", help="Check the bucket instead of this home.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Of a bucket: compare sizes, and hash nothing.")] = False,
    home: HomeOption = None,
) -> None:
    """Check every artifact against its manifest, hashing every byte. Exit code 1 if anything is damaged."""
    if bucket:
        from flows.store.bucket_care import verify_bucket

        raise typer.Exit(verify_bucket(Console(), Home.find(home), repair=repair, quick=quick))
    from flows.store.inspect import verify_store

    raise typer.Exit(verify_store(Console(), Home.find(home), repair))


@app.command("gc")
@one_line_errors
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Really delete; without it, only show what would go.")] = False,
    campaign: Annotated[
        str | None, typer.Option(help="Only versions of this campaign, nothing else. Default: all campaigns.")
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="Keep this many of the newest versions of each agent.")
    ] = None,
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="Keep the version that @best means: best on the campaign's benchmarks.")
    ] = False,
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep one version every this many iterations.")] = None,
    grace: Annotated[
        str | None,
        typer.Option(help="Keep what was made or used within this time: 90s, 30m, 1h, 7d. Default: 1h, a bucket 7d."),
    ] = None,
    bucket: Annotated[
        bool, typer.Option("--bucket", help="Of the bucket: what no home that uses it needs. Nothing of this home.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Delete what no campaign needs: files of old versions, by the keep policy, and artifacts that no record names.

    The policy is each campaign's own ([bold]keep[/bold] in its config; all versions without it), or what --keep-…
    says here. First, last and pinned versions always stay, and so does everything of a campaign that is running. Of a
    version only the files go: the campaign still counts as complete and is not run again.
    """
    if bucket:
        from flows.store.bucket_care import collect_bucket_garbage

        collect_bucket_garbage(Console(), Home.find(home), _seconds(grace or "7d"), really=yes)
        return
    from flows.store.gc import collect_garbage

    given = keep_last is not None or keep_best or keep_every is not None
    policy = KeepConfig(last=keep_last or 1, best=keep_best, every=keep_every) if given else None
    collect_garbage(Console(), Home.find(home), policy, campaign, _seconds(grace or "1h"), really=yes)


@app.command("pin")
@one_line_errors
def pin(version: VersionArgument, home: HomeOption = None) -> None:
    """Keep a version's files, whatever the policy says."""
    from flows.store import pins

    Console().print(pins.pin(Home.find(home), version), highlight=False, soft_wrap=True)


@app.command("unpin")
@one_line_errors
def unpin(version: VersionArgument, home: HomeOption = None) -> None:
    """Let the policy decide about a version again."""
    from flows.store import pins

    Console().print(pins.unpin(Home.find(home), version), highlight=False, soft_wrap=True)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise ConfigError(f"--grace {text}: not a time; give e.g. 90s, 30m, 1h or 7d")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]

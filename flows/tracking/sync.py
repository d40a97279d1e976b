"""``hacrl track sync``: brings MLflow up to date from the campaigns' records and the manifests, whatever it missed."""

from rich.console import Console
from rich.text import Text

from flows.home import Home
from flows.record.history import read_history
from flows.record.record import is_running, read_campaign
from flows.tracking.feed import ServerAway, probe
from flows.tracking.projection import Projection, quiet_environment, tracking_uri
from flows.views.rollouts import campaign_folders
from hacrl_core.artifacts import Store
from hacrl_core.errors import ConfigError


def sync_campaigns(console: Console, home: Home, name: str | None) -> int:
    """Returns the exit code: 1 where a server did not answer or a campaign could not be read."""
    quiet_environment()
    failed = 0
    for folder in [home.campaign(name)] if name is not None else campaign_folders(home):
        try:
            console.print(_sync(home, folder.name), highlight=False, soft_wrap=True)
        except (ServerAway, ConfigError) as problem:
            if name is not None and isinstance(problem, ConfigError):
                raise
            failed += 1
            console.print(Text(f"! {folder.name}: {problem}", style="yellow"), soft_wrap=True)
    return 1 if failed else 0


def _sync(home: Home, name: str) -> str:
    folder = home.campaign(name)
    config, store = read_campaign(folder), Store(home.store)
    if not config.tracking.enabled:
        return f"{name}: tracking is off in its config; nothing to do"
    history = read_history(store, folder)
    uri = tracking_uri(config, home)
    probe(uri)
    try:
        projection = Projection(config, store, uri, home)
        sent = projection.replay([happened.entry for happened in history.happened])
        if not is_running(folder):
            projection.finish("FINISHED" if history.complete else "KILLED")
    except Exception as problem:
        first = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise ServerAway(f"MLflow at {uri}: {first[:200]}; try again when it answers") from problem
    return f"{name}: {'brought up to date' if sent else 'was up to date'}, {history.done} iterations at {uri}"

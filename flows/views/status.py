"""``hacrl status`` and ``hacrl logs``: progress and cost of campaigns, and their events. Fits 80 columns."""

import time
from contextlib import nullcontext, suppress
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from flows.home import Home
from flows.record.goal import grows_by
from flows.record.history import History, last, read_history, state_of
from flows.record.log import NAME, Line, failure, follow, read_log
from flows.record.record import campaign_folders, find_campaign, is_running, last_activity, read_entries
from flows.store.bucket import durability
from flows.views.tables import FittingTable
from flows.views.text import can_redraw, clock, hacrl_command, moment, number, short, sparkline
from hacrl_core.artifacts import Store, open_store
from hacrl_core.errors import ConfigError
from hacrl_core.printable import printable

_STATES = {"running": "cyan", "complete": "green", "idle": "green", "stopped": "yellow", "failed": "red"}
_KINDS = {"warning": "yellow", "error": "red", "run": "bold", "end": "bold", "cached": "dim", "start": "dim"}
_REFRESH_SECONDS = 2.0
# Further past campaigns are counted, not listed, unless --all is given.
_SHOWN_ALWAYS = 12


def show_status(console: Console, home: Home, name: str | None, *, everything: bool) -> None:
    """Print one campaign, or the list of them; ``everything`` includes old ones."""
    console.print(_status(open_store(home.store), home, name, everything=everything))


def watch_status(console: Console, home: Home, name: str | None, *, everything: bool) -> None:
    """Show the status and refresh it until Ctrl-C; without a terminal, print it once."""
    if not can_redraw(console):
        show_status(console, home, name, everything=everything)
        return
    # One store for all refreshes: it caches the manifests that it has read.
    store = open_store(home.store)
    try:
        with Live(_status(store, home, name, everything=everything), console=console, auto_refresh=False) as live:
            live.refresh()
            while True:
                time.sleep(_REFRESH_SECONDS)
                live.update(_status(store, home, name, everything=everything), refresh=True)
    except KeyboardInterrupt:
        # Ctrl-C is the regular end of watching.
        return


def _status(store: Store, home: Home, name: str | None, *, everything: bool) -> RenderableType:
    folders = campaign_folders(home) if name is None else [find_campaign(home, name)]
    if not folders:
        return f"No campaigns in {home.root} yet; start one with: {hacrl_command()} run configs/demo.yaml"
    listed = [f for i, f in enumerate(folders) if everything or i < _SHOWN_ALWAYS or is_running(f)]
    problems: list[Text] = []
    failures: list[Text] = []
    durable: list[Text] = []
    campaigns, agents = _campaigns_table(), _agents_table()
    for folder in listed:
        try:
            history = read_history(store, folder)
        except ConfigError as problem:
            if name is not None:
                raise
            # A campaign that cannot be read must not hide the others.
            problems.append(Text(f"! {problem}", style="yellow"))
            continue
        _add_campaign(campaigns, history, folder)
        if uploaded := durability(store, read_entries(folder)):
            durable.append(Text(f"{history.config.name}: {uploaded}", style="dim"))
        _add_agents(agents, history)
        if state_of(history, folder) == "failed":
            failures.append(Text.assemble((f"{history.config.name} failed: ", "red"), printable(failure(folder) or "")))
    parts: list[RenderableType] = [*problems, campaigns, *([Text(), *failures] if failures else []), Text(), agents]
    parts += [Text(), *durable] if durable else []
    if name is not None and is_running(folders[0]) and (under_way := _under_way(folders[0])):
        parts += [Text(), Text(f"now: {', '.join(under_way)}", style="dim")]
    if len(listed) < len(folders):
        parts += [Text(), Text(f"{len(folders) - len(listed)} older campaigns; see them with --all", style="dim")]
    return Group(*parts)


def _campaigns_table() -> FittingTable:
    titles = ("campaign", "state", "iterations", "each", "left", "responses", "tokens", "stages", "last")
    return FittingTable(titles, droppable=("stages", "responses", "tokens", "each"), left=("state",))


def _add_campaign(table: FittingTable, history: History, folder: Path) -> None:
    state, cost = state_of(history, folder), history.cost()
    each = history.seconds_per_iteration()
    table.add(
        Text(history.config.name, style="bold"),
        Text(state, style=_STATES[state]),
        _iterations(history, folder, state),
        f"{each:.1f} s" if each is not None and each < 100 else clock(each),
        clock(history.seconds_left()) if not history.complete else "",
        short(cost.responses),
        short(cost.tokens),
        clock(cost.seconds),
        moment(last_activity(folder)),
    )


def _iterations(history: History, folder: Path, state: str) -> str:
    """Return the iterations done of all; between two scheduled runs, those done and what each run adds."""
    if state == "idle":
        return f"{history.done} (+{grows_by(folder, history.config.iterations)})"
    return f"{history.done}/{history.config.iterations}"


def _agents_table() -> FittingTable:
    titles = ("agent", "reward", "trend", "capability", "accuracy", "95 %")
    return FittingTable(titles, droppable=("trend", "capability"), left=("trend",))


def _add_agents(table: FittingTable, history: History) -> None:
    for agent in history.agents:
        rewards = history.rewards(agent)
        benchmark = next((b for b in history.benchmarks if history.accuracy(agent, b)), None)
        accuracy = history.accuracy(agent, benchmark) if benchmark else []
        low, high = (
            last(history.accuracy(agent, benchmark, f"accuracy_{s}")) if benchmark else None for s in ("low", "high")
        )
        table.add(
            Text.assemble((f"{history.config.name}/", "dim"), (agent, "bold")),
            number(last(rewards)),
            Text(sparkline([value for _, value in rewards[-16:]]), style="cyan"),
            number(last(history.capability(agent))),
            f"{last(accuracy):.1%}" if accuracy else "",
            f"{low:.1%}–{high:.1%}" if low is not None and high is not None else "",
        )


def _under_way(folder: Path) -> list[str]:
    """Return the stages that the last run has started and not finished, according to the log."""
    running: dict[str, None] = {}
    for line in read_log(folder):
        label = line.text.partition(": ")[0].partition(" (again")[0]
        if line.kind in ("run", "end"):
            running.clear()
        elif line.kind == "start":
            running[label] = None
        elif line.kind == "done":
            running.pop(label, None)
    return list(running)


# -- logs -------------------------------------------------------------------------------------------------------------


def show_log(
    console: Console, home: Home, name: str | None, *, lines: int, following: bool, problems: bool, worker: str | None
) -> None:
    """Print the last lines of a campaign's log, and new ones until Ctrl-C where ``following``."""
    folder = find_campaign(home, name)
    if not (folder / "config.json").exists():
        known = ", ".join(f.name for f in campaign_folders(home)) or "none yet"
        raise ConfigError(f"campaign {folder.name}: not found in {home.campaigns}; known campaigns: {known}")

    def wanted(line: Line) -> bool:
        if problems and line.kind not in ("warning", "error"):
            return False
        return worker is None or line.kind == f"|{worker}"

    everything = read_log(folder)
    if not everything and not following:
        console.print(f"{folder / NAME} is empty: campaign {folder.name} has not run with this version", soft_wrap=True)
    chosen = [line for line in everything if wanted(line)]
    if everything and not chosen and not following:
        of = f" of worker {worker}" if worker is not None else ""
        console.print(f"campaign {folder.name}: no {'warnings or errors' if problems else 'lines'}{of} in its log")
    # Ctrl-C is the regular end of following.
    with suppress(KeyboardInterrupt) if following else nullcontext():
        for line in chosen[-lines:] if lines else chosen:
            console.print(_coloured(line), soft_wrap=True)
        for new in follow(folder, len(everything)) if following else ():
            if new is not None and wanted(new):
                console.print(_coloured(new), soft_wrap=True)


def _coloured(line: Line) -> Text:
    return Text.assemble(
        (line.at, "dim"), " ", (f"{printable(line.kind):<8}", _KINDS.get(line.kind, "")), " ", printable(line.text)
    )

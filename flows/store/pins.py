"""Pinned versions keep their files, whatever a keep policy says, until they are unpinned.

A pin names the artifact, not only the version's number, so it also holds when the campaign continues with other
settings.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.home import Home
from flows.record.record import read_campaign, read_entries, versions_of
from hacrl_core.artifacts import open_store
from hacrl_core.artifacts.files import replace_synced
from hacrl_core.errors import ConfigError


@dataclass(frozen=True)
class Pin:
    """A pinned version of an agent, and the artifact behind it."""

    agent: str
    version: int
    stage: str
    key: str


def read_pins(folder: Path) -> list[Pin]:
    """Return the pins of the campaign in this folder."""
    try:
        return [Pin(**raw) for raw in json.loads((folder / "pins.json").read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError):
        raise ConfigError(f"{folder / 'pins.json'}: cannot be read; repair or delete it, then pin again") from None


def pin(home: Home, name: str) -> str:
    """Pin the version ``campaign/agent@number``; return a line for the user."""
    folder, found = _find(home, name)
    if open_store(home.store).is_collected(found.stage, found.key):
        raise ConfigError(f"{name}: its files have already been collected; there is nothing to pin")
    others = [p for p in read_pins(folder) if p.key != found.key]
    _write(folder, [*others, found])
    return f"{name} is pinned: its files stay until hacrl store unpin {name}"


def unpin(home: Home, name: str) -> str:
    """Remove the pin of ``campaign/agent@number``; return a line for the user."""
    folder, agent, version = _parse(home, name)
    pins = read_pins(folder)
    left = [p for p in pins if (p.agent, p.version) != (agent, version)]
    if len(left) == len(pins):
        known = ", ".join(f"{folder.name}/{p.agent}@{p.version}" for p in pins) or "none"
        raise ConfigError(f"{name}: not pinned; pinned here: {known}")
    _write(folder, left)
    return f"{name} is no longer pinned; the keep policy decides"


def _find(home: Home, name: str) -> tuple[Path, Pin]:
    folder, agent, version = _parse(home, name)
    config = read_campaign(folder)
    if agent not in config.agents:
        raise ConfigError(f"agent {agent}: not in campaign {folder.name}; its agents are {', '.join(config.agents)}")
    versions = versions_of(open_store(home.store), read_entries(folder), agent, config)
    if version >= len(versions):
        raise ConfigError(f"{name}: no such version; {folder.name}/{agent} has 0 to {len(versions) - 1}")
    return folder, Pin(agent, version, versions[version].stage, versions[version].key)


def _parse(home: Home, name: str) -> tuple[Path, str, int]:
    base, _, version = name.partition("@")
    campaign, _, agent = base.rpartition("/")
    if not campaign or not agent or not version.isdecimal():
        raise ConfigError(f"{name}: give campaign/agent@version, e.g. demo/ada@12 (the version after 12 iterations)")
    return home.campaign(campaign), agent, int(version)


def _write(folder: Path, pins: list[Pin]) -> None:
    replace_synced(folder / "pins.json", json.dumps([asdict(p) for p in pins], indent=1))

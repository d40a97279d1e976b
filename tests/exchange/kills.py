"""Kills one of three parties again and again, anywhere, and compares what the others have with campaigns left alone.

    python -m tests.exchange.kills --kills 100

South is killed with SIGKILL at random moments of its life and started again, over several campaigns, until it was
killed so often; then it is left alone. North and west are processes of their own that nobody touches. Every second
campaign has deadlines, so that a round closes without south.

Without deadlines all digests of all parties equal the central campaign's. With deadlines, north and west closed every
round with the same set, have the digests of the central campaign with these sets, and waited no longer than the
deadlines allow.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from flows.campaign import run_campaign
from flows.exchange.mailbox import Mailbox
from flows.rounds import Asked, Everybody, Offered
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.config.campaign import CampaignConfig
from tests.exchange.parties import PARTIES, OneParty, as_party, central, meeting, open_party, run_party
from tests.flow.conftest import Inline
from tests.patience import factor, patience

ROUNDS = 4
# With these, a round closes without south where it was killed at the wrong time.
SECONDS = 1.5
LONGEST_LIFE = 3.0
# In one campaign: the next one has deadlines where this one has none.
KILLS_EACH = 12


@dataclass(frozen=True)
class Told:
    """What came of one campaign."""

    kills: int
    seconds: float
    left_out: int  # rounds that closed without south
    problems: tuple[str, ...]


class Recorded(Everybody):
    """Closes each round as the parties have closed it."""

    def __init__(self, config: CampaignConfig, boxes: Mapping[str, Mailbox]) -> None:
        self._config, self._boxes = config, boxes

    def members(self, party: str, phase: str, iteration: int) -> tuple[str, ...] | None:
        """Return who was in a round; None where a party had nobody to hear and asked for no claims."""
        closing = self._boxes[party].kept_closing(phase, iteration)
        return closing.members if closing is not None else None

    def answered(self, iteration: int, asked: Asked) -> Sequence[str]:
        found = self.members("north", "answers", iteration)
        assert found is not None, f"round {iteration} was never closed"
        return [agent for agent in asked.answers if agent in found]

    def trusted(self, iteration: int, learner: str, heard: Sequence[str], offered: Offered) -> Sequence[str]:
        here = self._config.party_of(learner)
        claimed = self.members(here, "claims", iteration) or ()
        return [s for s in heard if self._config.party_of(s) == here or s in claimed]


def run_series(kills: int, folder: Path, seed: int, seed_store: Path) -> list[Told]:
    """Run campaigns until south was killed so often; return what came of each."""
    random = Random(seed)
    told: list[Told] = []
    while (done := sum(one.kills for one in told)) < kills or len(told) < 2:
        place = folder / f"campaign-{len(told)}"
        deadlines = len(told) % 2 == 1
        one = run_once(place, seed_store, random, min(-(-kills // 2), KILLS_EACH, kills - done), deadlines=deadlines)
        told.append(one)
        kind = "with deadlines" if deadlines else "without deadlines"
        print(f"campaign {len(told)} {kind}: {one}", flush=True)
        shutil.rmtree(place)
    return told


def run_once(folder: Path, seed_store: Path, random: Random, kills: int, *, deadlines: bool) -> Told:
    """Run one campaign of three parties, killing south at most so often."""
    seconds = min(SECONDS * factor(), 10.0) if deadlines else None
    config = meeting(folder, iterations=ROUNDS, evaluate={}, exchange={"round_seconds": seconds})
    for name in PARTIES:
        open_party(config, name, folder, seed_store)
    begun = time.monotonic()
    others = {name: _start(folder, name, config) for name in ("north", "west")}
    killed = 0
    south = _start(folder, "south", config)
    limit = begun + patience(600)
    while south.is_alive() and time.monotonic() < limit:
        south.join(random.uniform(0.0, LONGEST_LIFE) if killed < kills else 1.0)
        if south.is_alive() and killed < kills:
            assert south.pid is not None
            os.kill(south.pid, signal.SIGKILL)
            south.join()
            killed += 1
            south = _start(folder, "south", config)
    for process in others.values():
        process.join(max(1.0, limit - time.monotonic()))
    problems = [
        f"{name} ended with {process.exitcode}"
        for name, process in {**others, "south": south}.items()
        if process.exitcode != 0
    ]
    seconds = time.monotonic() - begun
    if problems:
        return Told(killed, seconds, 0, tuple(problems))
    left_out, found = compare(folder, config, seed_store, deadlines=deadlines)
    return Told(killed, seconds, left_out, tuple(found))


def compare(folder: Path, config: CampaignConfig, seed_store: Path, *, deadlines: bool) -> tuple[int, list[str]]:
    """Return in how many rounds south was left out, and every digest that is not as it must be."""
    parties = {name: OneParty(name, as_party(config, name, folder), folder / name) for name in PARTIES}
    if not deadlines:
        expected, left_out, problems = central(config, seed_store), 0, []
    else:
        closed = Recorded(config, {name: _mailbox(party) for name, party in parties.items()})
        places = [(phase, i) for i in range(ROUNDS) for phase in ("answers", "claims")]
        sets = {place: {closed.members(name, *place) for name in parties} - {None} for place in places}
        problems = [f"{phase} of round {i}: {one}" for (phase, i), one in sets.items() if len(one) > 1]
        left_out = sum("ben" not in (closed.members("north", "answers", i) or ()) for i in range(ROUNDS))
        runner = Inline(Store(seed_store))
        run_campaign(config, StageCalls(config), runner, closed)
        expected = {label: outcome.ref.digest for label, outcome in runner.outcomes.items()}
    for name, party in parties.items():
        digests = party.digests()
        wrong = [label for label, digest in digests.items() if expected.get(label) != digest]
        problems += [f"{name}: {label} differs" for label in wrong]
        if f"update {PARTIES[name][0]} #{ROUNDS - 1}" not in digests:
            problems.append(f"{name} is not complete")
    return left_out, problems


def _mailbox(party: OneParty) -> Mailbox:
    assert party.config.exchange.bucket is not None
    folder = party.home / "campaigns" / party.config.name / "exchange"
    return Mailbox(party.config, Bucket(party.config.exchange.bucket), folder, "", print)


def _start(folder: Path, name: str, config: CampaignConfig) -> multiprocessing.process.BaseProcess:
    """Start a party as a process that has everything imported already, so that its life is spent on the campaign."""
    process = multiprocessing.get_context("fork").Process(target=_live, args=(folder, name, config))
    process.start()
    return process


def _live(folder: Path, name: str, config: CampaignConfig) -> None:
    party = OneParty(name, as_party(config, name, folder), folder / name)
    run_party(party)
    if party.error is not None:
        print(f"{name}: {party.error!r}", file=sys.stderr, flush=True)
    # The threads of libraries do not survive a fork in a state in which they can be ended.
    os._exit(0 if party.error is None else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seed-store", type=Path, help="A store that has the agents' first versions.")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        store = chosen.seed_store or Path(name) / "central"
        # In a process of its own: what torch starts here would not survive the forks.
        first = multiprocessing.get_context("spawn").Process(target=_warm, args=(store, Path(name)))
        first.start()
        first.join()
        told = run_series(chosen.kills, Path(name), chosen.seed, store)
    problems = [problem for one in told for problem in one.problems]
    kills, left_out = sum(one.kills for one in told), sum(one.left_out for one in told)
    print(
        f"{kills} kills in {len(told)} campaigns of {ROUNDS} rounds, {left_out} rounds closed without it, "
        f"{len(problems)} problems"
    )
    print("\n".join(problems[:20]))
    return 1 if problems else 0


def _warm(store: Path, folder: Path) -> None:
    central(meeting(folder / "first", iterations=ROUNDS, evaluate={}), store)


if __name__ == "__main__":
    sys.exit(main())

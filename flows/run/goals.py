"""How far a run of a campaign goes when it is asked for so many *more* iterations.

The goal is fixed when the run begins and kept in the campaign's folder. A run that was cut off and is started again, by
the same command or by Prefect's retry of the same flow run, finishes its own goal and adds nothing. A new run counts
from the last complete iteration.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from flows.campaign import run_campaign
from flows.home import Home
from flows.record.goal import TERMINAL, Goal, read_goal, write_goal
from flows.record.record import read_entries
from flows.run.runner import CacheMiss, Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store, open_store
from hacrl_core.config.campaign import CampaignConfig
from stages.runner import lookup
from stages.spec import Handle, Outcome, StageCall


def with_goal(
    config: CampaignConfig, home: Home, more: int, say: Callable[[str], None], run: str = TERMINAL
) -> CampaignConfig:
    """Return the campaign with ``more`` iterations beyond the complete ones, or with the goal of a run cut off."""
    done, folder = complete_iterations(config, home), home.campaign(config.name)
    last = read_goal(folder)
    if last is not None and (last.run, last.more) == (run, more) and last.iterations > done:
        goal = last
        say(f"campaign {config.name}: {done} iterations are complete, going on to this run's goal of {goal.iterations}")
    else:
        goal = Goal(run, more, done + more)
        say(f"campaign {config.name}: {done} iterations are complete, {more} more to {goal.iterations}")
        write_goal(folder, goal)
    return CampaignConfig.model_validate({**config.model_dump(), "iterations": goal.iterations})


def complete_iterations(config: CampaignConfig, home: Home) -> int:
    """Count the iterations whose artifacts are all in the store *under these settings*, evaluations aside."""
    updates = [entry for entry in read_entries(home.campaign(config.name)) if entry.stage == "update"]
    last = max((entry.iteration for entry in updates if entry.iteration is not None), default=-1)
    recorded = config.model_copy(update={"iterations": last + 1})
    count = _Count(open_store(home.store))
    with suppress(CacheMiss):
        run_campaign(recorded, StageCalls(recorded), count)
    return count.done


@dataclass(frozen=True)
class _NotLookedUp:
    """Stands in for an evaluation; nothing needs its outcome."""

    call: StageCall

    def outcome(self) -> Outcome:
        raise CacheMiss("evaluations are not looked up")

    def done(self) -> bool:
        return False


@dataclass
class _Count:
    """A runner that looks calls up and counts iterations; the first gap ends the walk."""

    store: Store
    done: int = 0

    def submit(self, call: StageCall) -> Handle:
        if call.stage == "evaluate":
            return _NotLookedUp(call)
        found = lookup(self.store, call.bound())
        if found is None:
            raise CacheMiss(call.title)
        return Done(call, found)

    def iteration_done(self, iteration: int) -> None:
        self.done = iteration + 1

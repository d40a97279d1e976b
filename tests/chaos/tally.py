"""What a chaos run counts: kills, what they hit, and what went wrong."""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Plan:
    """When to kill a command."""

    kind: str  # "time", "point" or "call"
    text: str = ""  # for the hook or the library
    seconds: float = 0.0
    power: bool = False  # cut after the kill

    @property
    def step(self) -> str:
        """The kind of moment, to be counted."""
        return {"time": "time", "point": self.text.split(" ")[0]}.get(self.kind, " ".join(self.text.split(" ")[:2]))

    def __str__(self) -> str:
        return f"after {self.seconds:.2f} s" if self.kind == "time" else f"at {self.text}"


@dataclass
class Killed:
    plan: Plan
    command: str  # run or store
    stages: list[str]  # under way at that moment
    lost: float  # seconds of work under way that were not published
    full: bool


@dataclass
class Tally:
    kills: list[Killed] = field(default_factory=list)
    not_reached: int = 0  # plans of commands that ended before
    power_losses: int = 0
    damage: Counter[str] = field(default_factory=Counter)  # what they did to files
    restarts: list[float] = field(default_factory=list)  # from the command to the first stage that runs
    campaigns: int = 0
    identical: int = 0
    run_again: int = 0
    rewritten: int = 0
    duplicates: int = 0
    problems: list[str] = field(default_factory=list)

    def check(self, good: bool, problem: str) -> None:
        if not good:
            self.problems.append(problem)
            print(f"! {problem}", flush=True)


def summary(tally: Tally, seed: int, seconds: float) -> dict[str, Any]:
    """What a run found, as one JSON object."""
    steps = Counter(kill.plan.step for kill in tally.kills if kill.plan.kind == "point")
    calls = [kill.plan for kill in tally.kills if kill.plan.kind == "call"]
    return {
        "kills": len(tally.kills),
        "kills_full": sum(kill.full for kill in tally.kills),
        "kills_at_random_times": sum(kill.plan.kind == "time" for kill in tally.kills),
        "kills_in_system_calls": dict(Counter(plan.step for plan in calls)),
        "files_hit_by_them": len({plan.text.split(" ", 3)[3] for plan in calls}),
        "kills_of_gc": sum(kill.command == "store" for kill in tally.kills),
        "plans_not_reached": tally.not_reached,
        "power_losses": tally.power_losses,
        "damage_by_power_loss": dict(tally.damage),
        "stages_hit": dict(Counter(stage for kill in tally.kills for stage in kill.stages)),
        "publish_steps_hit": dict(steps),
        "campaigns": tally.campaigns,
        "identical_digests": tally.identical,
        "re_executed_published_stages": tally.run_again,
        "rewritten_artifacts": tally.rewritten,
        "duplicate_points": tally.duplicates,
        "seconds_lost_per_kill_median": round(statistics.median([kill.lost for kill in tally.kills] or [0.0]), 2),
        "seconds_lost_per_kill_max": round(max([kill.lost for kill in tally.kills] or [0.0]), 2),
        "seconds_to_first_stage_median": round(statistics.median(tally.restarts or [0.0]), 2),
        "problems": len(tally.problems),
        "seed": seed,
        "seconds": round(seconds),
    }

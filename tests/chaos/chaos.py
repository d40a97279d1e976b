"""Kill campaigns at random moments, run the same command again, and compare the end with that of a campaign that was
left alone.

    python -m tests.chaos.chaos --kills 100 --full 10 --seed 1

Kills are ``kill -9`` of the command's process group: at a random time, or at a kill point (see ``hook/killpoints.py``)
inside publishing, recording and tracking. Most commands are forked from a process that has everything imported
(``zygote.py``); ``--full`` of the kills hit a real ``hacrl run`` with Prefect, and have to end with the same bits. The
last line is one JSON object.
"""

import argparse
import copy
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.chaos import home as look
from tests.chaos.commands import environment, start, wait_until_gone
from tests.chaos.hook.killpoints import MLFLOW_STEPS, PUBLISH_STEPS, RECORD_STEPS
from tests.chaos.zygote import Zygote

STAGES = ("warmstart", "adopt", "sample", "generate", "verify", "credit", "score", "update", "evaluate")
MOST_KILLS = 14  # of one campaign; then it may finish
NEXT = 4  # kill points are chosen among the artifacts that come next, so that a campaign is killed often
PATIENCE = 600.0  # a command that takes longer hangs
NAME = "chaos"


@dataclass
class Killed:
    step: str  # "time", or the kill point
    stages: list[str]  # under way at that moment
    lost: float  # seconds of work under way that were not published
    full: bool


@dataclass
class Tally:
    kills: list[Killed] = field(default_factory=list)
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


def campaign(place: Path, iterations: int) -> dict[str, Any]:
    """Two agents, one of them adopted from a folder; every stage there is, and shards in generation."""
    from tests.flow.conftest import TINY

    raw = copy.deepcopy(TINY)
    del raw["agents"]["ben"]["warmstart"]
    raw["agents"]["ben"]["checkpoint"] = {"path": str(place / "checkpoint")}
    raw["agents"]["ada"]["warmstart"]["steps"] = 80
    raw["generate"]["batch_size"] = 6
    return {
        **raw,
        "name": NAME,
        "iterations": iterations,
        "verify": {"verifier": "tests.chaos.judge:check", "workers": 1},
        "tracking": {"enabled": True},
    }


def make_checkpoint(place: Path) -> None:
    """What the second agent is adopted from."""
    from hacrl_core.artifacts import Store
    from stages.runner import run_stage
    from stages.spec import Context, StageCall
    from stages.warmstart import WarmstartSlice
    from tests.flow.conftest import AGENT

    corpus = {"kinds": {"addition": 1.0}, "levels": {"easy": 1.0}}
    warmstart = {**AGENT, "steps": 40, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    config = WarmstartSlice.model_validate({"warmstart": warmstart, "corpus": corpus})
    made = run_stage(Store(place / "source"), StageCall("warmstart", config, seed=5, agent="ben"), Context())
    (place / "checkpoint").symlink_to(made.ref.path)


class Driver:
    def __init__(self, place: Path, seed: int, iterations: int) -> None:
        self.place, self.seed, self.rng, self.tally = place, seed, random.Random(seed), Tally()
        make_checkpoint(place)
        (place / "chaos.yaml").write_text(yaml.safe_dump(campaign(place, iterations)))
        self.words = ["run", str(place / "chaos.yaml")]
        self.zygote = Zygote(place)
        self.hit: Counter[tuple[str, str]] = Counter()
        self.reference: dict[str, look.Kept] = {}
        self.seconds = {False: 10.0, True: 120.0}  # what a whole campaign takes, forked and full

    def undisturbed(self) -> None:
        home, begun = self.place / "undisturbed", time.monotonic()
        code, text = self._command(home, {}, False, None)
        assert code == 0, text
        self.seconds[False] = time.monotonic() - begun
        self.reference = look.artifacts(home)
        self.points, self.runs = look.points(home), look.runs(home)
        self.records = look.recorded(home, NAME)[0]
        assert set(self.points.values()) == {1}
        assert {kept.stage for kept in self.reference.values()} == set(STAGES)
        print(
            f"undisturbed: {len(self.reference)} artifacts, {len(self.points)} points, {self.seconds[False]:.0f} s",
            flush=True,
        )

    def disturb(self, number: int, kills: int, full: bool) -> int:
        """One campaign, killed up to so many times and run again each time; returns how often it was."""
        home, log = self.place / f"home-{number}", self.place / f"log-{number}.jsonl"
        done, known = 0, dict[str, look.Kept]()
        while True:
            plan = self._plan(home, full) if done < min(kills, MOST_KILLS) else None
            before, begun = look.published(home), time.time()
            code, text = self._command(home, {"CHAOS_LOG": str(log)}, full, plan)
            self.tally.check(code in (0, -signal.SIGKILL), f"campaign {number}: exit code {code}\n{text}")
            events = [e for e in _events(log) if e["at"] >= begun]
            self._look_back(number, events, before, known, home, begun)
            if code != -signal.SIGKILL:
                break
            done += 1
            self._note(plan, events, home, full)
            self._say(number, plan)
        self._compare(number, home)
        return done

    # -- one command ---------------------------------------------------------------------------------------------------

    def _command(
        self, home: Path, hook: dict[str, str], full: bool, plan: tuple[str, str, float] | None
    ) -> tuple[int, str]:
        """Run it, kill it as planned; its exit code and output."""
        if plan is not None and plan[0] != "time":
            hook = hook | {"CHAOS_KILL": f"{plan[0]} {plan[1]} {int(plan[2])}"}
        deadline = PATIENCE if plan is None or plan[0] != "time" else plan[2]
        output = self.place / f"{home.name}.out"
        output.write_text("")
        environ = environment(home, hook)
        if full:
            with output.open("w") as file:
                process = start(self.words, environ, file)
            pid = process.pid
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                os.killpg(pid, signal.SIGKILL)
                code = process.wait()
        else:
            pid = self.zygote.start(self.words, environ, output)
            code = self.zygote.wait(pid, deadline)
            if code is None:
                os.killpg(pid, signal.SIGKILL)
                code = self.zygote.wait(pid, 60.0)
        left = wait_until_gone(home, 5.0, pid)
        self.tally.check(not left, f"{home.name}: processes left behind: {left}")
        hung = deadline == PATIENCE and code == -signal.SIGKILL and plan is None
        self.tally.check(not hung, f"{home.name}: no end within {PATIENCE} s\n{output.read_text()}")
        return code, output.read_text()

    def _plan(self, home: Path, full: bool) -> tuple[str, str, float]:
        """Where to kill: a kill point that was hit least so far and can still come, or any time."""
        if self.rng.random() < (0.5 if full else 0.25):
            return ("time", "*", self.rng.uniform(0.05, self.seconds[full] / 4))
        there = look.published(home)
        order = sorted(self.reference.values(), key=lambda kept: kept.started)
        soon = [kept.stage for kept in order if kept.key not in there][:NEXT] or ["*"]
        choices = [(step, stage) for step in PUBLISH_STEPS + RECORD_STEPS for stage in sorted(set(soon))]
        choices += [(step, "*") for step in (*MLFLOW_STEPS, "shard")]
        least = min(self.hit[choice] for choice in choices)
        step, stage = self.rng.choice([choice for choice in choices if self.hit[choice] == least])
        self.hit[(step, stage)] += 1  # also where it is not reached: others should have their turn
        return (step, stage, self.rng.randint(1, max(1, soon.count(stage))))

    # -- what came of it -----------------------------------------------------------------------------------------------

    def _look_back(self, number: int, events: list[dict], before: dict, known: dict, home: Path, begun: float) -> None:
        ran = [event for event in events if event["event"] == "run"]
        again = [event for event in ran if event["key"] in before]
        self.tally.run_again += len(again)
        self.tally.check(not again, f"campaign {number}: ran again although published: {again}")
        if ran:
            self.tally.restarts.append(ran[0]["at"] - begun)
        now = look.artifacts(home)
        changed = [kept.stage for key, kept in known.items() if now.get(key) != kept]
        self.tally.rewritten += len(changed)
        self.tally.check(not changed, f"campaign {number}: published artifacts changed: {changed}")
        known.update(now)

    def _note(self, plan: tuple[str, str, float] | None, events: list[dict], home: Path, full: bool) -> None:
        ended = {e["key"] for e in events if e["event"] == "done"} | set(look.published(home))
        last = max((event["at"] for event in events), default=0.0)
        killed = next((event for event in events if event["event"] == "killed"), None)
        moment = killed["at"] if killed else last
        under_way = [e for e in events if e["event"] == "run" and e["key"] not in ended]
        stages = [e["stage"] for e in under_way] + ([killed["stage"]] if killed and killed["stage"] != "*" else [])
        lost = sum(max(0.0, moment - e["at"]) for e in under_way)
        assert plan is not None
        self.tally.kills.append(Killed(plan[0], sorted(set(stages)), lost, full))

    def _say(self, number: int, plan: tuple[str, str, float] | None) -> None:
        kill = self.tally.kills[-1]
        how = f"after {plan[2]:.2f} s" if plan and plan[0] == "time" else f"at {plan[0]} {plan[1]}" if plan else ""
        under_way = ", ".join(kill.stages) or "nothing"
        mode = "full" if kill.full else "forked"
        print(f"kill {len(self.tally.kills):3d}  campaign {number} {mode}  {how}; under way: {under_way}", flush=True)

    def _compare(self, number: int, home: Path) -> None:
        tally, where = self.tally, f"campaign {number}"
        tally.campaigns += 1
        found = {key: (kept.stage, kept.content) for key, kept in look.artifacts(home).items()}
        wanted = {key: (kept.stage, kept.content) for key, kept in self.reference.items()}
        tally.identical += found == wanted
        tally.check(found == wanted, f"{where}: {len(dict(found.items() - wanted.items()))} artifacts differ")
        points = look.points(home)
        tally.duplicates += sum(count - 1 for count in points.values())
        tally.check(
            points == self.points, f"{where}: points in MLflow differ: {list((points - self.points).items())[:5]}"
        )
        tally.check(look.runs(home) == self.runs, f"{where}: MLflow runs {look.runs(home)}")
        tally.check(look.leftovers(home) == [], f"{where}: left behind {look.leftovers(home)}")
        tally.check(look.recorded(home, NAME)[0] == self.records, f"{where}: the record differs")


def _events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def summary(driver: Driver, seconds: float) -> dict[str, Any]:
    tally = driver.tally
    steps = Counter(kill.step for kill in tally.kills)
    return {
        "kills": len(tally.kills),
        "kills_full": sum(kill.full for kill in tally.kills),
        "kills_at_random_times": steps.pop("time", 0),
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
        "seed": driver.seed,
        "seconds": round(seconds),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=100, help="how many in all")
    options.add_argument("--full", type=int, default=10, help="how many of them hit a real hacrl run with Prefect")
    options.add_argument("--iterations", type=int, default=4)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--minutes", type=float, default=40, help="no new campaign is begun after so long")
    given = options.parse_args()
    print(f"seed {given.seed}", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hacrl-chaos-", ignore_cleanup_errors=True) as place:
        driver = Driver(Path(place), given.seed, given.iterations)
        driver.undisturbed()
        number = 0
        for share, full in ((given.kills - given.full, False), (given.full, True)):
            while share > 0 and time.monotonic() - begun < 60 * given.minutes:
                number += 1
                share -= driver.disturb(number, share, full)
        driver.zygote.close()
    print(json.dumps(summary(driver, time.monotonic() - begun)), flush=True)
    sys.exit(bool(driver.tally.problems))


if __name__ == "__main__":
    main()

"""Kill campaigns at random moments, run the same command again, and compare the end with that of a campaign that was
left alone.

    python -m tests.chaos.chaos --kills 100 --full 10 --seed 1

Kills are ``kill -9`` of the command's process group: at a random time, at a kill point (see ``hook/killpoints.py``)
inside publishing, recording and tracking, or before, after and inside a system call (see ``systemcalls.py``). After a
third of the last kind the power is cut: files lose what was not synced. Most commands are forked from a process that
has everything imported (``zygote.py``); ``--full`` of the kills hit a real ``hacrl run`` with Prefect, and have to end
with the same bits, spread over the whole run. Some campaigns that are complete are cleaned with ``hacrl store gc``,
which is killed as well. The last line is one JSON object, also where the time is up or SIGINT or SIGTERM ends the run.
"""

import argparse
import contextlib
import copy
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.chaos import home as look
from tests.chaos import systemcalls
from tests.chaos.commands import environment, start, wait_until_gone
from tests.chaos.hook.killpoints import MLFLOW_STEPS, PUBLISH_STEPS, RECORD_STEPS
from tests.chaos.tally import Killed, Plan, Tally, summary
from tests.chaos.zygote import Zygote
from tests.patience import patience

STAGES = ("warmstart", "adopt", "sample", "generate", "verify", "credit", "score", "update", "evaluate")
MOST_KILLS = 14  # of one campaign; then it may finish
MOST_KILLS_OF_FULL = 5  # of one campaign of the real command
NEXT = 4  # kill points are chosen among the artifacts that come next, so that a campaign is killed often
MOST_KILLS_OF_GC = 5
PATIENCE = 600.0  # a command that takes longer on a quiet machine hangs
NAME = "chaos"
GC = ["store", "gc", "--yes", "--grace", "0s", "--keep-last", "1"]


class Enough(Exception):
    """The time is up, or somebody ended the run: what it found so far is to be told."""


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
    """Runs, kills and compares campaigns below one folder."""

    def __init__(self, place: Path, seed: int, iterations: int, zygote: Zygote, library: str) -> None:
        self.place, self.seed, self.rng, self.tally = place, seed, random.Random(seed), Tally()
        self.zygote, self.library, self.places = zygote, library, list[systemcalls.Place]()
        make_checkpoint(place)
        (place / "chaos.yaml").write_text(yaml.safe_dump(campaign(place, iterations)))
        self.words = ["run", str(place / "chaos.yaml")]
        self.hit: Counter[tuple[str, str]] = Counter()
        self.hit_calls: Counter[str] = Counter()
        self.reference: dict[str, look.Kept] = {}
        self.seconds = {False: 10.0, True: 120.0}  # what a whole campaign takes, forked and full
        self.until, self.ended_by = math.inf, 0  # the time when the run is over, and the signal that ended it

    def over(self) -> bool:
        """Return whether the run is to end now, with what it has found so far."""
        return self.ended_by != 0 or time.monotonic() >= self.until

    def undisturbed(self) -> None:
        """Run the campaign that the others are compared with, and see which system calls it makes."""
        home, begun = self.place / "undisturbed", time.monotonic()
        code, text = self._command(self.words, home, False, None)
        assert code == 0, text
        self.seconds[False] = time.monotonic() - begun
        self.reference = look.artifacts(home)
        self.points, self.runs = look.points(home), look.runs(home)
        self.records = look.recorded(home, NAME)[0]
        assert set(self.points.values()) == {1}
        assert {kept.stage for kept in self.reference.values()} == set(STAGES)
        self.places = systemcalls.places(systemcalls.read_log(self._calls(home)), len(self.reference))
        assert self.places or not self.library
        print(
            f"undisturbed: {len(self.reference)} artifacts, {len(self.points)} points, {len(self.places)} kinds of "
            f"system calls, {self.seconds[False]:.0f} s",
            flush=True,
        )

    def disturb(self, number: int, kills: int, full: bool) -> int:
        """One campaign, killed up to so many times and run again each time; returns how often it was."""
        home, known = self.place / f"home-{number}", dict[str, look.Kept]()
        done = self._kill_and_repeat(number, home, self.words, kills, full, known)
        self._compare(number, home)
        if number % 2 == 0 and not full and self.library and done < kills:
            done += self._clean(number, home, min(kills - done, MOST_KILLS_OF_GC), known)
        return done

    def _clean(self, number: int, home: Path, kills: int, known: dict[str, look.Kept]) -> int:
        """Kill ``hacrl store gc`` on a complete campaign: it stays complete, and its store whole."""
        begun, before = time.time(), look.published(home)
        done = self._kill_and_repeat(number, home, GC, kills, False, known)
        for words in (self.words, ["store", "verify"]):
            code, text = self._command(words, home, False, None)
            self.tally.check(code == 0, f"campaign {number} after gc: {words[:2]} ended with {code}\n{text}")
        # What a power cut took back had been renamed and not synced when its campaign was killed: it may run again.
        before = {key: there for key, there in before.items() if key in known}
        self._look_back(number, [e for e in _events(self._log(home)) if e["at"] >= begun], before, known, home, begun)
        collected = list((home / "store" / "objects").glob("*/*/collected.json"))
        self.tally.check(bool(collected), f"campaign {number}: gc collected nothing")
        return done

    def _kill_and_repeat(
        self, number: int, home: Path, words: list[str], kills: int, full: bool, known: dict[str, look.Kept]
    ) -> int:
        done = 0
        while True:
            plan = self._plan(home, words, full) if done < kills else None
            before, begun = look.published(home), time.time()
            code, text = self._command(words, home, full, plan)
            self.tally.check(code in (0, -signal.SIGKILL), f"campaign {number}: exit code {code}\n{text}")
            events = [e for e in _events(self._log(home)) if e["at"] >= begun]
            self._look_back(number, events, before, known, home, begun)
            if code != -signal.SIGKILL:
                if plan is not None:
                    self.tally.not_reached += 1
                    print(f"          campaign {number}: ended before {plan}", flush=True)
                return done
            done += 1
            assert plan is not None
            self._note(plan, words[0], events, home, full)
            print(f"kill {len(self.tally.kills):3d}  campaign {number} {self._told()}", flush=True)
            if plan.power:
                self._cut_power(home, known)

    # -- one command ---------------------------------------------------------------------------------------------------

    def _log(self, home: Path) -> Path:
        return self.place / f"{home.name}.jsonl"

    def _calls(self, home: Path) -> Path:
        return self.place / f"{home.name}.calls"

    def _hook(self, home: Path, plan: Plan | None) -> dict[str, str]:
        hook = {"CHAOS_LOG": str(self._log(home))}
        if self.library:
            hook |= {"CHAOS_FS_HOME": str(home), "CHAOS_FS_LOG": str(self._calls(home)), "LD_PRELOAD": self.library}
        if plan is not None and plan.kind != "time":
            hook["CHAOS_KILL" if plan.kind == "point" else "CHAOS_FS_KILL"] = plan.text
        return hook

    def _command(self, words: list[str], home: Path, full: bool, plan: Plan | None) -> tuple[int, str]:
        """Run it, kill it as planned; its exit code and output."""
        timed = plan is not None and plan.kind == "time"
        deadline = plan.seconds if plan is not None and timed else patience(PATIENCE)
        output = self.place / f"{home.name}.out"
        output.write_text("")
        environ = environment(home, self._hook(home, plan))
        poll: Callable[[], int | None]
        if full:
            with output.open("w") as file:
                process = start(words, environ, file)
            pid, poll = process.pid, process.poll
        else:
            pid = self.zygote.start(words, environ, output)
            poll = partial(self.zygote.code, pid)
        code = _wait(poll, deadline, self.over)
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            code = _wait(poll, patience(60.0))
        if self.over():
            raise Enough
        left = wait_until_gone(home, patience(5.0), pid)
        self.tally.check(not left, f"{home.name}: processes left behind: {left}")
        hung = code == -signal.SIGKILL and plan is None
        self.tally.check(not hung, f"{home.name}: no end within {deadline:.0f} s\n{output.read_text()}")
        assert code is not None
        return code, output.read_text()

    def _plan(self, home: Path, words: list[str], full: bool) -> Plan:
        """When to kill: at moments that were hit least so far and can still come, or at any time."""
        if words is GC:
            moments = [
                (call, moment) for call in ("rename", "unlink", "write", "fsync") for moment in ("before", "after")
            ]
            call, moment = self.rng.choice(moments)
            return Plan("call", f"{call} {moment} {self.rng.randint(1, 3)} store/*", power=self.rng.random() < 0.3)
        there = look.published(home)
        if self.places and self.rng.random() < 0.5:
            text = systemcalls.choose(self.places, len(there) / len(self.reference), self.hit_calls, self.rng)
            if text is not None:
                return Plan("call", text, power=self.rng.random() < 1 / 3)
        if self.rng.random() < (0.5 if full else 0.25):
            return Plan("time", seconds=self.rng.uniform(0.05, self.seconds[full] / 4))
        order = sorted(self.reference.values(), key=lambda kept: kept.started)
        soon = [kept.stage for kept in order if kept.key not in there][:NEXT] or ["*"]
        choices = [(step, stage) for step in PUBLISH_STEPS + RECORD_STEPS for stage in sorted(set(soon))]
        choices += [(step, "*") for step in (*MLFLOW_STEPS, "shard")]
        least = min(self.hit[choice] for choice in choices)
        step, stage = self.rng.choice([choice for choice in choices if self.hit[choice] == least])
        self.hit[(step, stage)] += 1  # also where it is not reached: others should have their turn
        return Plan("point", f"{step} {stage} {self.rng.randint(1, max(1, soon.count(stage)))}")

    def _cut_power(self, home: Path, known: dict[str, look.Kept]) -> None:
        """Take from the home what was not synced; what was published and synced has to stay."""
        done, taken_back = systemcalls.lose_power(home, systemcalls.read_log(self._calls(home)), self.rng)
        self._calls(home).write_text("")
        self.tally.power_losses += 1
        self.tally.damage.update(done)
        for path in taken_back:
            known.pop(Path(path).name, None)
        print(f"          power cut: {dict(done) or 'everything was synced'}", flush=True)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def _look_back(self, number: int, events: list[dict], before: dict, known: dict, home: Path, begun: float) -> None:
        ran = [event for event in events if event["event"] == "run"]
        again = [event for event in ran if event["key"] in before]
        self.tally.run_again += len(again)
        self.tally.check(not again, f"campaign {number}: ran again although published: {again}")
        if ran:
            self.tally.restarts.append(ran[0]["at"] - begun)
        try:
            now = look.artifacts(home)
        except (OSError, AssertionError) as problem:
            self.tally.check(False, f"campaign {number}: a published file is damaged or gone: {problem}")
            return
        changed = [kept.stage for key, kept in known.items() if now.get(key) != kept]
        self.tally.rewritten += len(changed)
        self.tally.check(not changed, f"campaign {number}: published artifacts changed: {changed}")
        known.update(now)

    def _note(self, plan: Plan, command: str, events: list[dict], home: Path, full: bool) -> None:
        ended = {e["key"] for e in events if e["event"] == "done"} | set(look.published(home))
        last = max((event["at"] for event in events), default=0.0)
        killed = next((event for event in events if event["event"] == "killed"), None)
        moment = killed["at"] if killed else last
        under_way = [e for e in events if e["event"] == "run" and e["key"] not in ended]
        stages = [e["stage"] for e in under_way] + ([killed["stage"]] if killed and killed["stage"] != "*" else [])
        lost = sum(max(0.0, moment - e["at"]) for e in under_way)
        self.tally.kills.append(Killed(plan, command, sorted(set(stages)), lost, full))

    def _told(self) -> str:
        kill = self.tally.kills[-1]
        mode = "full" if kill.full else "forked" if kill.command == "run" else "gc"
        return f"{mode}  {kill.plan}; under way: {', '.join(kill.stages) or 'nothing'}"

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
        names = systemcalls.unsynced(systemcalls.read_log(self._calls(home)))[1]
        unsafe = [name.path for name in names if name.path.startswith("campaigns/")]
        tally.check(not unsafe, f"{where}: complete, and a power cut may still take {unsafe}")


def start_zygote(place: Path) -> tuple[Zygote, str]:
    """Start the process that commands are forked from, with the library where it can be built, and return both."""
    try:
        library = str(systemcalls.build(place))
    except systemcalls.Unavailable as problem:
        print(f"left out: {problem}", flush=True)
        return Zygote(place), ""
    return Zygote(place, variables={"LD_PRELOAD": library}), library


def attack(driver: Driver, kills: int, full: int, minutes: float) -> dict[str, Any]:
    """Kill campaigns until so many kills are done or the time is up; return what came of it.

    A campaign that is under way at the end is not compared; what was checked after each of its kills counts.
    """
    begun, number = time.monotonic(), 0
    driver.until = begun + 60 * minutes
    left = {True: full, False: kills - full}
    with contextlib.suppress(Enough):
        driver.undisturbed()
        while sum(left.values()) > 0 and not driver.over():
            number += 1
            # The real command has its turns from the beginning, so that a run that is cut short has them as well.
            real = left[True] > 0 and (left[False] <= 0 or left[True] * kills >= full * sum(left.values()))
            left[real] -= driver.disturb(number, min(left[real], MOST_KILLS_OF_FULL if real else MOST_KILLS), real)
    return summary(driver.tally, driver.seed, time.monotonic() - begun)


def _wait(poll: Callable[[], int | None], seconds: float, over: Callable[[], bool] = lambda: False) -> int | None:
    """Wait for an exit code at most so long, and no longer once the run is over."""
    deadline = time.monotonic() + seconds
    while (code := poll()) is None and time.monotonic() < deadline and not over():
        time.sleep(0.02)
    return code


def _events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=100, help="how many in all")
    options.add_argument("--full", type=int, default=10, help="how many of them hit a real hacrl run with Prefect")
    options.add_argument("--iterations", type=int, default=4)
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--minutes", type=float, default=40, help="the run ends after so long and tells what it found")
    given = options.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="hacrl-chaos-", ignore_cleanup_errors=True) as place:
        zygote, library = start_zygote(Path(place))
        driver = Driver(Path(place), given.seed, given.iterations, zygote, library)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _frame: setattr(driver, "ended_by", got))
        found = attack(driver, given.kills, given.full, given.minutes)
        zygote.close()
    if driver.over():
        print(f"ended before {given.kills} kills", flush=True)
    print(json.dumps(found), flush=True)
    sys.exit(bool(driver.tally.problems))


if __name__ == "__main__":
    main()

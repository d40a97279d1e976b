"""The real flow at the size of a cluster, on one machine: stages are sleeps from the plan's table of rates.

Campaigns of the paper's size run side by side, each on eight "GPUs": the campaign's own code, runner, seats, record and
store; only what a stage computes is replaced by sleeping, in compressed time. Compared with ``hacrl plan``: how long
the campaigns take, how much of a core the driver needs, and how much of the time goes into looking up artifacts.
The last table says how long a reproduction of the paper takes by the plan. Ends with one JSON line.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import flows.run.runner as runner_module
from flows.plan.graph import PlannedCalls, record_graph, workload_of
from flows.plan.plan import make_plan, parse_cluster
from flows.plan.rates import Rates, Workload, load_rates, stage_seconds
from flows.plan.simulate import simulate
from flows.record.record import Record
from flows.run.events import Listener
from flows.run.line import Line, urgency_of
from flows.run.placement import role_of, seats_of
from flows.run.runner import ThreadRunner
from flows.run.session import run_in_session
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from hacrl_core.contracts.manifest import Identity, Provenance
from stages.spec import Outcome, StageCall, find_stage

PAPER = Path(__file__).resolve().parents[1] / "configs" / "paper"
GPUS = 8
METRICS = {"verify/reward_mean": 0.5, "credit/capability": 0.5}
# The paper: six methods, eight seeds, on each pair.
METHODS, SEEDS = 6, 8


class Sleeping:
    """An executor whose stages sleep for as long as the table of rates says, and publish a file of a few bytes."""

    def __init__(self, config: CampaignConfig, store: Store, work: Workload, rates: Rates, compress: float) -> None:
        self._store = store
        self._work = work
        self._rates = rates
        self._compress = compress
        self._seats = seats_of(config, GPUS)
        self._lines = {seat.name: Line() for seat in self._seats.values()}

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        """Sleep in the call's seat, which serves one call at a time."""
        role = role_of(call.stage)
        if role == "here":
            return self._sleep(call)
        with self._lines[self._seats[call.agent, role].name].turn(urgency_of(call)):
            return self._sleep(call)

    def close(self, *, now: bool) -> None:
        """Nothing was started."""

    def _sleep(self, call: StageCall) -> Outcome:
        identity = find_stage(call.stage).identity(call)
        with self._store.lock(identity.key):
            # Campaigns share what has the same key: first versions.
            return runner_module.lookup(self._store, call) or self._publish(call, identity)

    def _publish(self, call: StageCall, identity: Identity) -> Outcome:
        begun = time.perf_counter()
        staged = self._store.stage_folder(identity.key)
        (staged / "content.json").write_text(json.dumps({"key": identity.key}))
        provenance = Provenance(started=time.time(), finished=time.time(), seconds=0.0)
        ref = self._store.publish(staged, identity, {}, METRICS, {}, provenance)
        seconds = stage_seconds(call, self._work, self._rates) / self._compress
        time.sleep(max(0.0, seconds - (time.perf_counter() - begun)))
        return Outcome(ref, False, seconds, METRICS)


@dataclass
class LookUps:
    """How long the runners looked artifacts up, in all threads together."""

    seconds: float = 0.0
    count: int = 0

    def install(self) -> None:
        """Measure the runner's own look-ups."""
        real, lock = runner_module.lookup, threading.Lock()

        def measured(store: Store, call: StageCall) -> Outcome | None:
            begun = time.perf_counter()
            found = real(store, call)
            with lock:
                self.seconds += time.perf_counter() - begun
                self.count += 1
            return found

        runner_module.lookup = measured


def paper_config(iterations: int, name: str = "qwen3-4b-8b-base") -> CampaignConfig:
    """Return a paper pair without its tracking, with few iterations."""
    config = load_config(PAPER / f"{name}.yaml", CampaignConfig, ["tracking.enabled=false"])
    return config.model_copy(update={"iterations": iterations, "keep": None})


def run_campaigns(count: int, iterations: int, compress: float, rates: Rates, look_ups: LookUps) -> dict[str, float]:
    """Run so many campaigns side by side in this process and compare with the plan of one of them."""
    config = paper_config(iterations)
    work = workload_of(config, "H100", GPUS)
    planned = simulate(record_graph(config), work, rates).seconds
    look_ups.seconds, look_ups.count = 0.0, 0
    lasted: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)

        def one(number: int) -> None:
            own = config.model_copy(update={"name": f"campaign-{number}", "seed": number})
            store = Store(root / "store")
            with Record(root / "campaigns" / own.name, own) as record:
                begun = time.perf_counter()
                make = lambda: Sleeping(own, store, work, rates, compress)  # noqa: E731
                run_in_session(own, PlannedCalls(own), store, record, make, Listener(), ThreadRunner)
                lasted.append(time.perf_counter() - begun)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
        cpu, begun = time.process_time(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    assert len(lasted) == count, "a campaign failed"
    return {
        "campaigns": count,
        "gpus": count * GPUS,
        "planned_seconds": round(planned, 1),
        "measured_seconds": round(statistics.median(lasted) * compress, 1),
        "efficiency": round(planned / (statistics.median(lasted) * compress), 4),
        # All campaigns in one process; in real time it does the same in ``compress`` times as many seconds.
        "driver_cores_compressed": round(cpu / wall, 3),
        "driver_cores": round(cpu / wall / compress, 5),
        "look_up_share": round(look_ups.seconds / sum(lasted), 4),
        "look_up_ms": round(1e3 * look_ups.seconds / max(1, look_ups.count), 2),
        "load": round(os.getloadavg()[0], 1),
    }


def reproduction(rates: Rates) -> dict[str, float]:
    """Return the days that all pairs, methods and seeds take by the plan, by the number of nodes."""
    cluster = parse_cluster(f"{GPUS}xH100", rates)
    pairs = [path.stem for path in sorted(PAPER.glob("*.yaml")) if path.stem != "common"]
    seconds = 0.0
    for pair in pairs:
        config = load_config(PAPER / f"{pair}.yaml", CampaignConfig, ["tracking.enabled=false"])
        seconds += make_plan(config, cluster, rates).campaign_seconds * METHODS * SEEDS
    campaigns = len(pairs) * METHODS * SEEDS
    return {"campaigns": campaigns} | {f"days_on_{n}_nodes": round(seconds / 86400 / n, 2) for n in (1, 4, 16, 128)}


def widened(config: CampaignConfig, factor: int) -> CampaignConfig:
    """Return a pair whose agents have so many times their GPUs: ranks of the updates and replicas of the engines."""
    raw = config.model_dump(mode="json")
    first = 0
    for agent in raw["agents"].values():
        gpus = factor * len(agent["gpus"])
        agent["gpus"] = list(range(first, first + gpus))
        agent["generate"] = {**agent["generate"], "engine": {**agent["generate"]["engine"], "replicas": gpus}}
        agent["update"] = {**agent["update"], "ranks": gpus}
        first += gpus
    return CampaignConfig.model_validate(raw)


def one_campaign(rates: Rates) -> list[dict[str, float]]:
    """Return the seconds of an iteration of one campaign on more and more GPUs, by the plan."""
    config = paper_config(6)
    rows = []
    for factor in (1, 2, 4, 8, 16, 32, 64, 128):
        wide = widened(config, factor)
        seconds = make_plan(wide, parse_cluster(f"{GPUS * factor}xH100", rates), rates).iteration_seconds
        rows.append({"gpus": GPUS * factor, "iteration_seconds": round(seconds, 1)})
    return rows


def kept(path: Path | None, rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the rows with those of earlier runs that a file holds, by the number of campaigns."""
    if path is None or not path.exists():
        return rows
    earlier = {row["campaigns"]: row for row in json.loads(path.read_text())["rows"]}
    return [row for _, row in sorted((earlier | {row["campaigns"]: row for row in rows}).items())]


def main() -> None:
    """Print one line per number of campaigns, then everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaigns", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long one campaign may last here, at least")
    parser.add_argument("--data", type=Path, help="JSON file for all of it; rows of earlier runs stay")
    arguments = parser.parse_args()
    rates, look_ups = load_rates(), LookUps()
    look_ups.install()
    config = paper_config(arguments.iterations)
    planned = simulate(record_graph(config), workload_of(config, "H100", GPUS), rates).seconds
    rows = []
    for count in map(int, arguments.campaigns.split(",")):
        # More campaigns need more of one process: time is compressed less.
        compress = planned / max(arguments.seconds, 0.75 * count)
        row = run_campaigns(count, arguments.iterations, compress, rates, look_ups)
        rows.append({**row, "compress": round(compress, 1)})
        print(
            f"{row['gpus']:>5} GPUs {count:>4} campaigns: planned {row['planned_seconds']:.0f} s, measured "
            f"{row['measured_seconds']:.0f} s, efficiency {row['efficiency']:.1%}; driver {row['driver_cores']:.3f} "
            f"cores ({row['driver_cores_compressed']:.2f} at {compress:.0f}×), look-ups {row['look_up_share']:.1%}",
            flush=True,
        )
    found = {
        "rows": kept(arguments.data, rows),
        "one_campaign": one_campaign(rates),
        "reproduction": reproduction(rates),
    }
    if arguments.data is not None:
        arguments.data.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

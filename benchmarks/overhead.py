"""How much of a campaign's time passes outside its stages, and what a cached iteration costs.

Runs the demo's campaign in a fresh home (or ``--config``), then the same command again. Ends with one JSON line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from flows.home import Home
from flows.record.record import read_entries
from hacrl_core.artifacts import Store

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(ROOT / "configs" / "demo.yaml"))
    parser.add_argument("--iterations", type=int, default=None, help="fewer than the config's")
    parser.add_argument("--home", default=None, help="a home that has run it already: only measure the cached run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Home(Path(arguments.home or place).absolute())
        command = [sys.executable, "-m", "flows.cli", "run", arguments.config, "--home", str(home.root)]
        command += ["--set", f"iterations={arguments.iterations}"] if arguments.iterations else []
        if arguments.home is None:
            subprocess.run(command, cwd=ROOT, check=True)
        clock = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        cached_seconds = time.perf_counter() - clock
        report(home, cached_seconds)


def report(home: Home, cached_seconds: float) -> None:
    folder = max(home.campaigns.iterdir(), key=lambda path: (path / "stages.jsonl").stat().st_mtime)
    entries = read_entries(folder)
    spans, by_stage, iterations = stage_spans(Store(home.store), entries)
    begin, end = min(s for s, _ in spans), max(e for _, e in spans)
    covered = union(spans)
    outside = 1 - covered / (end - begin)
    total = sum(by_stage.values())
    shares = {stage: seconds / total for stage, seconds in sorted(by_stage.items(), key=lambda item: -item[1])}
    each = (end - begin) / iterations
    cached_each = replay_seconds(home, folder.name) / iterations
    print(f"\n{iterations} iterations, {each:.3f} s each; of the stages' time:")
    for stage, share in shares.items():
        print(f"  {stage:10} {share:6.1%}")
    figures = [
        figure("seconds_per_iteration", each, None),
        figure("outside_share", outside, 0.03),
        figure("outside_seconds_per_iteration", (end - begin - covered) / iterations, None),
        figure("cached_iteration_seconds", cached_each, 0.05),
        figure("cached_run_wall_seconds", cached_seconds, None),
        *(figure(f"share_{stage}", share, None) for stage, share in shares.items()),
    ]
    conditions = (
        "wall time after the first versions, to the last stage; a stage counts from its start to its publication"
    )
    print(json.dumps({"benchmark": "overhead", "figures": figures, "conditions": conditions}))


def stage_spans(store: Store, entries: list) -> tuple[list[tuple[float, float]], dict[str, float], int]:
    """When stages ran, in seconds since the epoch, from the moment on that every agent has its first version.

    Before it an agent may begin its first iteration while another still makes its first version, or is evaluated: that
    is neither an iteration's time nor time without a stage.
    """
    spans, by_stage, iterations = [], defaultdict(float), set()
    begin = 0.0
    for entry in entries:
        provenance = store.manifest(entry.stage, entry.key).provenance
        end = provenance.started + max(entry.seconds, provenance.seconds)
        spans.append((provenance.started, end))
        if entry.iteration is None or (entry.stage == "evaluate" and entry.iteration == 0):
            begin = max(begin, end)
            continue
        by_stage[entry.stage] += provenance.seconds
        if entry.stage == "update":
            iterations.add(entry.iteration)
    return [(max(start, begin), end) for start, end in spans if end > begin], by_stage, len(iterations)


def union(spans: list[tuple[float, float]]) -> float:
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def replay_seconds(home: Home, name: str) -> float:
    """Walking the complete campaign through the store, in this process, digests checked."""
    from rich.console import Console

    from flows.record.record import read_campaign
    from flows.run.launch import open_campaign, replay

    config = read_campaign(home.campaign(name))
    with open_campaign(config, home, Console(quiet=True)) as campaign:
        clock = time.perf_counter()
        assert replay(campaign)
        return time.perf_counter() - clock


def figure(name: str, value: float, target: float | None) -> dict:
    return {
        "name": name,
        "value": round(value, 4),
        "target": target,
        "met": None if target is None else value <= target,
    }


if __name__ == "__main__":
    main()

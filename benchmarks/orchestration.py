"""What orchestration costs in a long campaign of tiny stages, in CPU seconds of each process, database and memory.

Runs the demo's agents with 4 prompts of 4 responses per iteration in a fresh home. While it runs, the CPU seconds of
Prefect's server, of the driver (the campaign's own process), of the driver's MLflow threads and of the stages are read
once a second, and the driver's resident memory with them. Stages are the workers and what the driver itself computes
(sample, credit). Afterwards come status, report and the same command again, which finds everything in the store. A line
a minute says how far it is; a thousand iterations take ten to fifteen minutes on two cores that have little else to do.

CPU seconds of work depend little on what else the machine does. But Prefect's server and some threads of the driver
work by the clock: on a busy machine, where an iteration takes longer, they cost more of it. So their seconds per minute
are printed too. Ends with one JSON line.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
ROLES = ("server", "driver", "mlflow", "stages")
SECONDS = "seconds.txt"
# Between two lines of progress.
TELL_SECONDS = 60.0
SETTINGS = (
    "name=tiny",
    "prompts_per_iteration=4",
    "samples_per_prompt=4",
    "update.minibatch_prompts=2",
    "evaluate.benchmarks=[]",
    "keep={last: 2}",
)


# Process and when it began → its role and CPU seconds.
Seen = dict[tuple[int, float], tuple[str, float]]


@dataclass
class Sample:
    """The state of a campaign's processes at one moment."""

    at: float
    iterations: int
    driver_mb: float
    cpu: dict[str, float] = field(default_factory=dict)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=None, help="stop the campaign then; what it did is reported")
    parser.add_argument("--demo", action="store_true", help="the demo's own iterations (48 x 8) instead of tiny ones")
    parser.add_argument("--home", default=None, help="a home to use and keep")
    parser.add_argument("--code", default=str(ROOT), help="another checkout whose code is measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Path(arguments.home or place).absolute()
        settings = ("evaluate.benchmarks=[]",) if arguments.demo else SETTINGS
        os.environ["PYTHONPATH"] = arguments.code
        samples = run(home, (*settings, f"iterations={arguments.iterations}"), arguments.minutes, arguments.iterations)
        # The last iteration of one that was stopped may lack an agent.
        done = samples[-1].iterations
        arguments.iterations = done if done == arguments.iterations else done - 1
        report(home, samples, arguments, settings)


def command(home: Path, *words: str) -> list[str]:
    """Return a hacrl command on this home."""
    return [sys.executable, "-m", "flows.cli", *words, "--home", str(home)]


def run(home: Path, settings: tuple[str, ...], minutes: float | None, goal: int) -> list[Sample]:
    """Run the campaign, for so many minutes at most, and read its processes once a second; print how far it is."""
    words = [word for setting in settings for word in ("--set", setting)]
    log = home / "output.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "benchmarks" / "mlflow_threads.py"), str(home / SECONDS)),
                *("run", str(ROOT / "configs" / "demo.yaml"), *words, "--home", str(home)),
            ],
            stdout=output,
            stderr=output,
            cwd=home,
        )
    seen: Seen = {}
    samples = []
    ends_at = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    stopped = False
    tell_at = time.monotonic() + TELL_SECONDS
    while process.poll() is None:
        samples.append(look(psutil.Process(process.pid), home, seen))
        if time.monotonic() > tell_at:
            tell_at += TELL_SECONDS
            tell(samples, goal)
        time.sleep(1.0)
        if time.monotonic() > ends_at and not stopped:
            process.send_signal(signal.SIGTERM)
            stopped = True
    if process.returncode and not stopped:
        sys.exit(f"the campaign ended with exit code {process.returncode}:\n{log.read_text()[-2000:]}")
    samples = [sample for sample in samples if sample.cpu]
    # What MLflow was sent after the last look: it counts for MLflow and not for the whole, so the share errs upwards.
    samples[-1].cpu["mlflow"] = seconds_inside(home)[0]
    return samples


def tell(samples: list[Sample], goal: int) -> None:
    """Print how far the campaign is, and the share of orchestration since its first iterations."""
    last = samples[-1]
    first = next((s for s in samples if s.iterations >= samples[0].iterations + 2), last)
    count = last.iterations - first.iterations
    if count <= 0:
        print(f"iteration {last.iterations} of {goal}", flush=True)
        return
    spent = {role: last.cpu[role] - first.cpu[role] for role in ROLES}
    share = 1 - spent["stages"] / sum(spent.values())
    each = (last.at - first.at) / count
    print(
        f"iteration {last.iterations} of {goal}, {each:.2f} s each, orchestration {share:.1%} so far, driver "
        f"{last.driver_mb:.0f} MB, {(goal - last.iterations) * each / 60:.0f} minutes left",
        flush=True,
    )


def seconds_inside(home: Path) -> tuple[float, float, float]:
    """Return the driver's CPU seconds so far in MLflow's threads, in sending iterations, and in stages."""
    file = home / SECONDS
    whole, sending, stages = file.read_text().split() if file.exists() else ("0", "0", "0")
    return float(whole), float(sending), float(stages)


def look(driver: psutil.Process, home: Path, seen: Seen) -> Sample:
    """Read the CPU seconds so far of each role; a process that has ended keeps its last number.

    The home has one campaign.
    """
    record = next(home.glob("campaigns/*/stages.jsonl"), home / "none")
    done = record.read_bytes().count(b'"stage": "update"') // 2 if record.exists() else 0
    memory = 0.0
    with suppress(psutil.NoSuchProcess):
        memory = driver.memory_info().rss / 1e6
        for process in [driver, *driver.children(recursive=True)]:
            note(process, driver, seen)
    cpu = {role: sum(seconds for kind, seconds in seen.values() if kind == role) for role in ROLES}
    cpu["mlflow"], _, stages = seconds_inside(home)
    cpu["stages"] += stages
    # Both are a part of the driver.
    cpu["driver"] -= cpu["mlflow"] + stages
    return Sample(time.monotonic(), done, memory, cpu)


def note(process: psutil.Process, driver: psutil.Process, seen: Seen) -> None:
    """Write down what a process is and what it has used.

    It is asked anew at each look: a process that has just been forked has the command line of its parent.
    """
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        times, key = process.cpu_times(), (process.pid, process.create_time())
        # One that is ending has no command line any more.
        words = process.cmdline()
        role = role_of(words, is_driver=process == driver) if words or key not in seen else seen[key][0]
        seen[key] = (role, times.user + times.system)


def role_of(words: list[str], *, is_driver: bool) -> str:
    """The driver, Prefect's server, or a worker, which runs stages (its verifiers count with it)."""
    if is_driver:
        return "driver"
    return "server" if "flows.scheduling.api" in words else "stages"


def report(home: Path, samples: list[Sample], arguments: argparse.Namespace, settings: tuple[str, ...]) -> None:
    """Print the shares, the memory curve, and what status, report and a cached run cost afterwards."""
    # A home that is kept may have iterations already; what starting costs, and the report at the end, is left out.
    begun, end = samples[0].iterations, samples[-1]
    first = next(s for s in samples if s.iterations >= begun + max(2, (arguments.iterations - begun) // 10))
    last = next((s for s in reversed(samples) if first.iterations < s.iterations < end.iterations), end)
    count = last.iterations - first.iterations
    each = {role: (last.cpu[role] - first.cpu[role]) / count for role in ROLES}
    # MLflow gets several iterations at a time, the last of them behind the last iteration.
    each["mlflow"] = seconds_inside(home)[1] / (end.iterations - begun)
    figures = {f"{role}_cpu_seconds_per_iteration": round(seconds, 4) for role, seconds in each.items()}
    figures |= {f"{role}_cpu_minutes": round(end.cpu[role] / 60, 2) for role in ROLES}
    figures |= {f"{role}_cpu_seconds_at_the_end": round(end.cpu[role] - last.cpu[role], 2) for role in ROLES}
    figures |= mlflow_figures(home, end, each)
    figures["orchestration_share"] = round(1 - each["stages"] / sum(each.values()), 4)
    figures["prefect_share"] = round((each["server"] + each["driver"]) / sum(each.values()), 4)
    minutes = (last.at - first.at) / 60
    for role in ("server", "driver"):
        figures[f"{role}_cpu_seconds_per_minute"] = round((last.cpu[role] - first.cpu[role]) / minutes, 2)
    for name, pattern in {"prefect": "prefect/prefect.db*", "mlflow": "mlflow.db*"}.items():
        figures[f"{name}_database_mb"] = round(sum(path.stat().st_size for path in home.glob(pattern)) / 1e6, 2)
    running = [s for s in samples if s.iterations >= first.iterations and s.driver_mb]
    curve = {s.iterations: round(s.driver_mb, 1) for s in running[:: max(1, len(running) // 10)]}
    figures |= memory_figures(running, begun)
    words = [word for s in (*settings, f"iterations={arguments.iterations}") for word in ("--set", s)]
    for name, rest in {
        "status": ["status"],
        "report": ["report"],
        "cached_run": ["run", str(ROOT / "configs" / "demo.yaml"), *words],
    }.items():
        figures[f"{name}_cpu_seconds"] = round(cpu_of(command(home, *rest), home), 2)
    for name, value in figures.items():
        print(f"{name:40} {value}")
    conditions = {
        "iterations": arguments.iterations,
        "settings": settings,
        "per iteration": f"between iteration {first.iterations} and {last.iterations}",
        "seconds_per_iteration": round((last.at - first.at) / count, 3),
        "load": [round(number, 1) for number in os.getloadavg()],
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps({"benchmark": "orchestration", "figures": figures, "driver_mb": curve, "conditions": conditions}))


def memory_figures(running: list[Sample], begun: int) -> dict[str, float]:
    """Return the driver's memory at each quarter of the campaign, its growth from the first to the last, and the end's.

    After the last iteration the whole history is read, for the report and the pages.
    """
    whole = running[-1].iterations - begun
    at = [next(s for s in running if s.iterations >= begun + whole * quarter / 4) for quarter in (1, 2, 3, 4)]
    figures = {f"driver_mb_at_quarter_{number}": round(s.driver_mb, 1) for number, s in enumerate(at, start=1)}
    growth = (at[-1].driver_mb - at[0].driver_mb) / max(1, at[-1].iterations - at[0].iterations)
    figures["driver_mb_per_iteration"] = round(growth, 4)
    figures["driver_mb_at_the_end"] = round(max(s.driver_mb for s in running), 1)
    return figures


def mlflow_figures(home: Path, end: Sample, each: dict[str, float]) -> dict[str, float]:
    """Return MLflow's share of an iteration, what is paid once, and the share of the whole campaign."""
    whole, sending, _ = seconds_inside(home)
    return {
        "mlflow_share_of_an_iteration": round(each["mlflow"] / sum(each.values()), 4),
        "mlflow_cpu_seconds_paid_once": round(whole - sending, 2),
        "mlflow_share_of_the_campaign": round(whole / sum(end.cpu.values()), 4),
    }


def cpu_of(words: list[str], home: Path) -> float:
    """Run a command to its end and return the CPU seconds of it and of all it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, cwd=home, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()

"""Small programs per second, judged in the sandbox by the pool's workers, against plain ``subprocess.run``.

Both sides run the same programs with the same inputs, two at a time. The sandboxed side judges too: each program is one
response, sent to a worker, run in its own process, and its output compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from hacrl_core.verification import close_pool
from hacrl_core.verification.pool import Group, Limits, shared_pool

# Responses per problem, as a campaign's verify stage hands them to a worker.
SAMPLES = 8
VERIFIER = """
import json
from hacrl_core.verification.code import judge_program, read_tests
from hacrl_core.verification.jail.client import ProgramLimits

def judge(response, gold):
    row = json.loads(gold)
    tests = json.loads(row["answer"])["tests"] if "answer" in row else row["tests"]
    return judge_program(response, read_tests(tests), ProgramLimits()).share
"""


def program(number: int, form: str) -> tuple[str, list[object]]:
    """Return a small program, no two alike, and the tests of its problem, which are those of ``SAMPLES`` programs."""
    problem, sample = divmod(number, SAMPLES)
    total = f"sum(i * i for i in range(n)) + {problem} + {sample} - {sample}"
    if form == "script":
        return f"n = int(input())\nprint({total})", [{"input": "50\n", "output": str(40425 + problem)}]
    tests: list[object] = [
        {"call": "f", "args": [n], "expected": sum(i * i for i in range(n)) + problem} for n in (5, 50)
    ]
    return f"def f(n):\n    return {total}", tests


def sandboxed(count: int, form: str, workers: int) -> tuple[float, float]:
    """Return programs per second through the pool and the CPU seconds of each; every one has to pass."""
    empty = {"id": "", "messages": [], "source": "", "tags": {}, "columns": {}}
    groups = []
    for first in range(0, count, SAMPLES):
        numbers = list(range(first, min(first + SAMPLES, count)))
        row = json.dumps({**empty, "answer": json.dumps({"tests": program(first, form)[1]})})
        pairs = [(row, program(number, form)[0]) for number in numbers]
        groups.append(Group(numbers, pairs, "bench_sandbox_judge:judge", {}))
    rewards: dict[int, float] = {}
    limits = Limits(cpu_seconds=60, wall_seconds=600, memory_mb=1024, workers=workers)
    with shared_pool() as pool:
        pool.run(groups[: 2 * workers], limits, "", lambda key, result: None)
        before, started = cpu_seconds(), time.perf_counter()
        pool.run(groups, limits, "", lambda key, result: rewards.__setitem__(key, result["reward"]))
        seconds, used = time.perf_counter() - started, cpu_seconds() - before
    assert len(rewards) == count
    assert set(rewards.values()) == {1.0}, "a program did not pass"
    return count / seconds, used / count


def cpu_seconds() -> float:
    """Return the CPU time that this process, its children and all that they have waited for have used."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in [own, *own.children(recursive=True)])


def plain(count: int, workers: int) -> tuple[float, float]:
    """Return programs per second with ``subprocess.run([python, "-c", …])``, and the CPU seconds of each."""

    def run(number: int) -> bool:
        source, _ = program(number, "script")
        done = subprocess.run([sys.executable, "-c", source], input="50\n", capture_output=True, text=True, check=True)
        return done.stdout == f"{40425 + number // SAMPLES}\n"

    before, started = cpu_seconds(), time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        assert all(pool.map(run, range(count)))
    return count / (time.perf_counter() - started), (cpu_seconds() - before) / count


def main() -> None:
    """Print medians of rounds in which all three take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=600, help="programs per round in the sandbox")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    measured: dict[str, list[tuple[float, float]]] = {"script": [], "function": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bench_sandbox_judge.py").write_text(VERIFIER)
        sys.path.insert(0, folder)
        for _ in range(arguments.rounds):
            for form in ("script", "function"):
                measured[form].append(sandboxed(arguments.programs, form, arguments.workers))
            measured["plain"].append(plain(max(4, arguments.programs // 8), arguments.workers))
        close_pool()
    medians = {name: statistics.median(rate for rate, _ in values) for name, values in measured.items()}
    for name, title in (
        ("script", "sandbox, standard input and output"),
        ("function", "sandbox, two calls of a function"),
        ("plain", "plain subprocess.run, no limits, no sandbox"),
    ):
        low, high = min(measured[name])[0], max(measured[name])[0]
        ratio = medians[name] / medians["plain"]
        used = 1000 * statistics.median(cpu for _, cpu in measured[name])
        print(
            f"{title:44} {medians[name]:7.0f} per second ({low:.0f} to {high:.0f}), {ratio:.1f} ×, "
            f"{used:.1f} ms of CPU time each"
        )
    print(f"load average of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()

"""Run the tests that depend on time several times on a busy machine, and list those that did not pass each time.

    python -m tests.flaky --times 5

Two busy loops per core run beside the tests and end with them. The exit code is 1 if a test was not stable.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

# Tests that wait for processes, servers and signals, or that give something a time limit.
SENSITIVE = (
    "tests/chaos/test_processes.py",
    "tests/flow/test_notify.py",
    "tests/flow/test_servers_away.py",
    "tests/flow/test_workers.py",
    "tests/unit/agents/test_adoption.py",
    "tests/unit/artifacts/test_shared.py",
    "tests/unit/generation/test_vllm_queue.py",
    "tests/unit/problems/test_datasets_hub.py",
    "tests/unit/verification/test_verify_extraction.py",
    "tests/unit/verification/test_verifiers_apart.py",
    "tests/unit/verification/test_verify_isolation.py",
    "tests/views/test_status_logs.py",
)
# A busy loop ends by itself when its parent has, however that ended.
BUSY = "import os, sys\nparent = int(sys.argv[1])\nwhile os.getppid() == parent:\n    sum(range(200_000))\n"


@contextmanager
def load(loops: int) -> Iterator[list[int]]:
    """Keep the cores busy with so many processes, and yield their ids; they are gone afterwards."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(loops)]
    try:
        yield [process.pid for process in busy]
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run_once(tests: Sequence[str]) -> dict[str, str]:
    """Run the tests and return the outcome of each: passed, skipped or failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", "-p", "no:cacheprovider", "-m", "not servers and not vllm", f"--junitxml={report}"]
        done = subprocess.run([sys.executable, "-m", "pytest", *words, *tests], stdout=subprocess.DEVNULL, check=False)
        if not report.is_file():
            raise SystemExit(
                f"pytest ended with code {done.returncode} and no report; run it by hand: {' '.join(tests)}"
            )
        return read_report(report)


def read_report(report: Path) -> dict[str, str]:
    """Return the outcome of each test in a JUnit report."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def unstable(runs: Sequence[dict[str, str]]) -> dict[str, Counter[str]]:
    """Return the tests that failed in some run, or whose outcome differed, with how often each outcome came."""
    names = sorted({name for run in runs for name in run})
    counts = {name: Counter(run.get(name, "missing") for run in runs) for name in names}
    return {name: count for name, count in counts.items() if "failed" in count or len(count) > 1}


def main() -> int:
    """Run the tests as often as asked and print what was not stable."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--times", type=int, default=3, help="how often the tests run (3)")
    options.add_argument("--loops", type=int, default=2 * (os.cpu_count() or 1), help="busy loops (two per core)")
    options.add_argument("tests", nargs="*", default=SENSITIVE, help="files or tests; empty: the sensitive ones")
    given = options.parse_args()
    runs: list[dict[str, str]] = []
    with load(given.loops):
        for number in range(given.times):
            runs.append(run_once(given.tests))
            print(f"run {number + 1}: {dict(Counter(runs[-1].values()))}, load {os.getloadavg()[0]:.1f}", flush=True)
    found = unstable(runs)
    for name, count in found.items():
        print(f"{name}: {', '.join(f'{outcome} {times}' for outcome, times in count.items())}")
    print(f"{len(found)} of {len(runs[0]) if runs else 0} tests were not stable in {len(runs)} runs")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

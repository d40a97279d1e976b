"""Run every hostile program and say what they achieved: ``python -m tests.sandbox.run_all [--quick]``."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl_core.verification import pool
from tests.sandbox.cases import Hostile, Place
from tests.sandbox.hostile import all_programs
from tests.sandbox.judge import run_programs, write_verifier
from tests.sandbox.mutants import fake_mutants, mutants
from tests.sandbox.place import attacked_place, damage, is_alive

GOOD = ("def f(n): return n * n", {"tests": [{"call": "f", "args": [3], "expected": 9}]})
LIMITS = {"cpu_seconds": 0.5, "wall_seconds": 1.0, "memory_mb": 128, "output_bytes": 1 << 18}


@dataclass(frozen=True)
class Outcome:
    """What all hostile programs achieved together."""

    results: dict[str, dict[str, Any]]
    escapes: list[str]
    errors: list[str]
    dead_workers: int
    damage: list[str]
    still_works: bool
    seconds: float

    @property
    def held(self) -> bool:
        """Whether nothing escaped, hung, died or was damaged."""
        return self.still_works and not (self.escapes or self.errors or self.dead_workers or self.damage)


def generated(seed: int, count: int) -> Callable[[Place], list[Hostile]]:
    """Return what makes so many generated attacks, and every generated lie."""
    return lambda place: [*mutants(place, seed, count), *fake_mutants(place)]


def run_all(
    folder: Path,
    chosen: Callable[[Hostile], bool] = lambda each: True,
    made: Callable[[Place], list[Hostile]] = all_programs,
    **limits: Any,
) -> Outcome:
    """Run the chosen hostile programs in one pool, then look at what is left."""
    verifier = write_verifier(folder)
    started = time.monotonic()
    with attacked_place(folder) as place:
        programs = [each for each in made(place) if chosen(each)]
        run_programs(verifier, [GOOD] * 4, **limits)
        with pool.shared_pool() as shared:
            workers = {worker.pid for worker in shared.workers}
        rows = [(each.program, {"tests": each.tests, "limits": LIMITS}) for each in programs]
        found = run_programs(verifier, rows, **limits)
        with pool.shared_pool() as shared:
            dead = len(workers - {worker.pid for worker in shared.workers if is_alive(worker.pid)})
        good = run_programs(verifier, [GOOD], **limits)[0]
        results = {each.name: result for each, result in zip(programs, found, strict=True)}
        return Outcome(
            results=results,
            escapes=[name for name, result in results.items() if result.get("passed") != 0],
            errors=[name for name, result in results.items() if "kind" not in result],
            dead_workers=dead,
            damage=damage(place, is_alive(place.victim)),
            still_works=good.get("kind") == "passed",
            seconds=time.monotonic() - started,
        )


def main() -> int:
    """Print one line of JSON; exit with 1 unless everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out what runs until a time limit")
    parser.add_argument("--mutants", type=int, default=0, help="so many generated programs instead")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    given = parser.parse_args()
    made = generated(given.seed, given.mutants) if given.mutants else all_programs
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_all(Path(folder), lambda each: not (given.quick and each.slow), made)
    pool.close_pool()
    kinds: dict[str, int] = {}
    for result in outcome.results.values():
        kinds[str(result.get("kind"))] = kinds.get(str(result.get("kind")), 0) + 1
    summary = {
        "user": os.getuid(),
        "programs": len(outcome.results),
        "held": outcome.held,
        "escapes": outcome.escapes,
        "errors": outcome.errors,
        "dead_workers": outcome.dead_workers,
        "damage": outcome.damage,
        "kinds": kinds,
        "seconds": round(outcome.seconds, 1),
    }
    print(json.dumps(summary))
    return 0 if outcome.held else 1


if __name__ == "__main__":
    sys.exit(main())

"""Run programs through the real pool: a verifier in a worker whose problems are JSON, as a task's would be."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hacrl_core.verification import pool
from hacrl_core.verification.pool import Group, Limits

# What runs in the worker: the verdict as the answer, with everything that a test wants to see.
VERIFIER = """
import json
from hacrl_core.verification.code import extract_program, judge_program, read_tests
from hacrl_core.verification.jail.client import ProgramLimits

SECRET = "a-secret-of-the-verifier"

def judge(response, gold):
    row = json.loads(gold)
    row = json.loads(row["answer"]) if "answer" in row else row
    limits = ProgramLimits(**row.get("limits", {}))
    tests = read_tests(row["tests"], row.get("entry_point", ""))
    result = judge_program(extract_program(response), tests, limits, **row.get("options", {}))
    found = {"kind": result.kind, "passed": result.passed, "tests": result.tests, "note": result.note}
    return result.share, json.dumps(found)
"""
LIMITS = {"cpu_seconds": 1.0, "wall_seconds": 3.0, "memory_mb": 128, "output_bytes": 1 << 18}


def write_verifier(folder: Path) -> str:
    """Write the verifier's module, put its folder on the path, and return its name."""
    (folder / "sandbox_judge.py").write_text(VERIFIER)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return "sandbox_judge:judge"


def _row(problem: dict[str, Any]) -> str:
    """Return a problem as verify_batch sends it to workers; the verifier reads its answer."""
    empty: dict[str, Any] = {"id": "", "messages": [], "source": "", "tags": {}, "columns": {}}
    return json.dumps({**empty, "answer": json.dumps(problem)})


def run_programs(
    verifier: str, rows: Sequence[tuple[str, dict[str, Any]]], *, workers: int = 2, **limits: Any
) -> list[dict[str, Any]]:
    """Judge (program, problem) pairs; return for each what the worker sent, with the answer's fields beside it."""
    results: dict[int, dict[str, Any]] = {}
    groups = [
        Group([number], [(_row({"limits": LIMITS, **problem}), program)], verifier, {})
        for number, (program, problem) in enumerate(rows)
    ]
    chosen = Limits(cpu_seconds=20, wall_seconds=60, memory_mb=1024, workers=workers, **limits)
    with pool.shared_pool() as shared:
        shared.run(groups, chosen, "", lambda key, result: results.__setitem__(key, result))
    found = [results[number] for number in range(len(rows))]
    return [{**result, **json.loads(result["answer"])} if result.get("answer") else result for result in found]

"""``hacrl doctor --smoke``: a self-test of this machine in about two minutes that writes one JSON file.

It is the first thing to run on a machine with GPUs. Every part compares something with a reference of its own; a part
that the machine cannot run is skipped, and the file says why.
"""

import json
import os
import platform
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from flows.doctor import smoke_parts as parts
from flows.doctor.smoke_parts import Skipped
from hacrl_core.instructions import settle_instructions

# Of one part. A healthy machine needs a tenth of it; ranks that hang need more than NCCL's abort takes.
LIMIT_SECONDS = 600
PACKAGES = ("hacrl", "torch", "transformers", "triton", "peft")


def run_smoke(console: Console, out: Path, device: str = "auto") -> int:
    """Run every part, print a line for each, write the file; return 1 if a part failed."""
    if line := settle_instructions():
        console.print(line)
    transformers.utils.logging.disable_progress_bar()
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    report: dict[str, Any] = {"format": 1, "time": time.time(), "device": str(where), "machine": machine()}
    report["parts"] = {}
    marks = {"ok": "green", "failed": "red", "skipped": "yellow"}
    with tempfile.TemporaryDirectory(prefix="hacrl-smoke-") as folder:
        for name, part in PARTS.items():
            # If the process ends in a part (a crash in a driver, a group of ranks that hangs), the file names it.
            report["parts"][name] = {"state": "failed", "why": "the process ended in this part", "found": {}}
            _write(report, out)
            with _limit(report, name, out):
                found = _run(part, where, Path(folder))
            report["parts"][name] = found
            line = f" {name} ({found['seconds']:.1f} s)"
            console.print(Text.assemble((f"{found['state']:7}", marks[found["state"]]), line))
            detail = found.get("why") or ", ".join(f"{key} {_short(value)}" for key, value in found["found"].items())
            console.print(Padding(Text(detail, style="dim"), (0, 0, 0, 8)))
    _write(report, out)
    states = [found["state"] for found in report["parts"].values()]
    console.print(f"{out}: {states.count('ok')} ok, {states.count('skipped')} skipped, {states.count('failed')} failed")
    return int(report["state"] == "failed")


def _short(value: Any) -> str:
    """Return a number as people read it; the file has all of its digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


PARTS: dict[str, Callable[[torch.device, Path], dict[str, Any]]] = {
    "kernel against reference": parts.kernel,
    "score and update agree": parts.agreement,
    "ranks against one process": parts.ranks,
    "memory against estimate": parts.memory,
    "vLLM swap": parts.vllm,
}


def _run(part: Callable[[torch.device, Path], dict[str, Any]], device: torch.device, folder: Path) -> dict[str, Any]:
    begun = time.perf_counter()
    found: dict[str, Any] = {"state": "ok", "found": {}}
    try:
        found["found"] = part(device, folder)
    except Skipped as reason:
        found |= {"state": "skipped", "why": str(reason)}
    except parts.Wrong as problem:
        found |= {"state": "failed", "why": str(problem), "found": problem.found}
    except Exception as problem:  # whatever it is, the other parts and the file are worth having
        first = str(problem).strip().splitlines()[:1]
        why = f"{type(problem).__name__}: {''.join(first)}"
        found |= {"state": "failed", "why": why, "traceback": traceback.format_exc()}
    found["seconds"] = round(time.perf_counter() - begun, 2)
    return found


def _write(report: dict[str, Any], out: Path) -> None:
    """Write the file as far as it is known."""
    states = [found["state"] for found in report["parts"].values()]
    report["state"] = "failed" if "failed" in states else "ok"
    out.write_text(json.dumps(report, indent=1) + "\n")


@contextmanager
def _limit(report: dict[str, Any], name: str, out: Path) -> Iterator[None]:
    """End this process, with a word in the file, if a part never comes back: a hang is a finding, too."""

    def stop() -> None:
        report["parts"][name]["why"] = f"took more than {LIMIT_SECONDS} s and was ended"
        _write(report, out)
        os.write(2, f"{name}: took more than {LIMIT_SECONDS} s; {out} says how far it came\n".encode())
        os._exit(1)

    timer = threading.Timer(LIMIT_SECONDS, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, GPUs, versions."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    gpus = []
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        gpus.append(
            {"name": found.name, "bytes": found.total_memory, "capability": f"{found.major}.{found.minor}"}
        )  # fmt: skip
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "gpus": gpus,
    }

"""What is installed, what is missing, and how to get it."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.home import Home

REQUIRED = ("torch", "transformers", "prefect", "mlflow", "pyarrow", "datasets", "math-verify", "pydantic")
OPTIONAL = {"peft": "LoRA: pip install 'hacrl[lora]'", "triton": "fused kernel on CUDA: comes with torch for CUDA"}

Check = tuple[str, str, str]  # state, what, detail


def show_doctor(console: Console, home: Home) -> int:
    """Print the checks; 1 when something needed is missing."""
    checks = [*_packages(), *_machine(), *_engines(), *_home(home)]
    table = Table(box=None, padding=(0, 2), show_header=False)
    marks = {"ok": "[green]ok[/green]", "missing": "[red]missing[/red]", "note": "[yellow]note[/yellow]"}
    for state, what, detail in checks:
        table.add_row(marks[state], what, detail)
    console.print(table)
    missing = [what for state, what, _ in checks if state == "missing"]
    console.print(
        f"[red]{len(missing)} missing[/red]: {', '.join(missing)}" if missing else "Ready: hacrl run configs/demo.yaml"
    )
    return 1 if missing else 0


def _packages() -> Iterator[Check]:
    yield ("ok" if sys.version_info >= (3, 11) else "missing", "Python", f"{platform.python_version()} (3.11 or newer)")
    for name in REQUIRED:
        try:
            yield "ok", name, version(name)
        except PackageNotFoundError:
            yield "missing", name, "run `make setup` again"
    for name, remedy in OPTIONAL.items():
        try:
            yield "ok", name, version(name)
        except PackageNotFoundError:
            yield "note", name, f"not installed. {remedy}"


def _machine() -> Iterator[Check]:
    import torch

    yield "ok", "processor", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads here"
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            yield (
                "ok",
                f"cuda:{number}",
                f"{torch.cuda.get_device_name(number)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free",
            )
    else:
        yield "note", "GPU", "none found; everything runs on the CPU"


def _engines() -> Iterator[Check]:
    yield "ok", "built-in engine", "always there"
    python = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
    if python.exists():
        yield "ok", "vLLM", "its environment is built"
    else:
        yield "note", "vLLM", "not built; `make vllm` does it (only needed for engine: {kind: vllm})"
    yield (
        ("ok", "C++ compiler", "found")
        if shutil.which("g++")
        else ("note", "C++ compiler", "none; only engine.compile needs one")
    )


def _home(home: Home) -> Iterator[Check]:
    place = home.root if home.root.exists() else home.root.parent
    writable = os.access(place, os.W_OK)
    free = shutil.disk_usage(place).free / 2**30
    yield (
        "ok" if writable else "missing",
        "home folder",
        f"{home.root}, {free:.0f} GiB free" + ("" if writable else "; not writable"),
    )

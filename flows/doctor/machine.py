"""``hacrl doctor``: what is installed on this machine, what is missing, and how to get it."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from flows.doctor.sandbox import sandbox_checks
from flows.home import Home
from flows.views.text import gib
from hacrl_core.errors import EngineError
from hacrl_core.instructions import settle_instructions

REQUIRED = ("torch", "transformers", "prefect", "mlflow", "pyarrow", "datasets", "math-verify", "pydantic")
OPTIONAL = {"peft": "LoRA: pip install 'hacrl[lora]'", "triton": "fused kernel on CUDA: comes with torch for CUDA"}

# State (ok, missing or note), what was checked, and details.
Check = tuple[str, str, str]


def show_doctor(console: Console, home: Home) -> int:
    """Print the checks; return 1 if something required is missing."""
    checks = [*_packages(), *_machine(), *_engines(), *sandbox_checks(), *_home(home)]
    table = Table(box=None, padding=(0, 2), show_header=False)
    marks = {"ok": "[green]ok[/green]", "missing": "[red]missing[/red]", "note": "[yellow]note[/yellow]"}
    for state, what, detail in checks:
        table.add_row(marks[state], what, detail)
    console.print(table)
    missing = [what for state, what, _ in checks if state == "missing"]
    if missing:
        console.print(f"[red]{len(missing)} missing[/red]: {', '.join(missing)}")
        return 1
    console.print("Ready: hacrl run configs/demo.yaml")
    return 0


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
    line = settle_instructions()
    import torch

    yield "ok", "processor", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads here"
    if line:
        yield "note", "bfloat16", line
    if not torch.cuda.is_available():
        yield "note", "GPU", "none found; everything runs on the CPU"
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield "ok", f"cuda:{number}", f"{name}, {gib(free, 0)} of {gib(total, 0)} GiB free"


def _engines() -> Iterator[Check]:
    from hacrl_core.generation.vllm.process import find_python

    yield "ok", "built-in engine", "always available"
    try:
        yield "ok", "vLLM", f"its interpreter is {find_python(None)}"
    except EngineError:
        yield "note", "vLLM", "not built; `make vllm` builds it (only needed for engine: {kind: vllm})"
    yield _compiled()
    if shutil.which("g++"):
        yield "ok", "C++ compiler", "found"
    else:
        yield "note", "C++ compiler", "none; only vLLM compiles with one, unless engine.enforce_eager is set"


def _compiled() -> Check:
    """Whether small models run compiled kernels on this machine; asking compiles them."""
    from hacrl_core.native import NAMES, SWITCH, find_compiler, kernels

    if os.environ.get(SWITCH) == "0":
        return "note", "compiled kernels", f"switched off by {SWITCH}=0; small models run a little slower on the CPU"
    if find_compiler() is None:
        return (
            "note",
            "compiled kernels",
            "no C compiler; small models run a little slower on the CPU. Install gcc or clang",
        )
    if any(kernels(name) is None for name in NAMES):
        return (
            "note",
            "compiled kernels",
            "they do not compile here; torch does their work. `CC` names another compiler",
        )
    return "ok", "compiled kernels", "small models on the CPU use them"


def _home(home: Home) -> Iterator[Check]:
    place = home.root if home.root.exists() else home.root.parent
    writable = os.access(place, os.W_OK)
    detail = f"{home.root}, {gib(shutil.disk_usage(place).free, 0)} GiB free"
    yield "ok" if writable else "missing", "home folder", detail if writable else f"{detail}; not writable"

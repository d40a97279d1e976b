"""What the pool knows of processes: the time one used, whether it computes, what workers see of the environment."""

import os
from collections.abc import Sequence

from hacrl_core.place import ROOT
from hacrl_core.verification.sandbox import children_of

# What workers see of the environment: nothing in which people keep secrets. A name that ends in _ is a prefix.
PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_", "TZ", "TMPDIR", "TMP", "TEMP"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    *("OMP_", "MKL_", "OPENBLAS_", "CUDA_VISIBLE_DEVICES", "HACRL_HOME"),
)


def cpu_seconds(pid: int, fallback: float) -> float:
    """Return the CPU time of a process, user and system; ``fallback`` where the kernel does not tell."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else fallback


def runnable(pid: int, seen: set[int]) -> bool:
    """Return whether a process or one below it runs or waits for a core: a loaded machine is no reason to kill it."""
    if _stat(pid)[:1] == [b"R"]:
        return True
    below = [child for child in children_of(pid) if child not in seen]
    return any(runnable(child, {*seen, pid}) for child in below)


def _stat(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def passed_on(further: Sequence[str]) -> dict[str, str]:
    """Return the part of the environment that workers see."""
    prefixes = tuple(name for name in PASSED_ON if name.endswith("_"))
    known = {*PASSED_ON, *further}
    return {name: value for name, value in os.environ.items() if name in known or name.startswith(prefixes)}


def python_path() -> str:
    """Let the spawner find this package also where it is not installed; sys.path itself follows with each request."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

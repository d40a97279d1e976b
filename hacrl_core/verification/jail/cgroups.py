"""A control group per jail, where this process may make one: memory and processes of the whole jail are counted.

The limits of a process (``resource``) hold without it. The group adds up what all processes of a jail use. In version 2
of control groups, the group is a sibling of the spawner's own. Their parent must let this user make children and pass
``memory`` and ``pids`` on to them, as it does for root and in a user's own systemd services. In version 1 only
processes are limited.
"""

import contextlib
import os
from collections.abc import Sequence

# The kernel's list of the hierarchies that this process is in.
_OWN = "/proc/self/cgroup"
_MOUNTS = "/proc/self/mounts"
_made: dict[int, list[str]] = {}


def confine(worker: int, processes: Sequence[int], memory: int, most: int) -> str:
    """Put a jail's first processes into a group of their own; return why it could not be, empty where it could.

    ``memory`` counts bytes of the whole jail, ``most`` its processes and threads. ``release`` removes the group.
    """
    try:
        unified = _parent("cgroup2", "")
        if unified is not None and {"memory", "pids"} <= _passed_on(unified):
            limits = {"memory.max": memory, "pids.max": most}
            _make(worker, unified, limits, processes)
            with contextlib.suppress(OSError):  # a kernel without swap accounting has no such file
                _write(f"{_made[worker][-1]}/memory.swap.max", 0)
            return ""
        old = _parent("cgroup", "pids")
        if old is None:
            return "no hierarchy of control groups passes memory and pids on"
        _make(worker, old, {"pids.max": most}, processes)
        return "only processes are limited, not memory: control groups of version 1"
    except OSError as error:
        release(worker)
        return f"{error.strerror or error}: {error.filename}"


def release(worker: int) -> None:
    """Remove the groups of a jail whose processes have ended."""
    for path in _made.pop(worker, []):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _make(worker: int, parent: str, limits: dict[str, int], processes: Sequence[int]) -> None:
    if not _made:
        _sweep(parent)
    path = f"{parent}/hacrl-{os.getpid()}-{worker}"
    os.mkdir(path)
    _made.setdefault(worker, []).append(path)
    for name, limit in limits.items():
        _write(f"{path}/{name}", limit)
    for pid in processes:
        _write(f"{path}/cgroup.procs", pid)


def _sweep(parent: str) -> None:
    """Remove what spawners left behind that were killed."""
    for name in os.listdir(parent):
        first, _, rest = name.partition("-")
        owner = rest.partition("-")[0]
        if first == "hacrl" and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            with contextlib.suppress(OSError):
                os.rmdir(f"{parent}/{name}")


def _parent(kind: str, controller: str) -> str | None:
    """Return the folder above this process's own group, the root where it has none; None without such a hierarchy."""
    mounted = None
    for line in _lines(_MOUNTS):
        _, place, found, options, *_ = line.split(" ")
        if found == kind and (not controller or controller in options.split(",")):
            mounted = place
    if mounted is None:
        return None
    for line in _lines(_OWN):
        _, controllers, own = line.rstrip("\n").split(":", 2)
        if controllers.split(",") == [controller] or (controller and controller in controllers.split(",")):
            return mounted + os.path.dirname(own).rstrip("/")
    return None


def _passed_on(parent: str) -> set[str]:
    with contextlib.suppress(OSError), open(f"{parent}/cgroup.subtree_control") as file:
        return set(file.read().split())
    return set()


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError), open(path) as file:
        return file.readlines()
    return []


def _write(path: str, value: int) -> None:
    with open(path, "w") as file:
        file.write(str(value))

"""What holds what: the layers of the jail that this machine has, and whether they are enough."""

import logging
from collections.abc import Mapping
from typing import Literal

from hacrl_core.errors import ConfigError

Mode = Literal["required", "best", "off"]

# Which of the layers hold each thing that must be held; one of them is enough.
_VERIFIERS = {
    "files": ("private root", "Landlock"),
    "network": ("network namespace", "seccomp"),
    "other processes": ("namespaces", "signals"),
}
_PROGRAMS = {
    "files": ("private root", "Landlock"),
    "network": ("network namespace", "seccomp"),
    "other processes": ("seccomp",),
}
EXPLAINED = {
    "namespaces": "own users, process ids, host name and IPC",
    "private root": "only the Python installation and what is allowed exists, read-only; an own /tmp and /proc",
    "network namespace": "no network interface, not even localhost",
    "no other user": "root's workers run as nobody",
    "no capabilities": "none can be used or regained",
    "no new privileges": "set-user-id programs give nothing",
    "Landlock": "the kernel refuses every path that is not allowed",
    "signals": "signals and abstract sockets stay in the jail (Landlock 6)",
    "seccomp": "a filter of system calls; for programs, no process, socket or file system change",
    "unreadable memory": "processes of the same user cannot read the worker",
    "control group": "memory and processes of the whole jail are limited, not only of each process",
}


class SandboxRefusedError(RuntimeError):
    """This machine cannot hold what the settings require to be held."""


def lacking(layers: Mapping[str, str], *, programs: bool, network: bool = False) -> list[str]:
    """Return what nothing holds here, each with the reasons; empty where the jail is complete."""
    held = _PROGRAMS if programs else _VERIFIERS
    found = []
    for what, names in held.items():
        if what == "network" and network:
            continue
        if all(layers.get(name, "off") for name in names):
            reasons = "; ".join(f"{name}: {layers.get(name, 'off')}" for name in names)
            found.append(f"{what} ({reasons})")
    return found


_warned = False


def insist(layers: Mapping[str, str], mode: Mode | None, *, network: bool) -> None:
    """Refuse verifiers whose sandbox is required and has a hole; otherwise say once what is not held."""
    global _warned
    missing = lacking(layers, programs=False, network=network)
    if missing and mode == "required":
        raise ConfigError(refusal(missing, "verifiers"))
    if missing and not _warned:
        _warned = True
        logging.getLogger("hacrl").warning("verifiers run in less of a sandbox: nothing holds %s", "; ".join(missing))


def refusal(missing: list[str], what: str) -> str:
    """Return the one line that says why nothing is run, and what can be done."""
    return (
        f"the sandbox cannot hold {what} on this machine: nothing holds {', '.join(missing)}; run `hacrl doctor`, use "
        "a machine or container that allows user namespaces or Landlock, or set verify.sandbox to best or off"
    )

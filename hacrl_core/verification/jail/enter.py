"""Put a worker into the jail: fork it into namespaces, then give up rights, files and system calls, layer by layer.

The spawner, which is trusted and runs nothing of a user's, calls ``fork_jailed``. Each layer is tried; what the machine
refuses is reported with the reason, and ``layers.lacking`` decides whether that is enough.
"""

import contextlib
import dataclasses
import json
import os
import signal
import site
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hacrl_core.place import ROOT
from hacrl_core.verification.jail import cgroups, kernel, landlock, namespaces, seccomp

# Shared libraries, time zones, and what name resolution and TLS read where the network is allowed.
_SYSTEM = (
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime"),
    *("/usr/share/zoneinfo", "/etc/alternatives"),
)
_FOR_NETWORK = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/services", "/etc/host.conf", "/etc/gai.conf"),
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/usr/share/ca-certificates"),
)
_TEMPORARY_MB = 64
_LEFT_OUT = "left out"
_OF_NAMESPACES = ("namespaces", "private root", "network namespace")


@dataclass(frozen=True, slots=True)
class Jail:
    """What a worker's jail shows and allows. Off: nothing is built, and the worker is a plain process."""

    off: bool = False
    # Files and folders that may be read besides the Python installation.
    read: tuple[str, ...] = ()
    network: bool = False
    # Layers that are not built, so that a test can show what the others hold alone.
    without: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the jail as a message to the spawner."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Jail":
        """Read a message of the pool."""
        return Jail(values["off"], tuple(values["read"]), values["network"], tuple(values["without"]))


def python_installation() -> list[str]:
    """Return the folders that importing Python's own and installed modules reads."""
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *_SYSTEM]
    packages = ("site-packages", "dist-packages")
    places += [path for path in (*sys.path, site.getusersitepackages()) if path.rstrip("/").endswith(packages)]
    return [path for path in dict.fromkeys(places) if os.path.exists(path)]


def fork_jailed(
    jail: Jail, become_worker: Callable[[dict[str, str]], None], memory: int = 0, processes: int = 0
) -> tuple[int, int, dict[str, str]]:
    """Fork a worker into the jail; return its process id, that of the jail's process 1 (0: none), and the layers.

    The layers are a name each with the reason why it is missing, empty where it holds. ``become_worker`` runs in the
    worker and does not return. ``memory`` and ``processes`` limit the jail as a whole, where a control group can.
    """

    def limit(worker: int, init: int) -> str:
        if jail.off or not memory or "control group" in jail.without:
            return "off" if jail.off or not memory else _LEFT_OUT
        return cgroups.confine(worker, [pid for pid in (worker, init) if pid], memory, processes)

    try:
        return _fork(jail, become_worker, limit, _LEFT_OUT if "namespaces" in jail.without else "")
    except _NoNamespacesError as error:
        # Half a namespace is not to be used: the worker is forked again without.
        return _fork(jail, become_worker, limit, str(error))


class _NoNamespacesError(OSError):
    """Namespaces or the private root could not be made."""


def _fork(
    jail: Jail, become_worker: Callable[[dict[str, str]], None], limit: Callable[[int, int], str], without: str
) -> tuple[int, int, dict[str, str]]:
    """Fork a worker through a builder process, with namespaces unless there is a reason to go without."""
    report_read, report_write = os.pipe()
    go_read, go_write = os.pipe()
    builder = os.fork()
    if builder == 0:
        os.close(report_read)
        os.close(go_write)
        try:
            _build(jail, report_write, go_read, become_worker, without)
        finally:
            os._exit(1)
    os.close(report_write)
    os.close(go_read)
    with open(report_read, "rb") as report:
        pids = report.readline()
        # Only when the builder is gone are the worker and process 1 children of this process.
        os.waitpid(builder, 0)
        # Before either goes on, so that whatever they start is in the group.
        group = limit(*(int(pid) for pid in pids.split())) if pids[:1].isdigit() else ""
        with contextlib.suppress(OSError):
            os.write(go_write, b"go")
        os.close(go_write)
        text = report.read()
    if pids.startswith(b"!"):
        raise _NoNamespacesError(pids[1:].decode().strip())
    if not pids or not text:
        raise OSError("a worker could not be forked")
    worker, init = (int(pid) for pid in pids.split())
    layers = json.loads(text)
    return worker, init, {**layers, "control group": group} if layers else layers


def _build(jail: Jail, report: int, go: int, become_worker: Callable[[dict[str, str]], None], without: str) -> None:
    """Make namespaces, then fork process 1 and the worker into them, tell their ids and end."""
    layers: dict[str, str] = {}
    folder = os.getcwd()
    if not jail.off:
        layers.update(dict.fromkeys(_OF_NAMESPACES, without))
        if jail.network:
            layers["network namespace"] = "the network is allowed"
    init = 0
    if not jail.off and not without:
        try:
            namespaces.unshare(network=jail.network)
            namespaces.build_root(visible(jail), _TEMPORARY_MB)
            init = _fork_init(go)
            namespaces.enter_root()
        except OSError as error:
            os.write(report, f"!{error.strerror or error}\n".encode())
            if init:
                os.kill(init, signal.SIGKILL)
            os._exit(0)
    worker = os.fork()
    if worker:
        os.write(report, f"{worker} {init}\n".encode())
        os._exit(0)
    _wait_for_go(go)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    if not jail.off:
        _lock(jail, layers)
    if kernel.LINUX:
        kernel.die_with_parent()
    os.write(report, json.dumps(layers).encode())
    os.close(report)
    become_worker(layers)


def _wait_for_go(go: int) -> None:
    if not os.read(go, 1):
        # The spawner died.
        os._exit(1)
    os.close(go)


def visible(jail: Jail) -> list[str]:
    """Return what a jail's worker may read: the Python installation, this package, and what was asked for."""
    ours = [os.path.join(ROOT, name) for name in dict.fromkeys((__name__.partition(".")[0], "hacrl"))]
    network = _FOR_NETWORK if jail.network else ()
    return [*python_installation(), *filter(os.path.isdir, ours), *network, *jail.read]


def _fork_init(go: int) -> int:
    ready_read, ready_write = os.pipe()
    init = os.fork()
    if init:
        os.close(ready_write)
        os.read(ready_read, 1)
        os.close(ready_read)
        return init
    try:
        namespaces.mount_proc()
        os.write(ready_write, b"r")
        os.setsid()
        namespaces.become_nobody()
        kernel.drop_capabilities()
        kernel.undumpable()
        _wait_for_go(go)
        kernel.die_with_parent()
        os.closerange(3, 256)
        namespaces.run_init()
    finally:
        os._exit(1)


def _lock(jail: Jail, layers: dict[str, str]) -> None:
    """Give up what this process still may do, in the order in which each step is still possible."""
    own_root = layers.get("private root") == ""
    own_pids = layers.get("namespaces") == ""
    layers.update(dict.fromkeys(jail.without, _LEFT_OUT))
    _attempt(layers, "no other user", lambda: _change_user(jail))
    _attempt(layers, "no capabilities", kernel.drop_capabilities)
    _attempt(layers, "no new privileges", kernel.no_new_privileges)

    def restrict_files() -> None:
        if not landlock.version():
            raise OSError("this kernel has no Landlock")
        read = [*visible(jail), *(["/proc"] if own_pids else [])]
        write = [*namespaces.DEVICES, *(["/tmp"] if own_root else [])]
        # Importing lists folders; where the root is the jail's own, there is nothing else to list.
        listed = ["/"] if own_root else [os.path.dirname(path) for path in jail.read]
        rules = landlock.ruleset(read, write, listed, network=jail.network)
        landlock.restrict(rules)
        os.close(rules)

    def filter_calls() -> None:
        if not seccomp.supported():
            raise OSError(f"no filter is written for {sys.platform} on {kernel.ARCHITECTURE}")
        seccomp.install(seccomp.verifier_filter(network=jail.network, connect=own_root and own_pids))

    _attempt(layers, "Landlock", restrict_files)
    if not layers["Landlock"] and landlock.version() < landlock.SCOPED:
        layers["signals"] = f"Landlock version {landlock.version()} does not hold signals, version 6 does"
    else:
        layers["signals"] = layers["Landlock"]
    _attempt(layers, "seccomp", filter_calls)
    _attempt(layers, "unreadable memory", kernel.undumpable)


def _change_user(jail: Jail) -> None:
    """Become nobody, where this process is root and nobody can read all that the worker may read."""
    if os.geteuid():
        return
    for place in (sys.prefix, sys.base_prefix, os.path.dirname(os.path.abspath(__file__)), *jail.read):
        if not _open_to_all(place):
            raise OSError(f"only root can read {place}; the worker stays root, without capabilities")
    namespaces.become_nobody()


def _open_to_all(path: str) -> bool:
    """Return whether everybody may read a path and enter the folders on the way to it."""
    parts = path.split("/")
    try:
        on_the_way = ("/".join(parts[:end]) or "/" for end in range(1, len(parts)))
        return bool(os.stat(path).st_mode & 0o004) and all(os.stat(place).st_mode & 0o001 for place in on_the_way)
    except FileNotFoundError:
        return True


def _attempt(layers: dict[str, str], name: str, step: Callable[[], None]) -> None:
    if layers.get(name) == _LEFT_OUT:
        return
    try:
        step()
        layers[name] = ""
    except OSError as error:
        layers[name] = error.strerror or str(error)


def program_paths() -> Sequence[str]:
    """Return what a program may read: the Python installation, without this package."""
    return python_installation()

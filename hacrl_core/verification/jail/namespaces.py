"""Namespaces: a user, a network, process ids and mounts of the jail's own, with a root folder that holds little.

Works for an unprivileged user where the kernel allows user namespaces. As root, the jailed processes become *nobody*.
"""

import contextlib
import ctypes
import os
import signal
import stat
import struct
from collections.abc import Iterator, Sequence
from typing import NoReturn

from hacrl_core.verification.jail import kernel

NOBODY = 65534
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_STAGING = "/tmp"
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x1, 0x2, 0x4
_KEPT_FLAGS = {8: kernel.MS_NOEXEC, 1024: 1024, 2048: 2048, 4096: 1 << 21}


def unshare(*, network: bool) -> None:
    """Move to new namespaces; process ids are new for children only. Raise OSError where the kernel refuses."""
    flags = kernel.NEW_MOUNTS | kernel.NEW_IPC | kernel.NEW_HOST_NAME | kernel.NEW_PIDS
    flags |= 0 if network else kernel.NEW_NETWORK
    user, group = os.geteuid(), os.getegid()
    if user:
        kernel.unshare(flags | kernel.NEW_USER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
        return
    with _mapper(f"0 0 1\n{NOBODY} {NOBODY} 1"):
        try:
            kernel.unshare(flags | kernel.NEW_USER)
        except OSError:
            # Root in a container may lack user namespaces and still have the others.
            kernel.unshare(flags)


@contextlib.contextmanager
def _mapper(text: str) -> Iterator[None]:
    """Have a process that stays outside map the users of this one's new namespace; it may, this one no longer."""
    process = os.getpid()
    go_read, go_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        code = 1
        try:
            os.close(go_write)
            os.read(go_read, 1)
            if os.readlink(f"/proc/{process}/ns/user") != os.readlink("/proc/self/ns/user"):
                _write(f"/proc/{process}/uid_map", text)
                _write(f"/proc/{process}/gid_map", text)
            code = 0
        finally:
            os._exit(code)
    os.close(go_read)
    try:
        yield
    finally:
        os.close(go_write)
        _, status = os.waitpid(helper, 0)
    if status:
        raise OSError("users cannot be mapped into a user namespace")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(read: Sequence[str], temporary_mb: int) -> None:
    """Build a root folder at /new with these paths, read-only, the harmless devices and an empty /tmp.

    ``mount_proc``, by a process of the jail's own process ids, and then ``enter_root`` follow.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _STAGING, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    os.mkdir(f"{_STAGING}/old")
    os.mkdir(f"{_STAGING}/new")
    kernel.pivot_root(_STAGING, f"{_STAGING}/old")
    os.chdir("/")
    kernel.mount("tmpfs", "/new", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for folder in ("/new/tmp", "/new/proc"):
        os.makedirs(folder, exist_ok=True)
    options = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", "/new/tmp", "tmpfs", options, f"mode=1777,size={temporary_mb}m,nr_inodes=4096")
    for path in _outermost(read):
        _show(path)
    for path in DEVICES:
        with contextlib.suppress(OSError):
            _make_file(f"/new{path}")
            kernel.mount(f"/old{path}", f"/new{path}", "", kernel.MS_BIND)


def enter_root() -> None:
    """Make /new the root folder of this mount namespace; nothing of the old one can be reached from then on."""
    kernel.unmount("/old")
    os.chdir("/new")
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.mount(
        "none", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    )


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths without those that lie in another of them; symbolic links are kept."""
    chosen: list[str] = []
    for path in sorted({os.path.abspath(path) for path in paths}):
        inside = any(path == other or path.startswith(other.rstrip("/") + "/") for other in chosen)
        if not inside:
            chosen.append(path)
    return chosen


def _show(path: str) -> None:
    """Make a path of the old root visible in the new one; where it is a symbolic link, its target too."""
    real = _real("/old", path)
    if not os.path.lexists(f"/old{real}"):
        return
    target = f"/new{real}"
    if not os.path.lexists(target):
        if stat.S_ISDIR(os.stat(f"/old{real}").st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            _make_file(target)
        kernel.mount(f"/old{real}", target, "", kernel.MS_BIND | kernel.MS_REC)
        _read_only(target)
    if real != path and not os.path.lexists(f"/new{path}"):
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(f"/new{path}"), exist_ok=True)
            os.symlink(real, f"/new{path}")


def _real(root: str, path: str) -> str:
    """Resolve symbolic links as they were when ``root`` was the root folder."""
    parts = [part for part in path.split("/") if part]
    done = ""
    links = 0
    while parts:
        part = parts.pop(0)
        if part == "..":
            done = os.path.dirname(done)
            continue
        if part == ".":
            continue
        candidate = f"{done}/{part}"
        if os.path.islink(root + candidate) and links < 40:
            links += 1
            target = os.readlink(root + candidate)
            parts = [piece for piece in target.split("/") if piece] + parts
            done = "" if target.startswith("/") else done
        else:
            done = candidate
    return done or "/"


def _make_file(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w"):
        pass


def _read_only(path: str) -> None:
    attributes = ctypes.create_string_buffer(
        struct.pack("=QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0), 32
    )
    try:
        arguments = (_AT_FDCWD, ctypes.c_char_p(path.encode()), _AT_RECURSIVE, attributes, 32)
        kernel.syscall("mount_setattr", _MOUNT_SETATTR, *arguments)
    except OSError:
        # Kernels before 5.12. What the source's mount forbids has to be repeated.
        flags = os.statvfs(path).f_flag
        kept = sum(mount_flag for flag, mount_flag in _KEPT_FLAGS.items() if flags & flag)
        wanted = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("none", path, "", wanted | kept)


def become_nobody() -> None:
    """Give up root, where this process is root."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def mount_proc() -> None:
    """Show the jail's own processes in /new/proc; a container that hides parts of /proc does not allow it.

    The kernel allows it only while the machine's own /proc can still be seen.
    """
    with contextlib.suppress(OSError):
        kernel.mount("proc", "/new/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def run_init() -> NoReturn:
    """Be process 1 of the jail: collect processes that have ended. When it is killed, the kernel kills all others."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})

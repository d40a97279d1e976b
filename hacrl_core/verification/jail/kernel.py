"""The system calls behind the jail, by ctypes: no compiler and no package is needed.

Every function raises OSError with the name of the call, so that a layer that cannot be built says why.
"""

import ctypes
import os
import platform
import sys
from typing import Any

NEW_MOUNTS = 0x00020000
NEW_HOST_NAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63

LINUX = sys.platform == "linux"
ARCHITECTURE = platform.machine()
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(ARCHITECTURE, -1)


def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


_libc = _library() if LINUX else None


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: Any) -> int:
    """Make a system call by number; integers are passed as 64-bit values."""
    if _libc is None or number < 0:
        raise OSError(38, f"{name}: not available on {sys.platform} {ARCHITECTURE}")
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(name, _libc.syscall(ctypes.c_long(number), *converted))


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    """Call prctl(2) with up to two values."""
    if _libc is None:
        raise OSError(38, f"prctl: not available on {sys.platform}")
    values = [ctypes.c_ulong(v) for v in (value, third, 0, 0)]
    return _checked(f"prctl {option}", _libc.prctl(ctypes.c_int(option), *values))


def unshare(flags: int) -> None:
    """Move this process (or, for process ids, its children) into new namespaces."""
    if _libc is None:
        raise OSError(38, f"unshare: not available on {sys.platform}")
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Call mount(2)."""
    assert _libc is not None
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() or None)
    _checked(f"mount {target}", _libc.mount(*arguments))


def unmount(target: str) -> None:
    """Detach a mount, also while it is in use."""
    assert _libc is not None
    _checked(f"umount {target}", _libc.umount2(target.encode(), DETACH))


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root folder of this mount namespace and put the old one at ``old``."""
    syscall("pivot_root", _PIVOT_ROOT, ctypes.c_char_p(new.encode()), ctypes.c_char_p(old.encode()))


def drop_capabilities() -> None:
    """Give up every capability, for good: the bounding set, the ambient set, and those of this process."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            # Without CAP_SETPCAP the bounding set stays; with no_new_privs nothing can be gained from it.
            break
    prctl(PR_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    empty = (ctypes.c_uint32 * 6)()
    assert _libc is not None
    _checked("capset", _libc.capset(header, empty))


def no_new_privileges() -> None:
    """Let no program that is executed from here on gain rights (set-user-id files, file capabilities)."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def undumpable() -> None:
    """Keep processes of the same user from reading this one's memory and descriptors."""
    prctl(PR_SET_DUMPABLE, 0)


def die_with_parent() -> None:
    """Be killed by the kernel when the parent process ends."""
    prctl(PR_SET_PDEATHSIG, 9)

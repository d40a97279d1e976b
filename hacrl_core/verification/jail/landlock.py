"""Landlock: the kernel refuses every path outside a list, also to processes without any right to give up.

The kernel says which version of the interface it has; each version adds kinds of access that a ruleset can handle.
"""

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from hacrl_core.verification.jail import kernel

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_REQUEST = 1
_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE, _IOCTL_DEVICE = 1 << 1, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# What rules on a file, not on a folder, may name.
_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEVICE
_FIRST_VERSION = (1 << 13) - 1
_TCP = 0b11
_SCOPES = 0b11
SCOPED = 6


def version() -> int:
    """Return the version of Landlock that this kernel has; 0 where it has none."""
    try:
        return kernel.syscall("landlock", _CREATE, 0, 0, _VERSION_REQUEST)
    except OSError:
        return 0


def ruleset(read: Iterable[str], write: Iterable[str], listed: Iterable[str] = (), *, network: bool) -> int:
    """Return the descriptor of a ruleset: these paths may be read, those written, those folders listed, nothing else.

    Without ``network`` TCP is refused too (version 4). Signals and abstract sockets do not leave the jail (version 6).
    Paths that do not exist are left out.
    """
    number = version()
    handled = _handled(number)
    attributes = struct.pack("=Q", handled)
    if number >= 4:
        attributes += struct.pack("=Q", 0 if network else _TCP)
    if number >= SCOPED:
        attributes += struct.pack("=Q", _SCOPES)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    descriptor = kernel.syscall("landlock_create_ruleset", _CREATE, buffer, len(attributes), 0)
    os.set_inheritable(descriptor, False)
    try:
        for path in read:
            _allow(descriptor, path, _READ & handled)
        for path in write:
            _allow(descriptor, path, handled & ~_IOCTL_DEVICE)
        for path in listed:
            _allow(descriptor, path, _READ_DIR)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def restrict(descriptor: int) -> None:
    """Put this process and all that it starts under a ruleset, for good; needs no_new_privs."""
    kernel.syscall("landlock_restrict_self", _RESTRICT, descriptor, 0)


def _handled(number: int) -> int:
    handled = _FIRST_VERSION
    for since, bit in ((2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEVICE)):
        if number >= since:
            handled |= bit
    return handled


def _allow(ruleset_descriptor: int, path: str, access: int) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(place).st_mode):
                access &= _OF_FILES
            rule = ctypes.create_string_buffer(struct.pack("=Qi", access, place), 12)
            kernel.syscall("landlock_add_rule", _ADD_RULE, ruleset_descriptor, _PATH_BENEATH, rule, 0)
        finally:
            os.close(place)

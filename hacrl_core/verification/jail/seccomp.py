"""Filters on system calls (seccomp), written as BPF instructions.

*verifier* forbids what no verifier needs. *zygote* and *program* together allow what a computing Python program needs
and nothing else; each program adds only the second, which is short, since adding a filter takes time. A forbidden call
fails with EPERM, so that the program sees a PermissionError and its verdict can say so.
"""

import ctypes
import errno
import struct
from collections.abc import Iterable

from hacrl_core.verification.jail import kernel
from hacrl_core.verification.jail.numbers import NUMBERS, PROGRAM_MAY, VERIFIER_MAY_NOT, ZYGOTE_MAY

_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls of the x32 interface on x86-64 have this bit; nobody uses them.
_X32 = 0x40000000
_KILL = 0x80000000
_ALLOW = 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_INSTRUCTION = struct.Struct("=HBBI")
# Stands for the process id in a packed filter; no id, call or flag is this number.
_PLACE_OF_PID = 0x7E57ED01
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000
_AF_UNIX = 1
_PRCTL_HARMLESS = (3, 15, 16, 0x53564D41)
_FCNTL_HARMLESS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
_IOCTL_HARMLESS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Writing into a terminal's input.
_IOCTL_TERMINAL = (0x5412, 0x541C)

Instructions = list[tuple[int, int, int, int]]


def supported() -> bool:
    """Return whether the numbers of this machine's system calls are known."""
    return kernel.LINUX and kernel.ARCHITECTURE in NUMBERS


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install(packed: bytes) -> None:
    """Put this process and all that it starts under a packed filter, for good; needs no_new_privs."""
    code = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(packed) // _INSTRUCTION.size, ctypes.addressof(code))
    kernel.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program))


def for_process(packed: bytes, pid: int) -> bytes:
    """Return the filter of programs for the process of this id."""
    return packed.replace(_PLACE_OF_PID.to_bytes(4, "little"), pid.to_bytes(4, "little"))


def _packed(instructions: Instructions) -> bytes:
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in instructions)


def verifier_filter(*, network: bool, connect: bool) -> bytes:
    """Return the filter of a verifier's worker.

    ``network`` allows sockets of every family. ``connect`` allows connections of local sockets, which is safe where
    namespaces hide those of the machine.
    """
    rules = _start()
    for name in sorted(VERIFIER_MAY_NOT):
        rules += _when(name, [_answer(errno.EPERM)])
    rules += _when("clone3", [_answer(errno.ENOSYS)])
    rules += _when("clone", [_load(0), (_ANY_BIT, 0, 1, _CLONE_NEW), _answer(errno.EPERM), _allow()])
    rules += _when("ioctl", _unless(1, _IOCTL_TERMINAL))
    if not network:
        rules += _when("socket", [_load(0), (_EQUAL, 1, 0, _AF_UNIX), _answer(errno.ENETUNREACH), _allow()])
        if not connect:
            rules += _when("connect", [_answer(errno.ENETUNREACH)])
    return _packed([*rules, _allow()])


def zygote_filter() -> bytes:
    """Return the filter of a zygote: what programs may do, and what forking and confining one takes."""
    rules = _start()
    for name in sorted(PROGRAM_MAY | ZYGOTE_MAY):
        rules += _when(name, [_allow()])
    rules += _when("clone3", [_answer(errno.ENOSYS)])
    rules += _when("socketpair", _only(0, (_AF_UNIX,)))
    rules += _when("ioctl", _only(1, _IOCTL_HARMLESS))
    return _packed([*rules, _answer(errno.EPERM)])


def program_filter() -> bytes:
    """Return what programs may not do of what zygotes may, for ``for_process``.

    Threads, but no process; signals to itself only; nothing of what builds confinements.
    """
    rules = _start()
    pid = _PLACE_OF_PID
    special = {
        "clone": [_load(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), _answer(errno.EPERM), _allow()],
        "kill": _only(0, (pid,)),
        "prlimit64": _only(0, (0, pid)),
        "prctl": _only(0, _PRCTL_HARMLESS),
        "fcntl": _only(1, _FCNTL_HARMLESS),
        "tgkill": _only(0, (pid,)),
    }
    for name in sorted(ZYGOTE_MAY):
        rules += _when(name, special.get(name) or [_answer(errno.EPERM)])
    return _packed([*rules, _allow()])


def _start() -> Instructions:
    """Refuse another architecture's calls, then load the number of the call."""
    rules: Instructions = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCHITECTURE[kernel.ARCHITECTURE]), _return(_KILL)]
    rules.append((_LOAD, 0, 0, 0))
    if kernel.ARCHITECTURE == "x86_64":
        rules += [(_AT_LEAST, 0, 1, _X32), _answer(errno.ENOSYS)]
    return rules


def _when(name: str, then: Instructions) -> Instructions:
    """Return instructions that run ``then``, which ends in a return, for the call of this name."""
    number = NUMBERS[kernel.ARCHITECTURE].get(name)
    return [] if number is None else [(_EQUAL, 0, len(then), number), *then]


def _only(argument: int, values: Iterable[int]) -> Instructions:
    rules = [_load(argument)]
    for value in values:
        rules += [(_EQUAL, 0, 1, value), _allow()]
    return [*rules, _answer(errno.EPERM)]


def _unless(argument: int, values: Iterable[int]) -> Instructions:
    rules = [_load(argument)]
    for value in values:
        rules += [(_EQUAL, 0, 1, value), _answer(errno.EPERM)]
    return [*rules, _allow()]


def _load(argument: int) -> tuple[int, int, int, int]:
    """Load the low half of an argument; both architectures are little-endian."""
    return (_LOAD, 0, 0, 16 + 8 * argument)


def _return(action: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, action)


def _allow() -> tuple[int, int, int, int]:
    return _return(_ALLOW)


def _answer(number: int) -> tuple[int, int, int, int]:
    return _return(0x00050000 | number)

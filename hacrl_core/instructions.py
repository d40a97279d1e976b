"""Instructions that a CPU announces and does not have.

Some virtual machines announce AMX, the matrix instructions of newer Intel CPUs, and then end a process that uses them.
torch's products of bfloat16 use them where they are announced, so the first such product would end a stage without a
word. A child process tries them out first. It needs no torch and takes a few hundredths of a second; machines that do
not announce AMX start no child.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

# oneDNN reads it once, at its first operation: it has to be set before torch computes anything.
VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_BF16"
_CPUINFO = Path("/proc/cpuinfo")
_SECONDS = 30.0

# arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA): where the kernel refuses it, oneDNN does without AMX by itself. Otherwise
# three tiles of 16 rows × 64 bytes are set up and multiplied: ldtilecfg, tilezero ×3, tdpbf16ps, tilerelease, ret.
_PROGRAM = """
import ctypes, mmap, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
permitted = ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0
if permitted:
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("c4e2784907 c4e27b49c0 c4e27b49c8 c4e27b49d0 c4e26a5cc1 c4e27849c0 c3"))
    tiles = bytearray(64)
    tiles[0] = 1
    tiles[16:22] = bytes([64, 0] * 3)
    tiles[48:51] = bytes([16] * 3)
    held = (ctypes.c_ubyte * 64).from_buffer(tiles)
    place = ctypes.addressof(ctypes.c_ubyte.from_buffer(code))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(place)(ctypes.addressof(held))
"""


def settle_instructions() -> str:
    """Keep torch from AMX where a child process that used it died; return a line for the user if that was done now.

    Call it before torch computes anything. What the user has set stays, and processes started later inherit it.
    """
    if os.environ.get(VARIABLE) or not _announces_amx() or (why := _trouble()) is None:
        return ""
    os.environ[VARIABLE] = WITHOUT_AMX
    return (
        f"this CPU announces AMX, and a process that uses it {why}: bfloat16 runs without it, slower "
        f"({VARIABLE}={WITHOUT_AMX}; set the variable yourself to decide otherwise)"
    )


def _announces_amx() -> bool:
    try:
        with _CPUINFO.open() as lines:
            return any("amx_tile" in line.split() for line in lines if line.startswith("flags"))
    except OSError:
        return False


@cache
def _trouble(program: str = _PROGRAM) -> str | None:
    """Return what became of a process that multiplied two tiles, None where it ended well."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program], capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"does not end in {_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    return f"is ended by signal {-done.returncode}" if done.returncode < 0 else "could not be tried out"

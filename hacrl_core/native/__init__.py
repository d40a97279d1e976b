"""C kernels for small models on a CPU, compiled on this machine the first time that they are wanted.

A model of a million parameters spends as much time between its matrix products as in them: many passes over memory,
each an operation of torch. A kernel makes one pass of them. Each kernel has a twin in plain torch, which runs where
there is no C compiler, where compiling fails, or where ``HACRL_NATIVE=0`` is set. Twins agree within rounding.

Compiling takes about a second. The library is kept in the user's cache folder, under a name that depends on the source,
the flags, the compiler and the CPU, so that machines with a common home folder do not run each other's code.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SWITCH = "HACRL_NATIVE"
# Sums may be reordered, so that they fill vector registers; NaN and infinity keep their meaning.
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-fassociative-math", "-freciprocal-math",
)  # fmt: skip
_SECONDS = 60


@functools.cache
def kernels(name: str) -> ctypes.CDLL | None:
    """Return the compiled functions of ``name``.c, or None where torch has to do without them."""
    compiler = find_compiler()
    if os.environ.get(SWITCH) == "0" or compiler is None:
        return None
    source = Path(__file__).with_name(f"{name}.c")
    try:
        return ctypes.CDLL(str(_built(source, compiler)))
    except (OSError, subprocess.SubprocessError) as problem:
        reason = getattr(problem, "stderr", None) or str(problem)
        logger.info("%s: no native kernels, torch does their work: %s", source.name, reason.strip()[-300:])
        return None


def find_compiler() -> tuple[str, ...] | None:
    """Return the command of a C compiler: that of ``CC``, else cc, gcc or clang; None if there is none."""
    wanted = shlex.split(os.environ.get("CC", ""))
    for command in (wanted, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return tuple(command)
    return None


def _built(source: Path, compiler: tuple[str, ...]) -> Path:
    """Return the library of a source file, compiled now if it is not kept from before."""
    code = source.read_bytes() + source.with_name("common.h").read_bytes()
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True).stdout
    parts = (code, " ".join(FLAGS).encode(), version, _cpu().encode())
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:20]
    folder = _folder()
    library = folder / f"{source.stem}-{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / library.name
            subprocess.run(
                [*compiler, *FLAGS, str(source), "-o", str(made), "-lm"],
                capture_output=True, text=True, timeout=_SECONDS, check=True,
            )  # fmt: skip
            made.replace(library)  # whole or not at all: other processes may be compiling the same
    return library


def _folder() -> Path:
    """Return a folder for libraries that nobody else may write into: what lies in it is run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "hacrl" / "native"
    folder.mkdir(parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others than its user; remove it or set {SWITCH}=0")
    return folder


def _cpu() -> str:
    """Return what -march=native depends on: the CPU's name and its flags, where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "cpu family", "model\t", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))

"""C kernels for small models on a CPU, compiled on this machine the first time that they are wanted.

A model of a million parameters spends as much time between its matrix products as in them: many passes over memory,
each an operation of torch. A kernel makes one pass of them. Each kernel has a twin in plain torch, which runs where
there is no C compiler, where compiling fails, or where ``HACRL_NATIVE=0`` is set. Twins agree within rounding.

Compiling takes some seconds. The library is kept in the user's cache folder, under a name that depends on the source,
the flags, the compiler and the CPU, so that machines with a common home folder do not run each other's code, and on its
own bytes: one that a full disk or a power cut left in pieces would end the process that loads it.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

SWITCH = "HACRL_NATIVE"
NAMES = ("body", "decode", "products")
# Sums may be reordered, so that they fill vector registers; NaN and infinity keep their meaning.
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-fassociative-math", "-freciprocal-math", "-funroll-loops",
)  # fmt: skip
_SECONDS = 60
_SECONDS_TO_ANSWER = 10
_SECONDS_TO_WAIT = 30
_PLACE = "tmp"  # how the names of folders begin in which something is compiled


@functools.cache
def kernels(name: str) -> ctypes.CDLL | None:
    """Return the compiled functions of ``name``.c, or None where torch has to do without them."""
    compiler = find_compiler()
    if os.environ.get(SWITCH) == "0" or compiler is None:
        return None
    source = Path(__file__).with_name(f"{name}.c")
    try:
        return ctypes.CDLL(str(_built(source, compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as problem:  # RuntimeError: there is no home folder
        reason = getattr(problem, "stderr", None) or str(problem)
        logger.info("%s: no native kernels, torch does their work: %s", source.name, reason.strip()[-300:])
        return None


def prepare_kernels(is_wanted: Callable[[], bool]) -> None:
    """Compile and load them, as far as that can be done here, until this process ``is_wanted`` for something else."""
    for name in NAMES:
        if not is_wanted():
            kernels(name)


def find_compiler() -> tuple[str, ...] | None:
    """Return the command of a C compiler: that of ``CC``, else cc, gcc or clang; None if there is none."""
    try:
        wanted = shlex.split(os.environ.get("CC", ""))
    except ValueError:  # a quote that nothing closes
        wanted = []
    for command in (wanted, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return tuple(command)
    return None


def _built(source: Path, compiler: tuple[str, ...]) -> Path:
    """Return the library of a source file, compiled now if it is not kept from before, whole."""
    version = _run([*compiler, "--version"], _SECONDS_TO_ANSWER)
    code = (source.read_text(), source.with_name("common.h").read_text())
    key = "\0".join((*code, *FLAGS, "", *compiler, "", version, _cpu()))
    folder, stem = _folder(), f"{source.stem}-{_sha256(key.encode())}"
    if known := _kept(folder, stem):
        return known
    with _alone(folder):
        if known := _kept(folder, stem):  # made by another process meanwhile
            return known
        for left in folder.glob(f"{_PLACE}*"):
            if time.time() - left.stat().st_mtime > 2 * _SECONDS:  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_PLACE) as place:
            made = Path(place) / "made.so"
            _run([*compiler, *FLAGS, str(source), "-o", str(made), "-lm"], _SECONDS, TMPDIR=place)
            return made.replace(folder / _name(stem, made))


def _kept(folder: Path, stem: str) -> Path | None:
    """Return the library that was made before, if it is whole."""
    return next((found for found in sorted(folder.glob(f"{stem}-*.so")) if found.name == _name(stem, found)), None)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time compile; one that waited for too long, or cannot lock the folder, goes on as well."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # a folder that cannot be read, a network's file system without locks
            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)
            _lock(handle)
        yield


def _lock(handle: int) -> None:
    deadline = time.monotonic() + _SECONDS_TO_WAIT
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)


def _name(stem: str, library: Path) -> str:
    """Return the name of a library of which no byte is missing."""
    return f"{stem}-{_sha256(library.read_bytes())}.so"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _run(command: list[str], seconds: float, **environment: str) -> str:
    """Return what a command prints, which need not be text."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=True,
        env={**os.environ, **environment},
    ).stdout


def _folder() -> Path:
    """Return a folder for libraries that nobody else may write into: what lies in it is run."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # its specification says that others do not count
        base = Path.home() / ".cache"
    folder = base / "hacrl" / "native"
    folder.mkdir(0o700, parents=True, exist_ok=True)  # many systems let a user's group write where nothing is said
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

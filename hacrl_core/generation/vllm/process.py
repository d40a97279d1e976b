"""The processes on our side of the pipes: one launcher per vLLM environment, which forks workers, and their handles."""

import contextlib
import json
import os
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from hacrl_core.errors import EngineError
from hacrl_core.place import ROOT

Message = dict[str, Any]
WORKER_FOLDER = Path(__file__).parent / "worker"
TAIL_LINES = 12
TAIL_WIDTH = 300

# One engine process per GPU set, no usage reports, no downloads, no thread pinning (agents share the cores).
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
# Where the user has set nothing else.
DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class WorkerDied(Exception):
    """The worker or its launcher is gone, or hangs; the message says how and ends with the log's last lines."""


class WorkerFailed(Exception):
    """vLLM raised: the error, and the log's last lines."""


class _Log:
    """stdout and stderr of a process in a nameless file: no reader needed, nothing left on disk whatever happens."""

    def __init__(self) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile("ab+", buffering=0)  # noqa: SIM115

    def tail(self) -> str:
        size = os.fstat(self.file.fileno()).st_size
        start = max(0, size - (1 << 17))
        lines = os.pread(self.file.fileno(), size - start, start).decode(errors="replace").splitlines()
        shown = [line[:TAIL_WIDTH] for line in lines if line.strip()][-TAIL_LINES:]
        return "\n".join(["last lines of its stderr:", *shown]) if shown else "its stderr is empty"


class Launcher:
    """The process that has vLLM imported and forks workers.

    The engines of this process share it; it is stopped with the last of them.
    """

    _running: ClassVar[dict[Path, "Launcher"]] = {}
    _registry: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, python: Path) -> None:
        self.python = python
        self.users = 0
        self.version = ""
        self._lock = threading.Lock()
        self._log = _Log()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(WORKER_FOLDER), os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [str(python), "-P", "-m", "hacrl_vllm_launcher", str(theirs.fileno()), str(os.getpid())],
                env=DEFAULTS | dict(os.environ) | ENVIRONMENT | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=self._log.file,
                stderr=self._log.file,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is ours to handle
            )

    @classmethod
    def acquire(cls, python: Path) -> "Launcher":
        """Return the environment's launcher, starting it if there is none."""
        with cls._registry:
            launcher = cls._running.get(python)
            if launcher is None or launcher._process.poll() is not None:
                launcher = cls._running[python] = cls(python)
            launcher.users += 1
            return launcher

    def release(self) -> None:
        """Give the launcher back; the last user stops it."""
        with self._registry:
            self.users -= 1
            if self.users:
                return
            if self._running.get(self.python) is self:
                del self._running[self.python]
        self._control.close()
        try:
            self._process.wait(30.0 if self.version else 0.0)  # while it imports, it does not listen
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.file.close()

    def wait(self, timeout: float) -> None:
        """Wait until vLLM is imported."""
        with self._lock:
            if not self.version:
                self.version = str(self._receive(timeout)["version"])

    def spawn(
        self, commands: int, results: int, log: int, timeout: float, environment: dict[str, str] | None = None
    ) -> int:
        """Fork a worker on these file descriptors, with variables of its own; return its process id."""
        self.wait(timeout)
        with self._lock:
            message = json.dumps({"op": "spawn", "environment": environment or {}}).encode()
            try:
                socket.send_fds(self._control, [message], [commands, results, log])
            except OSError as error:
                raise WorkerDied(f"vLLM launcher ended ({error}); {self._log.tail()}") from error
            return int(self._receive(timeout)["pid"])

    def reap(self, pid: int) -> int | None:
        """End a worker with all its processes; its exit status if it had ended before."""
        with self._lock, contextlib.suppress(OSError, WorkerDied):
            self._control.send(json.dumps({"op": "reap", "pid": pid}).encode())
            status: int | None = self._receive(60.0)["status"]
            return status
        return None

    def _receive(self, timeout: float) -> Message:
        if not select.select([self._control], [], [], timeout)[0]:
            raise WorkerDied(
                f"vLLM launcher silent for {timeout:.0f} s; raise engine.startup_timeout; {self._log.tail()}"
            )
        data = self._control.recv(1 << 16)
        if not data and not self.version:
            raise EngineError(
                f"vllm engine: {self.python} cannot import vLLM; run `make vllm` again; {self._log.tail()}"
            )
        if not data:
            raise WorkerDied(f"vLLM launcher ended; {self._log.tail()}")
        message: Message = json.loads(data)
        return message


class WorkerProcess:
    """One worker: commands in, replies out, and its end when we say so."""

    def __init__(self, python: Path, environment: dict[str, str] | None = None) -> None:
        self._environment = environment
        self._launcher = Launcher.acquire(python)  # it begins to import while the caller goes on
        self._log = _Log()
        self._commands = self._results = -1
        self._unfinished = b""
        self._lines: deque[bytes] = deque()
        self._closed = False
        self.pid = 0

    def start(self, timeout: float) -> None:
        """Fork the worker, waiting for its launcher."""
        their_commands, self._commands = os.pipe()
        self._results, their_results = os.pipe()
        try:
            log = self._log.file.fileno()
            self.pid = self._launcher.spawn(their_commands, their_results, log, timeout, self._environment)
        finally:
            os.close(their_commands)
            os.close(their_results)

    @property
    def version(self) -> str:
        """vLLM's version; empty before the launcher has imported it."""
        return self._launcher.version

    def send(self, command: Message) -> None:
        """Send one command."""
        view = memoryview(json.dumps(command).encode() + b"\n")
        try:
            while view:
                view = view[os.write(self._commands, view) :]
        except BrokenPipeError:
            raise self._death() from None

    def receive(self, deadline: float) -> Message:
        """The next reply; raises ``WorkerDied`` at the end of the pipe or at the deadline (``time.monotonic``)."""
        while not self._lines:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._results], [], [], left)[0]:
                raise WorkerDied(f"vLLM worker {self.pid} did not answer in time; {self._log.tail()}")
            chunk = os.read(self._results, 1 << 20)
            if not chunk:
                raise self._death()
            *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
            self._lines.extend(lines)
        reply: Message = json.loads(self._lines.popleft())
        if reply["event"] == "failed":
            raise WorkerFailed(f"{reply['error']}; {self._log.tail()}")
        return reply

    def _death(self) -> WorkerDied:
        status = self._launcher.reap(self.pid)
        how = "ended"
        if status is not None:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return WorkerDied(f"vLLM worker {self.pid} {how}; {self._log.tail()}")

    def kill(self) -> None:
        """End the worker and everything it started; returns when nothing of it is left. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self.pid:
            self._launcher.reap(self.pid)
        for fd in (self._commands, self._results):
            if fd >= 0:
                os.close(fd)
        self._log.file.close()
        self._launcher.release()


def find_python(configured: str | None) -> Path:
    """Return vLLM's interpreter: the configured one, $HACRL_VLLM_PYTHON, or that of ``make vllm``."""
    named = configured or os.environ.get("HACRL_VLLM_PYTHON")
    places = [Path.cwd(), ROOT]
    candidates = [Path(named)] if named else [place / ".venv-vllm" / "bin" / "python" for place in places]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()  # not resolved: the link itself is what makes it the environment's interpreter
    looked = " or ".join(dict.fromkeys(map(str, candidates)))
    raise EngineError(f"vllm engine: no Python interpreter at {looked}; run `make vllm`, or set engine.python")

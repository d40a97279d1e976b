"""The caller's end of a spawner: start it, have it fork workers, have it kill them, stop it.

Each module that workers need loaded beforehand has a spawner of its own. What the module changes in its process, for
example the sympy of the maths verifiers, which evaluates no text, then never reaches the workers of another verifier.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hacrl_core.place import module
from hacrl_core.verification.processes import passed_on, python_path
from hacrl_core.verification.sandbox import receive, send

_START_SECONDS = 120.0
_MESSAGE_SECONDS = 60.0
_SPAWNER = (
    f"import socket, sys; from {module('hacrl_core.verification.sandbox')} import run_spawner; "
    "run_spawner(socket.socket(fileno=int(sys.argv[1])))"
)


@dataclass
class Spawner:
    """A process that forks workers, and the socket to it."""

    preload: str
    environment: tuple[str, ...] = ()
    owner: int = field(default_factory=os.getpid)
    process: subprocess.Popen[bytes] | None = None
    control: socket.socket | None = None

    def spawn(self, request: Mapping[str, Any]) -> tuple[int, socket.socket, dict[str, str]]:
        """Have a worker forked; return its process id, our end of its socket, and the layers of its jail.

        The process is started where there is none. Raise EOFError or OSError where that fails.
        """
        ours, theirs = socket.socketpair()
        try:
            if self.process is None or self.process.poll() is not None:
                self._start()
            assert self.control is not None
            send(self.control, {**request, "path": sys.path, "preload": self.preload})
            socket.send_fds(self.control, [b"f"], [theirs.fileno()])
            self.control.settimeout(_START_SECONDS)
            ours.settimeout(_MESSAGE_SECONDS)
            spawned = receive(self.control)
            return int(spawned["pid"]), ours, spawned["layers"]
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def kill(self, pid: int) -> None:
        """Have a worker killed, with everything that it started."""
        if self.control is not None:
            with contextlib.suppress(OSError):
                send(self.control, {"kill": pid})

    def stop(self) -> None:
        """Close the control socket, which makes the process kill its workers and end."""
        if self.control is not None:
            self.control.close()
            self.control = None
        if self.process is not None and self.owner == os.getpid():
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def _start(self) -> None:
        self.stop()
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SPAWNER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**passed_on(self.environment), "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
            )

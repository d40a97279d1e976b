"""Starts the command by forking a process that has everything imported: 0.1 s instead of the ten CPU seconds that torch
and MLflow take.

What runs is the command itself (``flows.cli``) with its worker processes, each a process of its own in the command's
process group. Two things differ from a shell's ``hacrl run``: workers are forked (``prepared.py``), not spawned, and
there is no Prefect unless a server's address is given: the product's own plain runner, which it has for when Prefect
cannot be had, does the scheduling.
"""

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.commands import HOOK, ROOT, environment
from tests.chaos.prepared import prepare
from tests.patience import patience

WORKERS = 4  # one for each agent, and some for those that die
STAGES = ("adopt", "credit", "evaluate", "generate", "sample", "score", "update", "verify", "warmstart")
CORE = ("warm", "agents.warmstart", "learning.trainer", "learning.scoring")
COMMAND = ("cli", "commands.campaigns", "run.launch", "run.session", "views.summary", "report.charts")
PRELOAD = (
    *("torch", "transformers", "mlflow", "matplotlib.pyplot"),
    *(f"flows.{name}" for name in COMMAND),
    *(f"hacrl_core.{name}" for name in CORE),
    *(f"stages.{name}" for name in STAGES),
)


class Zygote:
    """The parent's end: start commands, ask whether they have ended.

    ``prefect`` is the address of a server that the commands use; ``variables`` are for the process that is forked.
    """

    def __init__(self, place: Path, prefect: str = "", variables: dict[str, str] | None = None) -> None:
        environ = environment(place / "nobody", hook=variables or {})
        if prefect:
            environ |= {"PREFECT_API_URL": prefect, "PREFECT_HOME": str(place / "prefect-client")}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        assert "ready" in self._server.stdout.readline()

    def start(self, words: list[str], environ: dict[str, str], output: Path) -> int:
        return self._ask({"start": words, "environ": environ, "output": str(output)})

    def code(self, pid: int) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._ask({"poll": pid})

    def wait(self, pid: int, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while (code := self.code(pid)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(patience(60))

    def _ask(self, request: dict) -> int | None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


def serve() -> list[str]:
    """Answers requests until there are no more; in a forked child, returns the words of the command to run."""
    codes: dict[int, int] = {}
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "poll" in request:
            pid = request["poll"]
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            answer = codes.get(pid)
        else:
            answer = os.fork()
            if answer == 0:
                return _become_the_command(request)
        print(json.dumps(answer), flush=True)
    os._exit(0)


def _become_the_command(request: dict) -> list[str]:
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for handle, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(handle, target)
    os.environ.clear()
    os.environ.update(request["environ"])
    if "CHAOS_FS_HOME" in os.environ:
        ctypes.CDLL(None).chaos_read_plan()  # of the library that was loaded before all others
    sys.path += [place for place in os.environ["PYTHONPATH"].split(os.pathsep) if place not in sys.path]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prepare(WORKERS)
    return request["start"]


@contextmanager
def _no_prefect(home: Path, warn: object) -> Iterator[None]:
    """What ``prefect_api`` gives where no server can be had: the campaign then runs in plain threads."""
    yield None


def run_and_exit(words: list[str]) -> None:
    """Run the command and end as an interpreter does, but leave the objects of all imports to the kernel."""
    from flows.cli import app

    code = 1
    try:
        app(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload() -> None:
    import importlib
    from functools import partial

    import pyarrow.parquet

    import flows.run.launch
    from flows.tracking.projection import quiet_environment

    quiet_environment()
    for name in PRELOAD:
        importlib.import_module(name)
    if "PREFECT_API_URL" in os.environ:
        from flows.scheduling.api import quiet_settings

        quiet_settings()
        importlib.import_module("flows.run.prefect_runner")
    else:
        flows.run.launch.prefect_api = _no_prefect
    # Arrow reads files with threads of its own, which a fork would lose.
    pyarrow.parquet.read_table = partial(pyarrow.parquet.read_table, use_threads=False, pre_buffer=False)
    gc.freeze()  # what is imported stays; collecting it again and again in every child would copy all its pages
    assert threading.active_count() == 1, "a process with threads must not fork"


if __name__ == "__main__":
    assert str(HOOK) in sys.path
    preload()
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C is for the parent, which then ends this one
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # where does it hang?
    print("ready", flush=True)
    run_and_exit(serve())

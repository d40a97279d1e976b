"""One worker process per agent: stages of different agents run side by side, each with its agent kept warm.

A worker is a plain spawned process that takes stage calls over a pipe. It dies with its parent, whatever kills that.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flows.run.placement import Placement, Turn
from hacrl_core.artifacts import Store
from hacrl_core.errors import EngineError, HacrlError
from stages.runner import run_stage
from stages.spec import Context, StageCall

TERMINATED = 143  # what a worker ends with after SIGTERM
STOP_SECONDS = 8.0  # a worker that is told to go may need a moment for what it has started


class WorkerDied(EngineError):
    """The process is gone (killed, out of memory); the call may be tried again on a new one."""


class Stopped(EngineError):
    """The campaign is ending; what still waits for a worker will not run."""


@dataclass(frozen=True)
class Events:
    """Where news of running stages goes; every function may be called from several threads."""

    progress: Callable[[StageCall, int, int, str], None] = lambda call, done, total, note: None
    warn: Callable[[str], None] = lambda message: None
    waiting: Callable[[StageCall, str], None] = lambda call, holder: None
    output: Callable[[str, str], None] | None = (
        None  # worker, line: what its process prints; None leaves it where it goes
    )


class Worker:
    """The parent's end. One call at a time; started by its first call, started again after it died."""

    def __init__(
        self,
        name: str,
        store_root: Path,
        *,
        threads: int,
        device: str = "auto",
        output: Callable[[str, str], None] | None = None,
        place: Placement | None = None,
        turn: Turn | None = None,
    ) -> None:
        self.name, self._output = name, output
        self._settings = (store_root, threads, place or Placement(device))
        self._turn = turn
        self._process: Any = None
        self._pipe: Connection | None = None
        self._busy = threading.Lock()
        self._starting = threading.Lock()
        self._closed = False

    def run(self, call: Any, events: Events) -> Any:
        """A stage call, or anything with a label that can ``perform(store, context)``; returns its outcome."""
        with self._busy, self._turn.taken_by(self) if self._turn else nullcontext():
            pipe = self._start(call)
            self._exchange(call, lambda: pipe.send(call))
            while True:
                kind, value = self._exchange(call, pipe.recv)
                if kind == "progress":
                    events.progress(call, *value)
                elif kind == "warn":
                    events.warn(value)
                elif kind == "waiting":
                    events.waiting(call, value)
                elif kind == "done":
                    return value
                else:
                    raise value

    def rest(self) -> None:
        """End the idle process, and with it all memory it holds; the next call starts another."""
        with self._starting:
            if self._process is not None and self._pipe is not None and not self._closed:
                self._pipe.close()  # an idle worker ends at the end of its pipe
                self._process.join(timeout=30)  # an engine of its own may need a moment
                self._reap()

    def _exchange(self, call: StageCall, speak: Callable[[], Any]) -> Any:
        """One message; the end of the pipe means that the process is gone."""
        try:
            return speak()
        except (EOFError, OSError) as problem:
            code = None if self._closed else self._reap()
            if code == TERMINATED:  # a scheduler's SIGTERM reaches the whole group: the campaign may be about to end
                self._await_the_end(5.0)
            if self._closed:
                raise Stopped(f"{call.label}: stopped, the campaign is ending") from None
            raise WorkerDied(
                f"{call.label}: the worker of {self.name} died ({_reason(code)}); lower generate.batch_size if memory ran out"
            ) from problem

    def _await_the_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._closed and time.monotonic() < deadline:
            time.sleep(0.05)

    def stop(self, *, now: bool = False) -> None:
        """End the process; ``now`` does not wait for a stage under way."""
        self.ask_to_stop(now=now)
        self.wait_until_stopped(STOP_SECONDS)

    def ask_to_stop(self, *, now: bool) -> None:
        with self._starting:
            self._closed = True
            process, pipe = self._process, self._pipe
        if process is None:
            return
        if now:
            process.terminate()
        elif pipe is not None:
            pipe.close()  # an idle worker ends at the end of its pipe

    def wait_until_stopped(self, seconds: float) -> None:
        process = self._process
        if process is not None:
            process.join(timeout=max(0.0, seconds))
            self._reap()

    def _start(self, call: StageCall) -> Connection:
        with self._starting:
            if self._closed:
                raise Stopped(f"{call.label}: not run, the campaign is ending")
            if self._process is not None and self._process.is_alive() and self._pipe is not None:
                return self._pipe
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            printed = _listen(context, self.name, self._output) if self._output is not None else None
            self._process = context.Process(
                target=_serve,
                args=(theirs, os.getpid(), *self._settings, printed),
                name=f"hacrl {self.name}",
                daemon=False,
            )
            with _deaf_to_ctrl_c():
                self._process.start()
            theirs.close()
            if printed is not None:
                printed.close()
            return self._pipe

    def _reap(self) -> int | None:
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is None:
            return None
        if process.is_alive():
            process.kill()
        process.join()
        code: int | None = process.exitcode
        return code


def stop_workers(workers: Iterable[Worker], *, now: bool) -> None:
    """All at once: each closes what it has started, a vLLM engine or verifiers, and is killed where that takes too long."""
    asked = list(workers)
    for worker in asked:
        worker.ask_to_stop(now=now)
    deadline = time.monotonic() + STOP_SECONDS
    for worker in asked:
        worker.wait_until_stopped(deadline - time.monotonic())


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A process started inside begins with SIGINT blocked, until it ignores it: its imports would end in a traceback otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reason(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def _listen(context: Any, name: str, output: Callable[[str, str], None]) -> Connection:
    """A pipe for all that the process and its children print; a thread hands it on line by line until the last of them is gone."""
    ours, theirs = context.Pipe(duplex=False)

    def read() -> None:
        with ours, open(ours.fileno(), errors="replace", closefd=False) as lines:
            for line in lines:
                output(name, line.rstrip("\n"))

    threading.Thread(target=read, name=f"output of {name}", daemon=True).start()
    end: Connection = theirs
    return end


def _print_into(pipe: Connection) -> None:
    """Standard output and error of this process, and of those it starts, go into the pipe from now on."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(pipe.fileno(), stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pipe.close()


def _serve(
    pipe: Connection, parent: int, store_root: Path, threads: int, place: Placement, printed: Connection | None = None
) -> None:
    """The worker's life: take a call, run it, answer; until the pipe ends."""
    die_with_parent(parent)
    if printed is not None:
        _print_into(printed)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # what this process starts is not to inherit the mask
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
    if place.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.gpus))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars; the campaign has its own
    import torch

    from hacrl_core.verification import close_pool
    from hacrl_core.warm import WarmModels

    torch.set_num_threads(threads)
    _quieten()
    warm = WarmModels()
    chosen = place.device if place.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    store = Store(store_root, on_problem=lambda message: pipe.send(("warn", message)))
    context = Context(
        progress=lambda done, total, note: pipe.send(("progress", (done, total, note))),
        warn=lambda message: pipe.send(("warn", message)),
        warm=warm,
        device=chosen,
        attention=place.attention,
    )
    try:
        while True:
            call = pipe.recv()
            pipe.send(_answer(store, call, context, pipe))
    except (EOFError, OSError):
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are going already; let the clean-up finish
        warm.close()
        close_pool()


def _answer(store: Store, call: Any, context: Context, pipe: Connection) -> tuple[str, Any]:
    try:
        if not isinstance(call, StageCall):  # a whole cell of a sweep
            return "done", call.perform(store, context)
        return "done", run_stage(store, call, context, lambda holder: pipe.send(("waiting", holder)))
    except HacrlError as problem:
        return "error", problem
    except Exception as problem:  # the parent shows one line; the traceback is kept for whoever mends it
        log = store.root.parent / "logs" / f"{call.agent}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            traceback.print_exc(file=file)
        return "error", HacrlError(f"{call.label}: {type(problem).__name__}: {problem}; details in {log}")


def die_with_parent(parent: int) -> None:
    """End this process soon after its parent is gone. Linux could tell us, but it speaks of the parent's *thread*, and workers are
    started by threads that come and go; so a thread of our own looks."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _quieten() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

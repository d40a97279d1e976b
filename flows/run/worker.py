"""A worker: a spawned process that takes stage calls over a pipe, one at a time, and keeps its agent warm between them.

It ends when its parent ends, however the parent ends.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from flows.run.events import Listener
from flows.run.line import Line, urgency_of
from flows.run.placement import Placement, Turn
from flows.run.signals import carry, die_with_parent, end_quickly, wake_main_thread
from hacrl_core.artifacts import Store, open_store
from hacrl_core.errors import EngineError, HacrlError, ProcessDiedError
from hacrl_core.instructions import settle_instructions
from hacrl_core.native import prepare_kernels
from hacrl_core.operations import operations
from hacrl_core.spans import RECORDER, span
from stages.runner import run_stage
from stages.spec import Context, StageCall

TERMINATED = 143  # what a worker ends with after SIGTERM
# What lowers the memory of a stage.
REMEDIES = {
    "generate": "lower generate.batch_size or generate.max_tokens",
    "evaluate": "lower generate.batch_size or the benchmark's max_tokens",
    "score": "lower score.token_budget or score.max_logits_mb",
    "update": "lower update.token_budget, set update.gradient_checkpointing, or train adapters (update.lora)",
    "verify": "lower verify.workers or verify.memory_mb",
    "adopt": "start from a smaller model or give the machine more memory: adopting holds all its weights in float32",
    "warmstart": "make the warm start's model or its batch_size smaller",
}
PROFILED_CALL = 2  # of a stage whose operations are asked for: its first call in a process warms up
PROGRESS_SECONDS = 0.25  # from the start of a stage, and from one message to the next
STOP_SECONDS = 8.0  # a worker that is told to go may need a moment for what it has started


class WorkerDied(ProcessDiedError):
    """The worker process is gone (killed, out of memory). The call may be retried; a new process is started for it."""


class Stopped(EngineError):
    """The campaign is ending. Calls that still wait for a worker do not run."""


class Task(Protocol):
    """Work other than a stage call that a worker can do: the cell of a sweep."""

    @property
    def title(self) -> str:
        """The name that people read."""

    @property
    def agent(self) -> str:
        """Whose log file an unforeseen error is written to."""

    def perform(self, store: Store, context: Context) -> Any:
        """Do the work in the worker process and return its result, which must be picklable."""


class Worker:
    """The parent's end of a worker process, which is started early or by the first call, and again after it died."""

    def __init__(
        self,
        name: str,
        store_root: Path,
        place: Placement,
        *,
        turn: Turn | None = None,
        output: Callable[[str, str], None] | None = None,
    ) -> None:
        """``output`` receives each line that the process prints; None leaves its output where it goes."""
        self.name = name
        self._store_root = store_root
        self._place = place
        self._turn = turn
        self._output = output
        self._process: Any = None
        self._pipe: Connection | None = None
        self._line = Line()
        self._starting = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the process now: it imports its libraries while it waits for its first call."""
        self._start("start")

    def run(self, call: StageCall | Task, listener: Listener) -> Any:
        """Have the process run a bound stage call or a task, and return its outcome; the listener hears of progress."""
        urgency = urgency_of(call)
        with self._line.turn(urgency), self._turn.taken_by(self, urgency) if self._turn else nullcontext():
            pipe = self._start(call.title)
            self._exchange(call, lambda: pipe.send(call))
            while True:
                kind, value = self._exchange(call, pipe.recv)
                if kind == "done":
                    return value
                if kind == "error":
                    raise value
                if kind == "warn":
                    listener.warn(value)
                elif kind == "spans":
                    listener.spans(self.name, value)
                elif isinstance(call, StageCall) and kind == "progress":
                    listener.progress(call, *value)
                elif isinstance(call, StageCall) and kind == "waiting":
                    listener.waiting(call, value)

    def rest(self) -> None:
        """End the idle process, and with it all memory it holds; the next call starts another."""
        with self._starting:
            if self._process is not None and self._pipe is not None and not self._closed:
                self._pipe.close()  # an idle worker ends at the end of its pipe
                self._process.join(timeout=30)  # an engine of its own may need a moment
                self._reap()

    def _exchange(self, call: StageCall | Task, speak: Callable[[], Any]) -> Any:
        """One message; the end of the pipe means that the process is gone."""
        try:
            return speak()
        except (EOFError, OSError) as problem:
            code = None if self._closed else self._reap()
            if code == TERMINATED:  # a scheduler's SIGTERM reaches the whole group: the campaign may be about to end
                self._wait_for_close(5.0)
            if self._closed:
                raise Stopped(f"{call.title}: stopped, the campaign is ending") from None
            raise WorkerDied(
                f"{call.title}: the worker of {self.name} died ({_reason(code)}); if memory ran out, {_remedy(call)}"
            ) from problem

    def _wait_for_close(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._closed and time.monotonic() < deadline:
            time.sleep(0.05)

    def stop(self, *, now: bool = False) -> None:
        """End the process; ``now`` does not wait for a stage under way."""
        self.ask_to_stop(now=now)
        self.wait_until_stopped(STOP_SECONDS)

    def ask_to_stop(self, *, now: bool) -> None:
        """Refuse further calls and tell the process to end: at once, or when it is idle."""
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
        """Wait so long for the process to end; kill it after that."""
        process = self._process
        if process is not None:
            process.join(timeout=max(0.0, seconds))
            self._reap()

    def _start(self, title: str) -> Connection:
        with self._starting:
            if self._closed:
                raise Stopped(f"{title}: not run, the campaign is ending")
            if self._process is not None and self._process.is_alive() and self._pipe is not None:
                return self._pipe
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            printed = _forward_output(context, self.name, self._output) if self._output is not None else None
            process = context.Process(
                target=_serve,
                args=(theirs, os.getpid(), self._store_root, self._place, printed),
                name=f"hacrl {self.name}",
                daemon=False,
            )
            try:
                with _sigint_blocked():
                    process.start()
                self._process = process
            finally:
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
    """End several workers at the same time.

    Each closes what it has started, a vLLM engine or verifiers, and is killed if that takes too long.
    """
    asked = list(workers)
    for worker in asked:
        worker.ask_to_stop(now=now)
    deadline = time.monotonic() + STOP_SECONDS
    for worker in asked:
        worker.wait_until_stopped(deadline - time.monotonic())


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT while a process starts, until it ignores the signal: its imports would end in a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reason(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def _remedy(call: StageCall | Task) -> str:
    stage = call.stage if isinstance(call, StageCall) else ""
    return REMEDIES.get(stage, "lower update.token_budget, score.token_budget or generate.batch_size")


def _forward_output(context: Any, name: str, output: Callable[[str, str], None]) -> Connection:
    """Return a pipe for what the process and its children print; a thread forwards it line by line."""
    ours, theirs = context.Pipe(duplex=False)

    def read() -> None:
        with ours, open(ours.fileno(), errors="replace", closefd=False) as lines:
            for line in lines:
                output(name, line.rstrip("\n"))

    threading.Thread(target=read, name=f"output of {name}", daemon=True).start()
    end: Connection = theirs
    return end


def _redirect_output(pipe: Connection) -> None:
    """Standard output and error of this process, and of those it starts, go into the pipe from now on."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(pipe.fileno(), stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pipe.close()


@wake_main_thread()
def _serve(
    pipe: Connection, parent: int, store_root: Path, place: Placement, printed: Connection | None = None
) -> None:
    """Run in the worker process: take a call, run it, answer; until the pipe ends."""
    die_with_parent(parent)
    atexit.register(end_quickly)
    if printed is not None:
        _redirect_output(printed)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # what this process starts is not to inherit the mask
    _end_on_sigterm()
    if place.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.gpus))
    os.environ.setdefault("OMP_NUM_THREADS", str(place.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars; the campaign has its own
    from hacrl_core.verification import close_pool
    from hacrl_core.warm import WarmModels

    warm = WarmModels(own_code=place.own_code)
    store = open_store(store_root, on_problem=lambda message: pipe.send(("warn", message)))
    progress = Progress(lambda *told: pipe.send(("progress", told)))
    context = Context(
        progress=progress,
        warn=lambda message: pipe.send(("warn", message)),
        warm=warm,
        device=prepare_torch(place) if place.needs_torch else "cpu",
        attention=place.attention,
    )
    if place.needs_torch and context.device == "cpu":
        prepare_kernels(pipe.poll)
    RECORDER.on = place.profile
    met: Counter[str] = Counter()
    try:
        while True:
            call = pipe.recv()
            progress.begin()
            stage = call.stage if isinstance(call, StageCall) else ""
            met[stage] += 1
            with operations() if stage in place.profile_ops and met[stage] == PROFILED_CALL else nullcontext():
                answer = _answer(store, call, context, pipe)
            if place.profile:
                pipe.send(("spans", RECORDER.take()))
            pipe.send(answer)
    except (EOFError, OSError):
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are going already; let the clean-up finish
        warm.close()
        close_pool()


class Progress:
    """Tells of a stage's progress so often that a person sees it move: each message wakes a thread of the campaign."""

    def __init__(self, tell: Callable[[int, int, str], None]) -> None:
        self._tell = tell
        self.begin()

    def begin(self) -> None:
        """A stage begins; one that ends within the interval tells nothing, others also their end."""
        self._told, self._spoke = time.monotonic(), False

    def __call__(self, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_SECONDS or (self._spoke and done == total):
            self._told, self._spoke = now, True
            self._tell(done, total, note)


def _answer(store: Store, call: StageCall | Task, context: Context, pipe: Connection) -> tuple[str, Any]:
    try:
        if not isinstance(call, StageCall):
            return "done", call.perform(store, context)
        with span(call.title, "stage"):
            return "done", run_stage(store, call, context, lambda holder: pipe.send(("waiting", holder)))
    except HacrlError as problem:
        return "error", problem
    except Exception as problem:  # the parent shows one line; the log keeps the traceback
        log = store.root.parent / "logs" / f"{call.agent}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            traceback.print_exc(file=file)
        return "error", HacrlError(f"{call.title}: {type(problem).__name__}: {problem}; details in {log}")


def prepare_torch(place: Placement) -> str:
    """Import torch with the placement's threads, silence the libraries, and return the device to use."""
    settle_instructions()  # silently: whoever starts workers for bfloat16 has said it
    import torch
    import transformers

    torch.set_num_threads(place.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return place.device if place.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


def end_once(number: int, frame: FrameType | None) -> None:
    """End this process on SIGTERM and ignore the next one: a stage that ends removes what it has staged.

    A scheduler's SIGTERM reaches the whole group, and the campaign then sends another one to its workers.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    carry(SystemExit(TERMINATED), number, _end_on_sigterm)


def _end_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, end_once)

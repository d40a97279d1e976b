"""A pool of killable workers with a deadline in CPU time, kept by this process and shared by all its calls.

A group is one gold with its distinct answers. A worker returns their results one by one. A worker that uses up its CPU
seconds is killed; the answer it was working on gets ``timeout``, and the rest of its group goes to the next worker.
Deadlines are measured in the worker's CPU time, so a loaded machine changes no verdict; a wall-clock limit catches code
that sleeps.

A worker serves one verifier: nothing that another verifier did to its process can change a verdict.
"""

import atexit
import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hacrl_core.errors import ConfigError, VerificationError
from hacrl_core.verification.jail.enter import Jail
from hacrl_core.verification.jail.layers import Mode, insist
from hacrl_core.verification.jail.own_files import readable
from hacrl_core.verification.processes import cpu_seconds, runnable
from hacrl_core.verification.sandbox import send, take_message
from hacrl_core.verification.spawner import Spawner
from hacrl_core.verification.verdict import VerdictKind

_POLL_SECONDS = 0.02
_DEATHS_IN_A_ROW = 100
# A worker sleeps if it neither runs nor waits for a core at so many looks in a row: one look may meet it while it reads
# a page of memory on a busy machine.
_IDLE_LOOKS = 10
# Idle workers that are kept, of all verifiers.
_MOST_IDLE = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What one answer may use, and how many workers there are."""

    cpu_seconds: float
    wall_seconds: float
    memory_mb: int
    workers: int
    # Further variables that the workers see.
    environment: tuple[str, ...] = ()
    # None: whatever holds for verifiers, and everything for the programs that they run.
    sandbox: Mode | None = None
    # What verifiers may read besides their own folder and the Python installation.
    read: tuple[str, ...] = ()
    network: bool = False
    # Layers of the sandbox that are left out, for tests.
    without: tuple[str, ...] = ()


@dataclass(slots=True)
class Group:
    """Pairs of (gold, answer) with one gold; ``keys`` says where each result belongs."""

    keys: list[int]
    pairs: list[tuple[str, str]]
    task: str
    options: dict[str, Any]
    retried: bool = False


@dataclass(slots=True)
class Worker:
    """A worker process of one verifier and the group it is working on."""

    task: str
    spawner: Spawner
    pid: int
    connection: socket.socket
    layers: dict[str, str] = field(default_factory=dict)
    group: Group | None = None
    ready: bool = False
    done: int = 0
    since: float = 0.0
    cpu_at: float = 0.0
    idle_looks: int = 0
    reprieved: bool = False
    received: bytearray = field(default_factory=bytearray)

    def restart_clock(self) -> None:
        """Start the time limit of the next answer."""
        self.since = time.monotonic()
        self.idle_looks = 0
        self.reprieved = False
        self.cpu_at = cpu_seconds(self.pid, self.since)


def _has_sent(worker: Worker) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(worker.connection, selectors.EVENT_READ)
        return bool(selector.select(0))


@dataclass
class Pool:
    """Workers of one process, started on demand by spawner processes."""

    owner: int = field(default_factory=os.getpid)
    workers: list[Worker] = field(default_factory=list)
    memory_mb: int = 0
    environment: tuple[str, ...] = ()
    sandbox: Mode | None = None
    jail: Jail = field(default_factory=Jail)
    # By the module that is loaded before workers are forked.
    spawners: dict[str, Spawner] = field(default_factory=dict)
    deaths: int = 0

    def run(
        self, groups: Sequence[Group], limits: Limits, preload: str, on_result: Callable[[int, dict[str, Any]], None]
    ) -> None:
        """Work through all groups; every key gets exactly one result."""
        queue = deque(groups)
        jail = _jail([group.task for group in groups], limits)
        if (self.memory_mb, self.sandbox, self.jail) != (limits.memory_mb, limits.sandbox, jail):
            self._drop_workers()
            self.memory_mb, self.sandbox, self.jail = limits.memory_mb, limits.sandbox, jail
        if self.environment != limits.environment:
            self._drop_workers()
            self._stop_spawners()
            self.environment = limits.environment
        self.deaths = 0
        try:
            while queue or any(worker.group for worker in self.workers):
                while queue and (worker := self._idle(queue[0].task, limits, preload)):
                    self._assign(worker, queue.popleft(), queue, limits)
                self._wait(queue, on_result)
                self._enforce(limits, queue, on_result)
        except BaseException:
            self._drop_workers()
            raise

    def _idle(self, task: str, limits: Limits, preload: str) -> Worker | None:
        """Return an idle worker of this verifier, a new one where there is none; None while enough are at work."""
        idle = [worker for worker in self.workers if worker.group is None]
        if len(self.workers) - len(idle) >= limits.workers:
            return None
        for worker in idle:
            if worker.task == task:
                return worker
        for worker in idle[: len(idle) - _MOST_IDLE]:
            self._remove(worker)
        self.workers.append(self.spawn_worker(task, preload))
        return self.workers[-1]

    def _assign(self, worker: Worker, group: Group, queue: deque[Group], limits: Limits) -> None:
        worker.group = group
        worker.ready = False
        worker.done = 0
        message: dict[str, Any] = {"path": sys.path, "task": group.task, "pairs": group.pairs, "options": group.options}
        # A net under the deadlines below, for what a worker starts: no more than it could use in the wall-clock limit.
        message["cpu_seconds"] = max(limits.cpu_seconds, limits.wall_seconds) * (os.cpu_count() or 1)
        try:
            send(worker.connection, message)
        except OSError:
            # The worker died while idle: not the fault of this group.
            queue.appendleft(group)
            self._remove(worker)
            return
        worker.restart_clock()

    def _wait(self, queue: deque[Group], on_result: Callable[[int, dict[str, Any]], None]) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                if worker.group:
                    selector.register(worker.connection, selectors.EVENT_READ, worker)
            for key, _ in selector.select(_POLL_SECONDS) if selector.get_map() else ():
                worker = key.data
                for message in self._messages(worker, queue, on_result):
                    self._take(worker, message, queue, on_result)

    def _messages(
        self, worker: Worker, queue: deque[Group], on_result: Callable[[int, dict[str, Any]], None]
    ) -> Iterator[dict[str, Any]]:
        """Yield what a worker has sent, without waiting for a message's end; give up a worker that sent anything else.

        Its function may write to all descriptors of the process, so what arrives need not be a message.
        """
        try:
            part = worker.connection.recv(1 << 20)
            if not part:
                raise EOFError
            worker.received += part
            while worker.group and (message := take_message(worker.received)) is not None:
                if not _is_expected(message, worker):
                    raise ValueError(message)
                yield message
            if worker.received and not worker.group and worker in self.workers:
                self._remove(worker)
        except (EOFError, OSError):
            self._fail(worker, queue, on_result, {"verdict": "error", "message": "the worker died"})
        except (ValueError, RecursionError):
            self._fail(worker, queue, on_result, {"verdict": "error", "message": "it wrote to the worker's socket"})

    def _take(
        self,
        worker: Worker,
        message: dict[str, Any],
        queue: deque[Group],
        on_result: Callable[[int, dict[str, Any]], None],
    ) -> None:
        group = worker.group
        assert group is not None
        if "refused" in message:
            raise ConfigError(f"verifier {group.task!r}: {message['refused']}")
        if "fatal" in message:
            raise ConfigError(f"verifier {group.task!r} cannot be loaded: {message['fatal']}; correct 'verifier'")
        if "ready" in message:
            worker.ready = True
        else:
            on_result(group.keys[worker.done], message)
            self.deaths = 0
            worker.done += 1
            # Out of memory: the worker ended itself, and the rest of its group is not to blame.
            if message.get("exhausted"):
                self._remove(worker)
                worker.group = None
                self._requeue(group, worker.done, queue)
                return
        if worker.done == len(group.pairs):
            worker.group = None
        worker.restart_clock()

    def _enforce(self, limits: Limits, queue: deque[Group], on_result: Callable[[int, dict[str, Any]], None]) -> None:
        now = time.monotonic()
        for worker in list(self.workers):
            if worker.group is None or now - worker.since < min(limits.cpu_seconds, limits.wall_seconds):
                continue
            if not worker.reprieved and _has_sent(worker):
                # This process was kept waiting, not the worker: what it has sent is read first.
                worker.reprieved = True
                continue
            used = cpu_seconds(worker.pid, now) - worker.cpu_at
            idle = now - worker.since >= limits.wall_seconds and not runnable(worker.pid, set())
            worker.idle_looks = worker.idle_looks + 1 if idle else 0
            if used >= limits.cpu_seconds - _POLL_SECONDS or worker.idle_looks >= _IDLE_LOOKS:
                self._fail(worker, queue, on_result, {"verdict": "timeout", "milliseconds": used * 1000})

    def _fail(
        self,
        worker: Worker,
        queue: deque[Group],
        on_result: Callable[[int, dict[str, Any]], None],
        result: dict[str, Any],
    ) -> None:
        """Give up a worker: its current answer gets ``result``, the rest of its group waits for another worker."""
        group = worker.group
        done = worker.done
        ready = worker.ready
        self._remove(worker)
        assert group is not None
        if not ready and result["verdict"] == "error" and not group.retried:
            # The worker died before it began, so retry once with a fresh one.
            group.retried = True
            queue.appendleft(group)
            return
        if not ready:
            # No answer is to blame for a gold that cannot be parsed.
            for key in group.keys:
                on_result(key, {"verdict": "error", "message": "the gold could not be parsed in time"})
            return
        on_result(group.keys[done], result)
        self._requeue(group, done + 1, queue)

    @staticmethod
    def _requeue(group: Group, done: int, queue: deque[Group]) -> None:
        if done < len(group.keys):
            queue.append(Group(group.keys[done:], group.pairs[done:], group.task, group.options))

    def spawn_worker(self, task: str, preload: str) -> Worker:
        """Have a worker of this verifier forked into its jail, by the spawner that has ``preload`` imported."""
        self.deaths += 1
        if self.deaths > _DEATHS_IN_A_ROW:
            raise VerificationError(f"{self.deaths} verifier workers died in a row; raise memory_mb ({self.memory_mb})")
        spawner = self.spawners.setdefault(preload, Spawner(preload, self.environment))
        request = {"memory_mb": self.memory_mb, "jail": self.jail.to_json(), "sandbox": self.sandbox}
        for attempt in range(2):
            try:
                worker = Worker(task, spawner, *spawner.spawn(request))
                break
            except (EOFError, OSError) as error:
                for lost in [each for each in self.workers if each.spawner is spawner and each.group is None]:
                    self._remove(lost)
                spawner.stop()
                if attempt:
                    raise VerificationError(
                        f"verifier workers cannot be started: {error or 'the process ended'}"
                    ) from error
        if not self.jail.off:
            try:
                insist(worker.layers, self.sandbox, network=self.jail.network)
            except ConfigError:
                worker.connection.close()
                spawner.stop()
                raise
        return worker

    def _remove(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.connection.close()
        worker.spawner.kill(worker.pid)

    def _drop_workers(self) -> None:
        for worker in list(self.workers):
            self._remove(worker)

    def _stop_spawners(self) -> None:
        for spawner in self.spawners.values():
            spawner.stop()
        self.spawners.clear()

    def close(self) -> None:
        """End all workers and the spawners."""
        for worker in self.workers:
            worker.connection.close()
        self.workers.clear()
        self._stop_spawners()


def _is_expected(message: Any, worker: Worker) -> bool:
    """Return whether this is the next message of a worker that works on its group."""
    if not isinstance(message, dict):
        return False
    if not worker.ready:
        return "ready" in message or "fatal" in message
    if "refused" in message:
        return True
    reward = message.get("reward")
    return (
        message.get("index") == worker.done
        and message.get("verdict") in list(VerdictKind)
        and isinstance(message.get("milliseconds"), float)
        and (reward is None or (isinstance(reward, float) and 0 <= reward <= 1))
    )


def _jail(tasks: Sequence[str], limits: Limits) -> Jail:
    if limits.sandbox == "off":
        return Jail(off=True)
    return Jail(read=readable(tasks, limits.read), network=limits.network, without=limits.without)


_lock = threading.Lock()
_pool: Pool | None = None


@contextlib.contextmanager
def shared_pool() -> Iterator[Pool]:
    """Hold the pool of this process, one caller at a time. A forked child gets its own."""
    global _pool
    with _lock:
        if _pool is None or _pool.owner != os.getpid():
            _pool = Pool()
        yield _pool


def try_sandbox() -> dict[str, str]:
    """Build the sandbox of a worker and return its layers, each with the reason why it is missing, else empty."""
    trial = Pool(memory_mb=1024, sandbox="best")
    try:
        return trial.spawn_worker("", "").layers
    finally:
        trial.close()


def close_pool() -> None:
    """End the workers of this process; the next call starts new ones."""
    global _pool
    with _lock:
        if _pool is not None and _pool.owner == os.getpid():
            _pool.close()
        _pool = None


atexit.register(close_pool)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: globals().__setitem__("_lock", threading.Lock()))

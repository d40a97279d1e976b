"""A group of ranks: this process and its peers, which score and train one model together.

The process of the stage is rank 0. It starts the others, runs the same task as they do, and notices when one of them
ends. A group stays up between stages, so that the sharded weights stay where they are.
"""

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hacrl_core.errors import EngineError, HacrlError, RankDied

if TYPE_CHECKING:
    from hacrl_core.learning.sharded.policy import ShardedAgent

Result = TypeVar("Result")
Task = Callable[["Rank"], Result]

LOOPBACK = "127.0.0.1"
# A rank that is alive and says nothing for so long is stuck. NCCL's and gloo's own limit is half an hour.
SILENCE = timedelta(minutes=10)
_START_SECONDS = 300.0  # until a peer has imported torch
_POLL_SECONDS = 0.02
# After the first bad news: others may know better what happened.
_GRACE_SECONDS = 1.0
# Then the process group is aborted. Rank 0 ends its own process if it is still inside a collective after so long.
_STUCK_SECONDS = 40.0


@dataclass(frozen=True)
class News:
    """What a peer has to say: it is ``ready``, ``done``, met an ``error``, or ``died``; value is the error or cause."""

    kind: str
    value: Any = None


class Peer(Protocol):
    """The leader's end of another rank. None of the methods blocks."""

    def send(self, task: bytes) -> None:
        """Hand over a pickled task; a peer that is gone says so in its news."""

    def news(self) -> News | None:
        """Return the next news, if there is any; after a death always that."""

    def kill(self) -> None:
        """End the rank at once, whatever it is doing."""


class StartRank(Protocol):
    """Starts rank ``index`` of ``count`` somewhere. It joins the store at address and port (`join`) and serves tasks.

    The default spawns processes on this machine (`peers.spawn_rank`). An executor of several machines gives its own,
    for example one that starts an actor per GPU.
    """

    def __call__(self, index: int, count: int, address: str, port: int, device: str) -> Peer:
        """Start the rank and return this end of it, without waiting until it is up."""


def portable(problem: BaseException) -> BaseException:
    """Return the error, or where it cannot be sent to another process one that says the same."""
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        return RuntimeError(f"{type(problem).__name__}: {problem}")
    return problem


@dataclass
class Rank:
    """One rank's place in its group, and what it keeps between tasks."""

    index: int
    count: int
    device: torch.device
    mesh: DeviceMesh
    control: Any  # a gloo group for small facts, whatever the gradients travel on
    agent: "ShardedAgent | None" = None  # kept from the last task
    first: "ShardedAgent | None" = None  # the reference of KL, kept beside it
    progress: Callable[[int, int, str], None] = lambda done, total, note: None

    def gather(self, value: Result) -> list[Result]:
        """Return the values of all ranks, in their order."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_leader(self, value: Result) -> Result:
        """Return the value of rank 0."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        shared: Result = values[0]
        return shared

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)


def join(index: int, count: int, store: Store, device: str) -> Rank:
    """Make this process a rank of the group that meets at the store."""
    own = torch.device(device)
    if own.type == "cuda":
        own = torch.device("cuda", index % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(own)
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=SILENCE)
    control = dist.new_group(backend="gloo", timeout=SILENCE)
    return Rank(index, count, own, init_device_mesh(own.type, (count,)), control)


def use_interface(address: str) -> None:
    """Let gloo and NCCL talk over the interface that has this address of this machine; a user's choice stands.

    By themselves they take the one that the host's name means, which is loopback on many machines.
    """
    if address == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


class RankGroup:
    """Rank 0's view of the group. A process has one at a time: another one takes its place."""

    _current: "RankGroup | None" = None

    def __init__(self, count: int, device: str, *, start: StartRank | None = None, address: str = LOOPBACK) -> None:
        """Start ``count - 1`` peers and wait until all ranks know one another."""
        from hacrl_core.learning.sharded.peers import spawn_rank

        start = start or spawn_rank
        if RankGroup._current is not None:
            RankGroup._current.close()
        self.count = count
        self.device = device
        use_interface(address)
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=SILENCE)
        self._peers = [start(index, count, address, self._store.port, device) for index in range(1, count)]
        self._open = True
        RankGroup._current = self
        try:
            with _watching(self._peers, "ready", "ranks") as watch:
                watch.wait(_START_SECONDS)
            self.rank = join(0, count, self._store, device)
        except BaseException:
            self.close(now=True)
            raise

    @property
    def is_open(self) -> bool:
        """Whether tasks can be run: nobody closed the group, and no task has failed."""
        return self._open

    @property
    def peers(self) -> "list[Peer]":
        """The other ranks."""
        return list(self._peers)

    def run(self, task: "Task[Result]", peers_task: "Task[Any] | None" = None, *, name: str = "ranks") -> Result:
        """Run a task on every rank at once and return what rank 0 returned.

        ``peers_task`` is what the others run where it is not the same object; ``name`` stands in errors. After an error
        the group is closed: the other ranks may wait in a collective that nobody will enter.

        Raises:
            RankDied: a peer is gone; the stage may be retried from its inputs.
            HacrlError: what a rank raised.
        """
        message = pickle.dumps(task if peers_task is None else peers_task)
        for peer in self._peers:
            peer.send(message)
        try:
            with _watching(self._peers, "done", name) as watch:
                result = task(self.rank)
                watch.wait()
            return result
        except BaseException:
            self.close(now=True)
            raise

    def close(self, *, now: bool = False) -> None:
        """End the peers: when they are idle, or ``now``, and leave the process group."""
        if not self._open:
            return
        self._open = False
        if RankGroup._current is self:
            RankGroup._current = None
        if hasattr(self, "rank"):
            self.rank.agent = self.rank.first = None
        for peer in self._peers:
            peer.kill()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                if now:
                    _abort()
                dist.destroy_process_group()


def _abort() -> None:
    """Wake whoever waits in a collective of this process; gloo notices a closed connection by itself."""
    with contextlib.suppress(Exception):
        dist.group.WORLD.abort()  # type: ignore[union-attr]


@dataclass
class _Watch:
    """Reads the peers' news in a thread while this process works on its own part."""

    peers: "list[Peer]"
    wanted: str
    name: str
    news: dict[int, News] = field(default_factory=dict)
    failed_at: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def loop(self) -> None:
        """Poll until all have answered as wanted, or until what follows a failure is done."""
        while not self.ended.wait(_POLL_SECONDS):
            for index, peer in enumerate(self.peers, 1):
                if self.news.get(index, News("")).kind in ("", "error") and (heard := peer.news()) is not None:
                    self._note(index, heard)
            if self.failed_at is not None:
                self._follow_failure(time.monotonic() - self.failed_at)

    def _note(self, index: int, heard: News) -> None:
        with self.changed:
            # An error comes before the end that follows it.
            if self.news.get(index, News("")).kind != "error":
                self.news[index] = heard
            if heard.kind != self.wanted and self.failed_at is None:
                self.failed_at = time.monotonic()
            self.changed.notify_all()

    def _follow_failure(self, since: float) -> None:
        if since > _GRACE_SECONDS:
            for peer in self.peers:
                peer.kill()
            if self.wanted == "done":
                _abort()
        if since > _STUCK_SECONDS:
            # The main thread does not come back: only the end of the process ends the stage.
            os.write(2, b"a rank died, and this process cannot leave a collective operation; it ends\n")
            os._exit(75)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until every peer has answered as wanted; raise if one has not."""
        limit = None if seconds is None else time.monotonic() + seconds
        with self.changed:
            while self.failed_at is None and len(self.news) < len(self.peers):
                if limit is not None and time.monotonic() > limit:
                    raise EngineError(
                        f"{self.name}: only {len(self.news)} of {len(self.peers)} came up in {seconds:.0f} s"
                    )
                self.changed.wait(1.0)
        problem = self.problem()
        if problem is not None:
            raise problem

    def problem(self) -> HacrlError | None:
        """Return the failure that explains the others: a rank's own error, else a death, else a broken connection."""
        if self.failed_at is None:
            return None
        while time.monotonic() < self.failed_at + _GRACE_SECONDS and not self._explained():
            time.sleep(_POLL_SECONDS)
        bad = [(index, news) for index, news in sorted(self.news.items()) if news.kind != self.wanted]
        index, worst = min(bad, key=lambda found: _weight(found[1]))
        if isinstance(worst.value, HacrlError):
            return worst.value
        who = f"{self.name}: rank {index} of {len(self.peers) + 1}"
        if worst.kind == "died":
            return RankDied(f"{who} died ({worst.value}); if memory ran out, lower token_budget or use more ranks")
        return RankDied(f"{who} failed: {type(worst.value).__name__}: {worst.value}")

    def _explained(self) -> bool:
        return any(_weight(news) < 2 for news in self.news.values() if news.kind != self.wanted)


def _is_broken_connection(problem: Exception) -> bool:
    """Whether a collective failed because another rank is gone; gloo says so in a plain RuntimeError."""
    return isinstance(problem, dist.DistError) or (isinstance(problem, RuntimeError) and "gloo" in str(problem))


def _weight(news: News) -> int:
    if isinstance(news.value, HacrlError):
        return 0
    return 1 if news.kind == "died" else 2


@contextlib.contextmanager
def _watching(peers: "list[Peer]", wanted: str, name: str) -> Iterator[_Watch]:
    """Watch the peers inside; a failure of theirs explains an error of ours that is none of the project's own."""
    watch = _Watch(peers, wanted, name)
    thread = threading.Thread(target=watch.loop, name="rank watch", daemon=True)
    thread.start()
    try:
        yield watch
    except HacrlError:
        raise
    except Exception as problem:
        # Broken connections are noticed before the death that broke them.
        deadline = time.monotonic() + 5.0
        while watch.failed_at is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        explained = watch.problem()
        if explained is None and _is_broken_connection(problem):
            # A machine that is gone is found out later than the connections to it.
            explained = RankDied(f"{name}: a rank does not answer ({str(problem).splitlines()[0][:200]})")
        if explained is None:
            raise
        raise explained from problem
    finally:
        watch.ended.set()
        thread.join()

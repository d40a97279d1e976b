"""Other actors of a seat on a Ray cluster: ranks of an update and replicas of an engine, one actor per GPU.

The actor that gets a stage call leads. It starts its peers in the other bundles of its own placement group, which may
be on other nodes, and alone publishes. A peer reads inputs from the store of its own node. Peers end with their leader.
"""

import os
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.run.actor import NodeStore, forward_output, prepare
from flows.run.cluster import Resources
from flows.run.placement import Placement
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.generation import GenerateConfig

if TYPE_CHECKING:
    from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
    from hacrl_core.learning.sharded.ranks import News, Rank

# So long the end of an engine may take.
CLOSE_SECONDS = 30.0
# A progress message of a replica at most so often.
_PROGRESS_SECONDS = 0.5


def node_address() -> str:
    """Return the address of this node in the cluster."""
    import ray

    address: Any = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return str(address)


def actor_options(bundle: Resources, group: Any, index: int) -> dict[str, Any]:
    """Return the options of an actor that takes a whole bundle of a placement group and is never restarted by Ray."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    rest = dict(bundle)
    return {
        "num_cpus": rest.pop("CPU", 0),
        "num_gpus": rest.pop("GPU", 0),
        "resources": rest,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        ),
    }


@dataclass(frozen=True)
class Moved:
    """Takes what a leader sends from its store's folder to that of this node."""

    root: Path
    store: Store

    def task(self, task: Any) -> tuple[Any, list[ArtifactRef]]:
        """Return a task, a frozen dataclass, with the paths of this node, and the artifacts that it reads."""
        read: list[ArtifactRef] = []
        changes: dict[str, Any] = {}
        for field in fields(task) if is_dataclass(task) else ():
            value = getattr(task, field.name)
            if isinstance(value, ArtifactRef):
                changes[field.name] = self._artifact(value, read)
            elif isinstance(value, dict) and value and all(isinstance(one, ArtifactRef) for one in value.values()):
                changes[field.name] = {name: self._artifact(one, read) for name, one in value.items()}
            elif isinstance(value, Path) and value.is_relative_to(self.root):
                changes[field.name] = self.store.root / value.relative_to(self.root)
        return (replace(task, **changes) if changes else task), read

    def _artifact(self, ref: ArtifactRef, read: list[ArtifactRef]) -> ArtifactRef:
        moved = replace(ref, path=self.store.folder(ref.stage, ref.key))
        read.append(moved)
        return moved


class PeerActor:
    """A rank or a replica on a node. Ray makes an actor of this class; every answer brings the lines printed since."""

    def __init__(self, place: Placement, where: NodeStore) -> None:
        import ray

        self._lines: deque[str] = deque(maxlen=1000)
        forward_output(self._lines.append)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("TQDM_DISABLE", "1")
        self._store = where.open_to_read(ray.get_runtime_context().get_node_id(), self._lines.append)
        self._own_code = place.own_code
        prepare(place)
        # One thread for all sampling: what an engine starts may live as long as the thread that started it.
        self._thread = ThreadPoolExecutor(1, "sampling")
        self._rank: Rank | None = None
        self._engine: tuple[GenerateConfig, Any] | None = None

    def hello(self) -> tuple[str, int]:
        """Return the node and process of this actor: it is up."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def join(self, index: int, count: int, address: str, port: int, device: str) -> "tuple[Any, list[str]]":
        """Become a rank of the group that meets at rank 0's address."""
        from torch._C._distributed_c10d import TCPStore

        from hacrl_core.learning.sharded.ranks import SILENCE, join, use_interface

        def joined() -> None:
            use_interface(node_address())
            self._rank = join(index, count, TCPStore(address, port, is_master=False, timeout=SILENCE), device)

        return self._tried(joined)

    def run(self, task: bytes, root: str) -> "tuple[Any, list[str]]":
        """Run a rank's task with the paths and artifacts of this node; return its error, if it met one."""

        def ran() -> None:
            moved, reads = Moved(Path(root), self._store).task(pickle.loads(task))
            with self._store.reading(reads):
                moved(self._rank)

        return self._tried(ran)

    def generate(
        self,
        config: GenerateConfig,
        version: ArtifactRef,
        requests: "Sequence[GenerationRequest]",
        params: "SamplingParams",
    ) -> Iterator[tuple[str, Any]]:
        """Sample from a version: yield progress, then each response, and at last ``done`` with what was printed.

        Responses travel one by one: small messages pass through Ray without its object store.
        """
        events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        told = time.monotonic()

        def report(done: int, tokens: int) -> None:
            nonlocal told
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                events.put(("progress", (done, tokens)))

        def sampled() -> None:
            here = replace(version, path=self._store.folder(version.stage, version.key))
            with self._store.reading([here]):
                for one in self._engine_of(config).generate(here.path, here.digest, requests, params, report):
                    events.put(("response", one))

        self._thread.submit(lambda: events.put(("done", self._tried(sampled))))
        while True:
            kind, value = events.get()
            yield kind, value
            if kind == "done":
                return

    def rest(self) -> None:
        """Free the memory of the engine until the next call."""
        if self._engine is not None:
            self._thread.submit(self._engine[1].rest).result()

    def close(self) -> None:
        """End what the engine has started."""
        if self._engine is not None:
            self._thread.submit(self._engine[1].close).result()
            self._engine = None

    def _engine_of(self, config: GenerateConfig) -> Any:
        from hacrl_core.generation import create_engine

        if self._engine is None or self._engine[0] != config:
            if self._engine is not None:
                self._engine[1].close()
            self._engine = (config, create_engine(config, own_code=self._own_code))
        return self._engine[1]

    def _tried(self, act: Callable[[], None]) -> "tuple[Any, list[str]]":
        from hacrl_core.learning.sharded.ranks import portable

        problem: BaseException | None = None
        try:
            act()
        except BaseException as raised:
            problem = portable(raised)
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return problem, lines


class Peers:
    """The leader's peers: actors in the other bundles of its placement group, started when they are needed."""

    def __init__(self, bundles: Sequence[Resources], place: Placement, where: NodeStore, root: Path) -> None:
        self.count = len(bundles)
        self.root = root
        self._bundles = bundles
        self._place = place
        self._where = where
        self._actors: dict[int, Any] = {}
        self._lock = threading.Lock()

    def actor(self, index: int) -> Any:
        """Return the actor in a bundle, starting it if it does not run."""
        import ray

        with self._lock:
            if index not in self._actors:
                options = actor_options(self._bundles[index], ray.util.get_current_placement_group(), index)
                self._actors[index] = ray.remote(PeerActor).options(**options).remote(self._place, self._where)
            return self._actors[index]

    def drop(self, index: int) -> None:
        """End the actor in a bundle at once."""
        import ray

        with self._lock:
            actor = self._actors.pop(index, None)
        if actor is not None:
            with suppress(Exception):
                ray.kill(actor)

    def start_rank(self, index: int, count: int, address: str, port: int, device: str) -> "ActorRank":
        """Start a rank in the bundle of its number."""
        return ActorRank(self, index, (index, count, address, port, device))

    def everywhere(self, method: str) -> None:
        """Have all peers that run do something, and wait until they have; one that is gone has nothing to do."""
        import ray

        with self._lock:
            actors = list(self._actors.values())
        for call in [getattr(actor, method).remote() for actor in actors]:
            with suppress(ray.exceptions.RayError):
                ray.get(call, timeout=CLOSE_SECONDS)

    def close(self) -> None:
        """End all peers, and what their engines have started."""
        self.everywhere("close")
        for index in list(self._actors):
            self.drop(index)


class ActorRank:
    """Rank 0's end of a rank that is an actor (`sharded.ranks.Peer`)."""

    def __init__(self, peers: Peers, index: int, place: tuple[int, int, str, int, str]) -> None:
        self._peers = peers
        self._index = index
        self._actor = peers.actor(index)
        self._dead: News | None = None
        # What the actor is to answer, in this order; joining has no news of its own.
        self._asked: deque[tuple[str, Any]] = deque([("ready", self._actor.hello.remote())])
        self._asked.append(("", self._actor.join.remote(*place)))

    def send(self, task: bytes) -> None:
        """Hand over a task."""
        self._asked.append(("done", self._actor.run.remote(task, str(self._peers.root))))

    def news(self) -> "News | None":
        """Return the next news of the actor, if there is any."""
        import ray

        from hacrl_core.learning.sharded.ranks import News

        while self._dead is None and self._asked:
            kind, answer = self._asked[0]
            if not ray.wait([answer], timeout=0)[0]:
                return None
            self._asked.popleft()
            try:
                found = ray.get(answer)
            except ray.exceptions.RayError as problem:
                self._dead = News("died", f"its actor is gone, {type(problem).__name__}")
                break
            if kind == "ready":
                return News(kind)
            problem_there, lines = found
            for line in lines:
                print(line, flush=True)
            if problem_there is not None:
                return News("error", problem_there)
            if kind:
                return News(kind)
        return self._dead

    def kill(self) -> None:
        """End the actor."""
        self._peers.drop(self._index)

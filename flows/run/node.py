"""What runs on a node of a cluster: an actor that takes stage calls of one agent's role and keeps its models warm.

The actor knows nothing of the campaign but its calls. It reads inputs from its node's store and publishes there. What
happens meanwhile (progress, warnings, printed lines) goes back as a stream of small messages, the outcome last.
"""

import os
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flows.run.actor import NodeStore, forward_output, prepare, uploads_of
from flows.run.cluster import Resources
from flows.run.peers import Peers, node_address
from flows.run.placement import Placement
from flows.run.replicas import ReplicatedEngine
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.artifacts.manifests import MANIFEST
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.errors import HacrlError
from hacrl_core.instructions import settle_instructions
from stages.runner import package_versions, run_stage
from stages.spec import Context, Outcome, StageCall

if TYPE_CHECKING:
    from hacrl_core.generation.protocols import GenerationEngine

# A progress bar moves often enough with so many messages a second.
PROGRESS_SECONDS = 0.2
# So long the end of an actor waits for its uploads.
FLUSH_SECONDS = 600.0
Message = tuple[str, Any]


def relocated(call: StageCall, store: Store) -> StageCall:
    """Return a bound call whose inputs lie in this store: paths differ from node to node."""
    return replace(call, inputs={role: relocated_ref(ref, store) for role, ref in call.artifacts.items()})


def relocated_ref(ref: ArtifactRef, store: Store) -> ArtifactRef:
    """Return the reference with the path that the artifact has in this store."""
    return replace(ref, path=store.folder(ref.stage, ref.key))


class RoleActor:
    """Serves some roles of one agent on a node, one call at a time. Ray makes an actor of this class."""

    def __init__(self, name: str, place: Placement, where: NodeStore, bundles: Sequence[Resources] = ({},)) -> None:
        """``bundles`` are those of the placement group; this actor is in the first, peers come into the others."""
        import ray

        from hacrl_core.warm import WarmModels

        self._node = ray.get_runtime_context().get_node_id()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._told = 0.0
        forward_output(lambda line: self._messages.put(("output", (name, line))))
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("TQDM_DISABLE", "1")
        # One thread for all stages: what a stage starts may live as long as the thread that started it.
        self._thread = ThreadPoolExecutor(1, "stage")
        self._store = where.open(self._node, self._warn)
        if line := settle_instructions():
            self._warn(line)
        warm = WarmModels(own_code=place.own_code)
        self._peers: Peers | None = None
        if len(bundles) > 1:
            self._peers = Peers(bundles, place, where, self._store.root)
            warm.start_rank, warm.make_engine = self._peers.start_rank, self._make_engine
            warm.address = node_address()
        self._context = Context(
            progress=self._progress,
            warn=self._warn,
            warm=warm,
            device=self._thread.submit(prepare, place).result(),
            attention=place.attention,
        )

    def hello(self) -> dict[str, Any]:
        """Say where the actor runs and with which versions of what changes numbers."""
        return {"node": self._node, "pid": os.getpid(), "packages": package_versions()}

    def run(self, call: StageCall) -> Iterator[Message]:
        """Run a bound call: yield what happens, and at last ``done`` with the outcome or ``error``."""
        running = self._thread.submit(self._answer, relocated(call, self._store))
        while True:
            kind, value = self._messages.get()
            yield kind, value
            if kind in ("done", "error"):
                running.result()
                return

    def close(self) -> None:
        """Release what is kept warm, end what the stages have started, and upload what the bucket lacks."""
        from hacrl_core.verification import close_pool

        self._thread.submit(self._context.warm.close).result()
        self._thread.submit(close_pool).result()
        if self._peers is not None:
            self._peers.close()
        if (uploads := uploads_of(self._store)) is not None:
            uploads.flush(FLUSH_SECONDS)

    def _make_engine(self, config: GenerateConfig, own_code: bool) -> "GenerationEngine":
        """Return the engine of a config; with replicas this actor's own and those of its peers."""
        from hacrl_core.generation import create_engine

        assert self._peers is not None
        if config.engine.replicas == 1:
            return create_engine(config, own_code=own_code)
        alone = config.model_copy(update={"engine": config.engine.model_copy(update={"replicas": 1})})
        return ReplicatedEngine(create_engine(alone, own_code=own_code), alone, self._peers, self._warn)

    def _answer(self, call: StageCall) -> None:
        try:
            waiting: Callable[[str], None] = lambda holder: self._messages.put(("waiting", holder))  # noqa: E731
            outcome: Outcome = run_stage(self._store, call, self._context, waiting)
            # The driver learns the manifest with the outcome: the bucket may not have it yet.
            answer: Message = ("done", (outcome, (outcome.ref.path / MANIFEST).read_bytes()))
        except HacrlError as problem:
            answer = ("error", problem)
        except BaseException as problem:
            # The node's files may be out of the user's reach: the traceback travels.
            self._messages.put(("traceback", traceback.format_exc()))
            answer = ("error", HacrlError(f"{call.title}: {type(problem).__name__}: {problem}"))
        self._messages.put(answer)

    def _warn(self, message: str) -> None:
        self._messages.put(("warn", message))

    def _progress(self, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if done >= total or now - self._told > PROGRESS_SECONDS:
            self._told = now
            self._messages.put(("progress", (done, total, note)))

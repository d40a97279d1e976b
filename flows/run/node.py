"""What runs on a node of a cluster: an actor that takes stage calls of one agent's role and keeps its models warm.

The actor knows nothing of the campaign but its calls. It reads inputs from its node's store and publishes there. What
happens meanwhile (progress, warnings, printed lines) goes back as a stream of small messages, the outcome last.
"""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.run.placement import Placement
from hacrl_core.artifacts import ArtifactRef, Store, open_store
from hacrl_core.artifacts.manifests import MANIFEST
from hacrl_core.config.operation import StoreConfig
from hacrl_core.errors import HacrlError
from stages.runner import package_versions, run_stage
from stages.spec import Context, Outcome, StageCall

# A progress bar moves often enough with so many messages a second.
PROGRESS_SECONDS = 0.2
# So long the end of an actor waits for its uploads.
FLUSH_SECONDS = 600.0
Message = tuple[str, Any]


@dataclass(frozen=True)
class NodeStore:
    """Which store an actor opens on its node."""

    folder: str  # {node} becomes the node's id
    bucket: StoreConfig | None = None

    def open(self, node: str, on_problem: Callable[[str], None]) -> Store:
        """Open the store of this node; what is published there is uploaded behind the next stages."""
        store = open_store(Path(self.folder.replace("{node}", node)), on_problem, self.bucket)
        if (uploads := uploads_of(store)) is not None:
            uploads.start()
        return store


def uploads_of(store: Store) -> Any:
    """Return the uploads of a store in front of a bucket, else None. Needs no obstore to tell."""
    return getattr(store, "uploads", None)


def relocated(call: StageCall, store: Store) -> StageCall:
    """Return a bound call whose inputs lie in this store: paths differ from node to node."""
    return replace(call, inputs={role: relocated_ref(ref, store) for role, ref in call.artifacts.items()})


def relocated_ref(ref: ArtifactRef, store: Store) -> ArtifactRef:
    """Return the reference with the path that the artifact has in this store."""
    return replace(ref, path=store.folder(ref.stage, ref.key))


class RoleActor:
    """Serves some roles of one agent on a node, one call at a time. Ray makes an actor of this class."""

    def __init__(self, name: str, place: Placement, where: NodeStore) -> None:
        import ray

        from hacrl_core.warm import WarmModels

        self._node = ray.get_runtime_context().get_node_id()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._told = 0.0
        _forward_output(lambda line: self._messages.put(("output", (name, line))))
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("TQDM_DISABLE", "1")
        # One thread for all stages: what a stage starts may live as long as the thread that started it.
        self._thread = ThreadPoolExecutor(1, "stage")
        self._store = where.open(self._node, self._warn)
        self._context = Context(
            progress=self._progress,
            warn=self._warn,
            warm=WarmModels(own_code=place.own_code),
            device=self._thread.submit(_prepare, place).result(),
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
        if (uploads := uploads_of(self._store)) is not None:
            uploads.flush(FLUSH_SECONDS)

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
            answer = ("error", HacrlError(f"{call.label}: {type(problem).__name__}: {problem}"))
        self._messages.put(answer)

    def _warn(self, message: str) -> None:
        self._messages.put(("warn", message))

    def _progress(self, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if done >= total or now - self._told > PROGRESS_SECONDS:
            self._told = now
            self._messages.put(("progress", (done, total, note)))


def _prepare(place: Placement) -> str:
    from flows.run.worker import prepare_torch

    return prepare_torch(place) if place.needs_torch else "cpu"


def _forward_output(say: Callable[[str], None]) -> None:
    """Send what this process and its children print to ``say``, line by line."""
    ours, theirs = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(theirs, number)
    os.close(theirs)

    def read() -> None:
        with open(ours, errors="replace") as lines:
            for line in lines:
                say(line.rstrip("\n"))

    threading.Thread(target=read, name="output", daemon=True).start()

"""Runs stages on the nodes of a Ray cluster: a role of an agent is an actor with resources of its own.

Ray places processes and nothing else. Calls and small messages pass through it; artifacts lie in the store. So an
actor, a node or the whole cluster may die at any time: what ran there is computed again from its inputs, nothing else.

Ray is imported inside functions: it is an optional dependency (``hacrl[ray]``).
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flows.run.actor import NodeStore
from flows.run.cluster import Resources, asked, nodes_text, resources_of, servable
from flows.run.events import Listener
from flows.run.executors import run_here
from flows.run.line import Line, urgency_of
from flows.run.node import FLUSH_SECONDS, RoleActor, relocated_ref
from flows.run.peers import actor_options
from flows.run.placement import Seat, role_of, seats_of
from flows.run.worker import STOP_SECONDS, Stopped, WorkerDied
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.opening import bucket_of
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import ConfigError, EngineError, HacrlError, RankDied
from stages.runner import package_versions
from stages.spec import Context, Outcome, StageCall

# How often a waiting call looks whether the campaign ends, and whether a node for it exists.
POLL_SECONDS = 1.0
# After so long without a free place, an idle actor of this campaign is ended to make room.
ROOM_SECONDS = 3.0
# Ray itself ends a process that has not reached the head for a minute, without a word.
HEAD_SECONDS = 30.0


class HeadLost(EngineError):
    """The cluster's head does not answer. Nothing is lost; the same command resumes."""


@dataclass
class _Started:
    """An actor that answers, and where it is."""

    actor: Any
    group: Any
    node: str
    pid: int


class RayExecutor:
    """Sends each call to the actor of its agent and role; light stages run in this process."""

    def __init__(self, config: CampaignConfig, store: Store, listener: Listener | None = None) -> None:
        """Connect to the cluster; actors are started by their first call."""
        self._store = store
        self._context = Context()
        self._seats = seats_of(config, machine=0, check_apart=True)
        self.cluster = Cluster(config.runtime.address, config.runtime.place_seconds)
        bucket = config.store or bucket_of(store.root)
        where = NodeStore(config.runtime.node_store or str(store.root), bucket)
        logs = store.root.parent / "logs"
        self._roles = {
            seat.name: RemoteRole(seat, resources_of(seat, config), where, self.cluster, str(logs))
            for seat in self._seats.values()
        }
        self.cluster.roles = list(self._roles.values())

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        """Run the call on the cluster, or here if it is light."""
        role = role_of(call.stage)
        if role == "here":
            return run_here(self._store, call, self._context, listener)
        outcome, manifest = self._roles[self._seats[call.agent, role].name].run(call, listener)
        if (learn := getattr(self._store, "learn", None)) is not None:
            learn(manifest)
        return replace(outcome, ref=relocated_ref(outcome.ref, self._store))

    def places(self) -> dict[str, tuple[str, int]]:
        """Return node and process of every actor that runs."""
        return {name: (role.now.node, role.now.pid) for name, role in self._roles.items() if role.now is not None}

    def close(self, *, now: bool) -> None:
        """End all actors and leave the cluster."""
        self.cluster.closed = True
        for role in self._roles.values():
            role.end(politely=not now)
        self.cluster.leave()


class Cluster:
    """The connection to a Ray cluster, and what its nodes have."""

    def __init__(self, address: str, place_seconds: float) -> None:
        self.place_seconds = place_seconds
        self.closed = False
        self.roles: list[RemoteRole] = []
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._silent_since: float | None = None
        ray = self.ray = _import_ray()
        if ":" in address and "://" not in address and not _listens(address):
            # Ray itself would try for minutes.
            raise ConfigError(_no_cluster(address, "nothing listens there"))
        before = signal.getsignal(signal.SIGTERM)
        try:
            with suppress(ValueError):
                # A connection that an earlier run in this process left.
                ray.shutdown()
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                namespace=f"hacrl-{os.getpid()}-{time.time_ns()}",
            )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as problem:
            why = str(problem).partition("\n")[0]
            raise ConfigError(_no_cluster(address, why)) from None
        finally:
            if threading.current_thread() is threading.main_thread():
                # Ray installs a handler of its own that would end the campaign without closing it.
                signal.signal(signal.SIGTERM, before)
        self.address: str = ray.get_runtime_context().gcs_address

    def leave(self) -> None:
        """Disconnect; every actor of this process ends with the connection."""
        with suppress(Exception):
            self.ray.shutdown()

    def nodes(self) -> dict[str, Resources]:
        """Return what each living node has in all, by its name."""
        found = {}
        for node in self.ray.nodes():
            if node["Alive"]:
                found[f"{node['NodeManagerHostname']} {node['NodeID'][:8]}"] = dict(node["Resources"])
        return found

    def check(self, label: str) -> None:
        """Raise where the campaign is ending, or the head has not answered for long."""
        if self.closed:
            raise Stopped(f"{label}: stopped, the campaign is ending")
        if self._answers():
            self._silent_since = None
            return
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since > HEAD_SECONDS:
            raise HeadLost(
                f"{label}: the head of the Ray cluster at {self.address} has not answered for {HEAD_SECONDS:.0f} s; "
                "nothing is lost: start it again and run the same command"
            )

    def _answers(self) -> bool:
        return _listens(self.address)

    def warn_once(self, listener: Listener, message: str) -> None:
        """Warn, each message once in a campaign."""
        with self._lock:
            known = message in self._told
            self._told.add(message)
        if not known:
            listener.warn(message)

    def make_room(self, waiting: "RemoteRole") -> None:
        """End one idle actor of this campaign that holds what another waits for."""
        for role in self.roles:
            if role is not waiting and role.end_if_idle():
                return


class RemoteRole:
    """The driver's end of an actor. It is started by the first call, and again after it or its node died."""

    def __init__(self, seat: Seat, bundles: Sequence[Resources], where: NodeStore, cluster: Cluster, logs: str) -> None:
        self.now: _Started | None = None
        self._seat = seat
        self._bundles = bundles
        self._where = where
        self._cluster = cluster
        self._logs = logs
        self._line = Line()
        self._changing = threading.Lock()
        self._busy = False

    def run(self, call: StageCall, listener: Listener) -> tuple[Outcome, bytes]:
        """Have the actor run a bound call, and return its manifest too; a dead actor or node is ``WorkerDied``."""
        with self._line.turn(urgency_of(call)):
            self._cluster.check(call.title)
            with self._changing:
                self._busy = True
            try:
                started = self._start(call, listener)
                return self._follow(call, started, listener)
            except self._cluster.ray.exceptions.RayTaskError as problem:
                self.end()
                raise HacrlError(f"{call.title}: {problem.cause or problem}") from problem
            except self._cluster.ray.exceptions.RayError as problem:
                node = "" if self.now is None else f" on node {self.now.node[:8]}"
                self.end()
                self._cluster.check(call.title)
                raise WorkerDied(
                    f"{call.title}: the actor of {self._seat.name}{node} died ({type(problem).__name__})"
                ) from problem
            finally:
                self._busy = False

    def end_if_idle(self) -> bool:
        """End the actor if it runs and has nothing to do; return whether it did."""
        with self._changing:
            if self._busy or self.now is None:
                return False
            self._end(politely=True)
            return True

    def end(self, *, politely: bool = False) -> None:
        """End the actor and give its resources back."""
        with self._changing:
            self._end(politely=politely)

    def _end(self, *, politely: bool = False) -> None:
        started, self.now = self.now, None
        if started is None:
            return
        ray = self._cluster.ray
        with suppress(Exception):
            if politely:
                ray.get(started.actor.close.remote(), timeout=STOP_SECONDS + FLUSH_SECONDS)
        with suppress(Exception):
            ray.kill(started.actor)
        with suppress(Exception):
            ray.util.remove_placement_group(started.group)

    def _start(self, call: StageCall, listener: Listener) -> _Started:
        if self.now is not None:
            return self.now
        ray = self._cluster.ray
        group = self._reserve(call, listener)
        made = ray.remote(RoleActor).options(**actor_options(self._bundles[0], group, 0))
        actor = made.remote(self._seat.name, self._seat.place, self._where, self._bundles)
        self.now = _Started(actor, group, "", 0)
        hello: Mapping[str, Any] = self._wait(call, actor.hello.remote())
        self.now = _Started(actor, group, hello["node"], hello["pid"])
        self._compare_versions(hello, listener)
        return self.now

    def _reserve(self, call: StageCall, listener: Listener) -> Any:
        """Wait for a place; say so within ``place_seconds`` if no node can ever give it."""
        cluster = self._cluster
        group = cluster.ray.util.placement_group([dict(bundle) for bundle in self._bundles], strategy="PACK")
        possible = began = room = time.monotonic()
        try:
            while not group.wait(POLL_SECONDS):
                cluster.check(call.title)
                now = time.monotonic()
                nodes = cluster.nodes()
                if servable(self._bundles, nodes.values()):
                    possible = now
                elif now - possible > cluster.place_seconds:
                    raise ConfigError(
                        f"{call.title}: no node of the Ray cluster at {cluster.address} can serve it: it asks for "
                        f"{asked(self._bundles)}; nodes: {nodes_text(nodes)}; add a node that has it, or change "
                        f"agents.{self._seat.agent}.gpus or resources"
                    )
                if now - room > ROOM_SECONDS:
                    cluster.make_room(self)
                    room = now
                if now - began > 10 * ROOM_SECONDS:
                    place = f"a free place in the Ray cluster ({asked(self._bundles)})"
                    cluster.warn_once(listener, f"{self._seat.name}: waits for {place}")
        except BaseException:
            with suppress(Exception):
                cluster.ray.util.remove_placement_group(group)
            raise
        return group

    def _wait(self, call: StageCall, answer: Any) -> Any:
        ray = self._cluster.ray
        while True:
            ready, _ = ray.wait([answer], timeout=POLL_SECONDS)
            if ready:
                return ray.get(answer)
            self._cluster.check(call.title)

    def _follow(self, call: StageCall, started: _Started, listener: Listener) -> tuple[Outcome, bytes]:
        """Pass on what the actor reports until its outcome comes."""
        ray = self._cluster.ray
        stream = started.actor.run.options(num_returns="streaming").remote(call)
        while True:
            ready, _ = ray.wait([stream], timeout=POLL_SECONDS)
            if not ready:
                self._cluster.check(call.title)
                continue
            kind, value = ray.get(next(stream))
            if kind == "done":
                answer: tuple[Outcome, bytes] = value
                return answer
            if kind == "error":
                if isinstance(value, RankDied):
                    # A rank's node may be gone: the next attempt gets a group of its own, anywhere.
                    self.end()
                raise value
            self._tell(call, kind, value, listener)

    def _tell(self, call: StageCall, kind: str, value: Any, listener: Listener) -> None:
        if kind == "progress":
            listener.progress(call, *value)
        elif kind == "warn":
            listener.warn(value)
        elif kind == "waiting":
            listener.waiting(call, value)
        elif kind == "output":
            listener.output(*value)
        elif kind == "traceback":
            os.makedirs(self._logs, exist_ok=True)
            with open(os.path.join(self._logs, f"{call.agent}.log"), "a") as log:
                log.write(value)

    def _compare_versions(self, hello: Mapping[str, Any], listener: Listener) -> None:
        ours, theirs = package_versions(), hello["packages"]
        differ = [f"{name} {theirs.get(name)} (here {ours[name]})" for name in ours if theirs.get(name) != ours[name]]
        if differ:
            self._cluster.warn_once(
                listener, f"node {hello['node'][:8]} has other versions, numbers may differ: {', '.join(differ)}"
            )


def _listens(address: str) -> bool:
    """Return whether something takes connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False


def _no_cluster(address: str, why: str) -> str:
    return (
        f"runtime.address {address}: no Ray cluster answers ({why}); start one with hacrl up --ray or ray start "
        "--head, or set runtime.executor to local"
    )


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise ConfigError("runtime.executor ray: Ray is not installed; pip install 'hacrl[ray]'") from None
    return ray

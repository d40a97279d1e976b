"""Ray's fake cluster: a head and two nodes on this machine, each with a store of its own.

It listens on the machine's address, so it belongs into a network namespace with nothing but loopback
(``make test-cluster``). About 700 MB; one at a time.
"""

import os
import signal
import time
from contextlib import suppress
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
STORE = 80 << 20  # bytes of Ray's object store on each node; nothing is kept there
# A dead node is noticed in seconds, and a slow machine is not taken for dead.
SYSTEM = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 5,
    "worker_register_timeout_seconds": 300,
    "prestart_worker_first_driver": False,
    # By default Ray gives stages what all other processes leave of the machine.
    "worker_niceness": 0,
}


class FakeCluster:
    """A head without room for stages, and nodes that can be added and killed."""

    def __init__(self, nodes: int = 2, attempts: int = 3) -> None:
        from ray.cluster_utils import Cluster

        for attempt in range(attempts):  # the raylet's own limit of 30 s may be too short on a busy machine
            try:
                head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
                self._cluster: Any = Cluster(initialize_head=True, head_node_args={**head, "_system_config": SYSTEM})
                break
            except Exception:
                if attempt + 1 == attempts:
                    raise
                time.sleep(5)
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: int = 8, **resources: float) -> Any:
        node = self._cluster.add_node(num_cpus=cpus, resources=resources, object_store_memory=STORE)
        self.nodes.append(node)
        return node

    def lose(self, node: Any) -> None:
        """End a node without grace: its raylet and with it all its workers."""
        self.nodes.remove(node)
        with suppress(Exception):
            self._cluster.remove_node(node, allow_graceful=False)

    def raylets(self) -> list[int]:
        """Process ids of the nodes' raylets, without the head's."""
        return [info.process.pid for node in self.nodes for info in node.all_processes["raylet"]]

    def forget_dead(self) -> None:
        """Take nodes whose raylet was killed off the list, and end what is left of them."""
        for node in list(self.nodes):
            if any(info.process.poll() is not None for info in node.all_processes.get("raylet", [])):
                self.lose(node)

    def lose_head(self) -> None:
        """Kill the head's control service (GCS) with SIGKILL."""
        for info in self._cluster.head_node.all_processes["gcs_server"]:
            os.kill(info.process.pid, signal.SIGKILL)

    def close(self) -> None:
        with suppress(Exception):
            self._cluster.shutdown()

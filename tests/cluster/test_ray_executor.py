"""The Ray executor on a real, small cluster: same artifacts, same reports, and nothing that hangs."""

import os
import signal
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from flows.home import Home
from flows.record.log import read_log
from flows.record.record import read_entries
from flows.run.events import Listener
from flows.run.launch import open_campaign, run_stages
from flows.run.ray_executor import RayExecutor
from flows.run.runner import ThreadRunner
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.errors import ConfigError, ContractError, HacrlError
from tests.flow.homes import digests
from tests.patience import patience


class Watched(RayExecutor):
    """Remembers which node and process ran what; ``at`` is called when a stage has started somewhere."""

    def __init__(self, config, store, listener=None, at=lambda label, pid: None) -> None:
        super().__init__(config, store, listener)
        self.ran: dict[str, tuple[str, int]] = {}
        for name, role in self._roles.items():
            self._watch(name, role, at)

    def _watch(self, name, role, at) -> None:
        start = role._start

        def started(call, listener):
            found = start(call, listener)
            self.ran[call.label] = (found.node, found.pid)
            at(call.label, found.pid)
            return found

        role._start = started


def run(config, home: Home, at=lambda label, pid: None) -> Watched:
    with open_campaign(config, home, Console(quiet=True)) as campaign:
        executor = Watched(config, campaign.store, at=at)
        run_stages(campaign, ThreadRunner, lambda *_: executor)
    return executor


def test_every_digest_is_that_of_a_local_run_and_roles_are_apart(tmp_path: Path, on_ray, local):
    home = Home(tmp_path / "home")
    executor = run(on_ray(), home)
    assert digests(home, "tiny") == local
    processes = {role: {executor.ran[f"{stage} ada #0"][1]} for role, stage in (("check", "verify"), ("gpu", "score"))}
    assert processes["check"].isdisjoint(processes["gpu"])
    assert executor.ran["generate ada #0"] == executor.ran["score ada #0"] == executor.ran["update ada #1"]
    assert executor.ran["score ada #0"][1] != executor.ran["score ben #0"][1]
    assert "sample #0" not in executor.ran
    for _, pid in executor.ran.values():  # nothing of the campaign stays in the cluster
        wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + patience(30)
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.1)


def test_killed_actors_and_a_lost_node_cost_the_stage_that_ran_there(tmp_path: Path, cluster, on_ray, local):
    home = Home(tmp_path / "home")
    killed: list[str] = []
    lock = threading.Lock()

    def at(label: str, pid: int) -> None:
        with lock:
            if label in killed or label not in ("generate ben #0", "update ada #0", "verify ada #1", "score ben #1"):
                return
            killed.append(label)
            # The parent of an actor is its node's raylet: the whole node goes. Its actors go with it at once, as on a
            # machine that loses power; left to notice it by themselves they may finish a short stage before.
            if label == "score ben #1":
                os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)

    cluster.add()
    run(on_ray(), home, at)
    cluster.forget_dead()
    assert len(killed) == 4
    assert len(cluster.nodes) == 2
    assert digests(home, "tiny") == local
    objects = list((home.store / "objects").glob("*/*/manifest.json"))
    assert len(objects) == len({(e.stage, e.key) for e in read_entries(home.campaign("tiny"))})
    warned = [line.text for line in read_log(home.campaign("tiny")) if line.kind == "warning"]
    assert sum("died" in text and "trying again" in text for text in warned) >= 4
    assert not list((home.store / "damaged").glob("*"))


def test_a_stage_that_no_node_can_serve_says_so_with_the_nodes_it_saw(tmp_path: Path, on_ray):
    config = on_ray(runtime={"place_seconds": 5})
    agents = {name: agent.model_dump() for name, agent in config.agents.items()}
    agents["ben"]["resources"] = {"accelerator_type:H100": 1.0}
    config = type(config).model_validate({**config.model_dump(), "agents": agents})
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        run(config, Home(tmp_path / "home"))
    assert time.monotonic() - begun < patience(60)
    message = str(caught.value)
    assert "warmstart ben" in message
    assert "1 accelerator_type:H100" in message
    assert message.count("8 CPU") == 2
    assert "agents.ben" in message


def test_errors_and_warnings_of_a_stage_arrive_as_they_do_locally(tmp_path: Path, on_ray):
    heard: list[str] = []

    class Hears(Listener):
        def progress(self, call, done, total, note) -> None:
            heard.append(f"progress {call.stage} {done}/{total}")

        def output(self, worker, line) -> None:
            heard.append(f"output {worker}")

    config = on_ray()
    store = Store(tmp_path / "store")
    executor = RayExecutor(config, store)
    try:
        calls = StageCalls(config)
        origin = executor.run(calls.origin("ada"), Hears())
        assert any(line.startswith("progress warmstart") for line in heard)
        broken = calls.verify("ada", origin.ref, origin.ref, 0, {})  # no rollouts in there
        with pytest.raises(ContractError, match="verify ada iteration 1"):
            executor.run(broken, Hears())
        with pytest.raises(HacrlError, match="verify ada iteration 1: KeyError") as caught:
            executor.run(replace(broken, inputs={}), Hears())  # what nobody expects
        assert type(caught.value).__module__.startswith("hacrl_core")
        assert "Traceback" in (tmp_path / "logs" / "ada.log").read_text()
        # What a call costs beyond its work: the artifact exists, so the actor only looks it up.
        times = []
        for _ in range(50):
            begun = time.perf_counter()
            assert executor.run(calls.origin("ada"), Listener()).cached
            times.append(time.perf_counter() - begun)
        print(f"\noverhead of a call: median {statistics.median(times) * 1e3:.1f} ms")
    finally:
        executor.close(now=True)


def test_without_a_cluster_the_config_error_names_the_address(tmp_path: Path, on_ray):
    with pytest.raises(ConfigError, match=r"runtime.address 127.0.0.1:1: no Ray cluster answers"):
        run(on_ray(runtime={"address": "127.0.0.1:1"}), Home(tmp_path))

"""Ranks and replicas on a cluster, as far as that needs none: what is asked for, whose paths, who takes which part."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flows.run.cluster import asked, peers_of, resources_of, servable
from flows.run.peers import Moved
from flows.run.placement import seats_of
from flows.run.replicas import _Work
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from tests.flow.conftest import tiny

PAPER = Path(__file__).resolve().parents[2] / "configs" / "paper"


def paper(**changes) -> CampaignConfig:
    overrides = [f"{name}={value}" for name, value in changes.items()]
    return load_config(PAPER / "qwen3-4b-8b-base.yaml", CampaignConfig, ["runtime.executor=ray", *overrides])


def bundles(config: CampaignConfig, agent: str, role: str):
    seat = seats_of(config, machine=0, check_apart=True)[agent, role]
    return resources_of(seat, config)


def test_a_rank_and_a_replica_have_a_gpu_each_on_any_node_and_checking_has_none():
    config = paper()
    threads = float(config.runtime.threads_per_agent)
    own, other = {"CPU": threads, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}
    assert bundles(config, "qwen3-8b-base", "learn") == [own, *[other] * 4]
    assert asked([own, *[other] * 4]) == f"{threads:g} CPU, 1 GPU and 4 × (1 CPU, 1 GPU)"
    assert bundles(config, "qwen3-8b-base", "check") == [{"CPU": threads}]
    # No node has five GPUs, and two have them together.
    nodes = [{"CPU": 16.0, "GPU": 3.0}, {"CPU": 16.0, "GPU": 2.0}]
    assert servable(bundles(config, "qwen3-8b-base", "learn"), nodes)
    assert not servable(bundles(config, "qwen3-8b-base", "learn"), nodes[:1])


def test_ranks_beside_an_engine_that_is_several_gpus_wide_stay_on_one_node():
    wide = {"generate.engine.tensor_parallel_size": 3, "agents.qwen3-4b-base.generate.engine.replicas": 1}
    config = paper(**wide)
    assert bundles(config, "qwen3-4b-base", "learn") == [{"CPU": float(config.runtime.threads_per_agent), "GPU": 3.0}]


def test_a_campaign_without_ranks_or_replicas_asks_for_what_it_always_did():
    config = tiny()
    for seat in seats_of(config, machine=0, check_apart=True).values():
        assert peers_of(seat, config) == 1
        assert resources_of(seat, config) == [{"CPU": 1.0}]


def test_copies_of_the_built_in_engine_need_a_cluster():
    with pytest.raises(ValueError, match=r"replicas 2: copies of the built-in engine run on a Ray cluster only"):
        tiny(generate={"max_tokens": 24, "engine": {"kind": "builtin", "replicas": 2}})


@dataclass(frozen=True)
class Task:
    inputs: dict[str, ArtifactRef]
    version: ArtifactRef
    out: Path
    elsewhere: Path
    sequences: list[int] = field(default_factory=list)


def test_a_task_gets_the_paths_of_its_node_and_names_what_it_reads(tmp_path):
    theirs, ours = Store(tmp_path / "leader"), Store(tmp_path / "node")
    ref = ArtifactRef("update", "k" * 64, "d" * 64, theirs.folder("update", "k" * 64))
    task = Task({"agent": ref}, ref, theirs.root / "staging" / "x", tmp_path / "data", [1])
    moved, reads = Moved(theirs.root, ours).task(task)
    assert moved.inputs["agent"].path == moved.version.path == ours.folder("update", "k" * 64)
    assert moved.version.digest == ref.digest
    assert moved.out == ours.root / "staging" / "x"
    assert (moved.elsewhere, moved.sequences) == (task.elsewhere, task.sequences)
    assert {one.path for one in reads} == {ours.folder("update", "k" * 64)}


def test_a_part_that_is_given_back_is_taken_by_whoever_waits_and_every_part_is_done_once():
    done: list[int] = []
    work = _Work(3, lambda responses, tokens: None, lambda number, found: done.append(number))
    lost = work.take()
    assert lost == 0

    def survivor() -> None:
        while (number := work.take()) is not None:
            work.done(number, [])

    helper = threading.Thread(target=survivor)
    helper.start()
    deadline = time.monotonic() + 30
    while sorted(done) != [1, 2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert helper.is_alive(), "it waits: a part may still come back"
    work.give_back(lost)
    helper.join(10)
    assert sorted(done) == [0, 1, 2]


def test_an_error_ends_all_and_is_raised():
    work = _Work(2, lambda responses, tokens: None, lambda number, found: None)
    work.take()
    work.fail(ValueError("the engine broke"))
    assert work.take() is None
    with pytest.raises(ValueError, match="the engine broke"):
        work.raise_failure()

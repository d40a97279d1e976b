"""Agents that share a GPU: who is not in use has no process, and so no device memory."""

import os

import pytest

from flows.run.events import Listener
from flows.run.placement import Placement, Turn, gpus_of, turns_of
from flows.run.worker import Worker
from flows.scheduling.slots import slot_names
from hacrl_core.config.agents import AgentConfig
from hacrl_core.config.generation import BuiltinEngineConfig, VllmEngineConfig
from hacrl_core.config.problems import ArithmeticProblems
from hacrl_core.problems import load_problems
from stages.sample import SampleSlice
from stages.spec import StageCall
from tests.flow.conftest import tiny

CHECKPOINT = {"path": "org/model"}


@pytest.mark.parametrize(
    ("settings", "engine", "machine", "used"),
    [
        ({}, BuiltinEngineConfig(), 0, set()),
        ({}, BuiltinEngineConfig(), 8, {0}),
        ({"device": "cpu"}, BuiltinEngineConfig(), 8, set()),
        ({"device": "cuda:3"}, BuiltinEngineConfig(device="cuda:1"), 8, {1, 3}),
        ({}, VllmEngineConfig(tensor_parallel_size=2), 8, {0, 1}),
        ({"device": "cpu"}, VllmEngineConfig(url="http://127.0.0.1:1"), 8, set()),
        ({"gpus": [4, 5]}, VllmEngineConfig(tensor_parallel_size=2), 8, {4, 5}),
    ],
)
def test_which_gpus_an_agent_uses(settings, engine, machine, used):
    assert gpus_of(AgentConfig(checkpoint=CHECKPOINT, **settings), engine, machine) == used


def test_overlap_makes_a_turn_also_through_a_third_agent():
    places = {"a": [0], "b": [0, 1], "c": [1], "d": [2], "e": [], "f": [5, 6], "g": [6]}
    agents = {
        name: {"checkpoint": CHECKPOINT, "gpus": gpus, "device": "auto" if gpus else "cpu"}
        for name, gpus in places.items()
    }
    turns = turns_of(tiny(agents=agents))
    assert set(turns) == {"a", "b", "c", "f", "g"}
    assert turns["a"] is turns["b"] is turns["c"]
    assert turns["f"] is turns["g"] is not turns["a"]
    host = os.uname().nodename
    assert slot_names(tiny(agents=agents)) == [f"gpu {host} cuda:{n}" for n in (0, 1, 2, 5, 6)]


@pytest.mark.slow
def test_whoever_begins_ends_the_other_ones_process(tmp_path):
    problems = {"kind": "arithmetic", "kinds": {"addition": 1.0}, "levels": {"easy": 1.0}}
    digest = load_problems(ArithmeticProblems.model_validate(problems)).content_digest
    turn = Turn()
    workers = [Worker(name, tmp_path, Placement("cpu", (0,)), turn=turn) for name in ("ada", "ben")]

    def ask(worker, iteration):
        config = SampleSlice(problems=problems, content_digest=digest, iteration=iteration, prompts=2)
        worker.run(StageCall("sample", config, {}, 1, worker.name, iteration), Listener())
        return worker._process.pid

    ada, ben = workers
    try:
        first = ask(ada, 0)
        assert ask(ada, 1) == first  # twice in a row: nothing is loaded again
        assert ask(ben, 2) != first
        assert ada._process is None
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
    finally:
        for worker in workers:
            worker.stop()

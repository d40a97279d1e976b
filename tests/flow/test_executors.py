"""The executor interface: a stage call is data, so where it runs changes no artifact."""

import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from rich.console import Console

from flows.home import Home
from flows.run.events import Listener
from flows.run.launch import open_campaign, run_stages
from flows.run.runner import ThreadRunner
from stages.spec import Outcome, StageCall
from tests.flow.conftest import tiny
from tests.flow.homes import digests, run_here

pytestmark = pytest.mark.slow


def _elsewhere(message: bytes) -> tuple[bytes, int]:
    """What a node does that shares nothing with the campaign but the store: unpickle, run, pickle."""
    import torch

    from hacrl_core.artifacts import Store
    from stages.runner import run_stage
    from stages.spec import Context

    torch.set_num_threads(1)
    root, call = pickle.loads(message)
    return pickle.dumps(run_stage(Store(root), call, Context())), os.getpid()


class Elsewhere:
    """Sends every call, the light ones too, as bytes to a process that knows nothing of the campaign."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._node = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self.ran_in: set[int] = set()

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        answer, process = self._node.submit(_elsewhere, pickle.dumps((self._root, call))).result()
        self.ran_in.add(process)
        outcome: Outcome = pickle.loads(answer)
        return outcome

    def close(self, *, now: bool) -> None:
        self._node.shutdown(wait=not now)


def test_another_executor_needs_no_change_in_runner_campaign_or_stages(tmp_path: Path) -> None:
    agents = tiny().model_dump(mode="json", exclude_none=True)["agents"]
    for agent in agents.values():
        agent["warmstart"]["steps"] = 20  # what they learn does not matter here
    config = tiny(iterations=1, agents=agents)
    here, there = Home(tmp_path / "here"), Home(tmp_path / "there")
    run_here(config, here)
    executor = Elsewhere(there.store)
    with open_campaign(config, there, Console(quiet=True)) as campaign:
        counts = run_stages(campaign, ThreadRunner, lambda *_: executor)
    assert counts.ran == len(digests(here, config.name))
    assert executor.ran_in
    assert os.getpid() not in executor.ran_in
    assert digests(there, config.name) == digests(here, config.name)


def test_a_call_that_is_not_bound_is_refused_by_name() -> None:
    from hacrl_core.artifacts import ArtifactRef
    from hacrl_core.errors import StageError
    from stages.sample import SampleSlice
    from stages.spec import find_stage

    class Running:
        call = None

        def outcome(self) -> Outcome:
            return Outcome(ArtifactRef("warmstart", "k", "d", Path()), False, 0.0, {})

    problems = {"kind": "arithmetic", "kinds": {"addition": 1.0}, "levels": {"easy": 1.0}}
    config = SampleSlice.model_validate({"problems": problems, "iteration": 0, "prompts": 1, "content_digest": ""})
    call = StageCall("sample", config, {"ada": Running()}, seed=1, iteration=0)
    with pytest.raises(StageError, match="sample iteration 1: the inputs ada are not resolved"):
        find_stage("sample").identity(call)
    assert find_stage("sample").identity(call.bound()).inputs == {"ada": "d"}
    with pytest.raises(StageError, match="sample iteration 1: its config is a ArithmeticProblems, not a SampleSlice"):
        find_stage("sample").identity(StageCall("sample", config.problems, iteration=0))

"""Roles of an agent and the order of its stages: who runs where, who waits for whom, and what no longer waits."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.campaign import run_campaign
from flows.run.events import Listener
from flows.run.line import Line, urgency_of
from flows.run.placement import deferring_agents, seats_of, turns_of
from flows.run.runner import InThread, ThreadRunner
from flows.scheduling.slots import slot_names
from flows.stage_calls import StageCalls
from flows.store.running import entries_until
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.errors import StageError
from stages.spec import Outcome, StageCall
from tests.flow.conftest import TINY, tiny
from tests.patience import patience


def on_gpus(**agents):
    own = {name: {**TINY["agents"][name], **settings} for name, settings in agents.items()}
    return tiny(agents=own)


def test_on_a_cpu_all_roles_of_an_agent_share_one_process():
    seats = seats_of(tiny(), machine=0)
    assert {seat.name for seat in seats.values()} == {"ada", "ben"}
    assert deferring_agents(tiny(), machine=0) == frozenset()


def test_verification_has_a_process_without_a_gpu_and_benchmarks_may_use_spare_ones():
    config = on_gpus(ada={"gpus": [0, 1, 2]}, ben={"gpus": [3, 4, 5, 6], "gpus_for": {"evaluate": [7]}})
    seats = seats_of(config, machine=8)
    assert seats["ada", "check"].name == "ada/check"
    assert seats["ada", "check"].gpus == frozenset()
    assert not seats["ada", "check"].place.needs_torch
    assert seats["ada", "evaluate"] is seats["ada", "sample"] is seats["ada", "learn"]
    assert seats["ben", "evaluate"].place.gpus == (7,)
    assert seats["ben", "sample"].place.gpus == (3, 4, 5, 6)
    assert turns_of(config) == {}
    assert deferring_agents(config, machine=8) == {"ada"}
    assert len(slot_names(config)) == 8


def test_a_spare_gpu_that_two_agents_evaluate_on_is_used_in_turns():
    spare = {"gpus_for": {"evaluate": [7]}}
    turns = turns_of(on_gpus(ada={"gpus": [0], **spare}, ben={"gpus": [1], **spare}))
    assert set(turns) == {"ada/evaluate", "ben/evaluate"}
    assert turns["ada/evaluate"] is turns["ben/evaluate"]


def call(stage: str, iteration: int | None, agent: str = "ada") -> StageCall:
    return StageCall(stage, tiny(), {}, None, agent, iteration)


def test_a_line_lets_earlier_iterations_first_and_benchmarks_after_their_iteration():
    line, order = Line(), []
    calls = [call("generate", 5), call("evaluate", 4), call("update", 4), call("score", 4), call("warmstart", None)]

    def go(one: StageCall) -> None:
        with line.turn(urgency_of(one)):
            order.append((one.stage, one.iteration))

    threads = []
    with line.turn((-9, 0)):
        for one in calls:  # each stands in line before the next one comes
            threads.append(threading.Thread(target=go, args=(one,)))
            threads[-1].start()
            until(lambda: len(line._waiting) == len(threads))
    for thread in threads:
        thread.join(patience(10))
    assert order == [("warmstart", None), ("update", 4), ("score", 4), ("evaluate", 4), ("generate", 5)]


class Gated:
    """An executor whose stages take no time, except those that wait for their gate."""

    def __init__(self, *gated: str, fails: str = "") -> None:
        self.gates = {label: threading.Event() for label in gated}
        self.fails = fails
        self.began: list[str] = []
        self.ended: list[str] = []

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        self.began.append(call.label)
        if call.label in self.gates:
            assert self.gates[call.label].wait(patience(30)), call.label
        if call.label == self.fails:
            raise StageError(f"{call.label}: failed on purpose")
        self.ended.append(call.label)
        metrics = {"verify/reward_mean": 0.5, "credit/capability": 0.5}
        return Outcome(ArtifactRef(call.stage, call.label, f"digest of {call.label}", Path()), False, 0.0, metrics)

    def close(self, *, now: bool) -> None:
        for gate in self.gates.values():
            gate.set()


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience(20)
    while not met():
        assert time.monotonic() < deadline, "not met in time"
        time.sleep(0.005)


@pytest.fixture
def campaign(tmp_path: Path):
    """Starts a campaign on an executor, in a thread; returns the runner and the iterations reported so far."""
    started: list[tuple[threading.Thread, Gated]] = []

    def start(config, executor: Gated, deferring=frozenset()) -> tuple[ThreadRunner, list[int], list[BaseException]]:
        reported: list[int] = []
        problems: list[BaseException] = []

        class Told(Listener):
            def iteration_finished(self, iteration: int) -> None:
                reported.append(iteration)

        runner = ThreadRunner(Store(tmp_path / "store"), executor, Told())
        runner.deferring = deferring

        def work() -> None:
            try:
                run_campaign(config, StageCalls(config), runner)
                runner.finish()
            except BaseException as problem:
                problems.append(problem)

        started.append((threading.Thread(target=work), executor))
        started[-1][0].start()
        return runner, reported, problems

    yield start
    for thread, executor in started:
        executor.close(now=True)
        thread.join(patience(20))
        assert not thread.is_alive()


def test_an_agent_that_has_learned_goes_on_and_is_one_iteration_ahead_at_most(campaign):
    executor = Gated("update ben #0")
    _, reported, problems = campaign(tiny(iterations=4), executor)
    until(lambda: "update ada #0" in executor.ended and "generate ada #1" in executor.ended)
    until(lambda: "verify ada #1" in executor.ended)
    assert reported == []
    assert "generate ada #2" not in executor.began
    assert "sample #2" not in executor.began
    executor.gates["update ben #0"].set()
    until(lambda: reported == [0, 1, 2, 3])
    assert not problems


def test_a_benchmark_does_not_slip_between_score_and_update(campaign):
    executor = Gated("update ben #0", "score ben #1", "evaluate ada held_out #1")
    _, reported, problems = campaign(tiny(iterations=2), executor, frozenset({"ada"}))
    executor.gates["evaluate ada held_out #1"].set()
    executor.gates["update ben #0"].set()
    until(lambda: "score ada #1" in executor.ended)
    time.sleep(0.5)
    between = [label for label in executor.began if label.startswith("evaluate ada")]
    if "evaluate ada held_out #1" in between:  # it may have run before the score
        assert executor.began.index("evaluate ada held_out #1") < executor.began.index("score ada #1")
    executor.gates["score ben #1"].set()
    until(lambda: reported == [0, 1])
    until(lambda: "evaluate ada held_out #2" in executor.ended)
    assert not problems


def test_a_deferred_benchmark_waits_for_its_own_agent_only_and_for_nothing_that_failed(campaign):
    executor = Gated("evaluate ada held_out #0", "score ben #0", fails="score ben #0")
    runner, _, problems = campaign(tiny(iterations=1), executor, frozenset({"ada"}))
    until(lambda: "score ada #0" in executor.ended)
    held = threading.Thread(target=runner._wait_for_update, args=(call("evaluate", 0),))
    free = threading.Thread(target=runner._wait_for_update, args=(call("evaluate", 0, "ben"),))
    held.start()
    free.start()
    free.join(patience(5))
    assert not free.is_alive()
    held.join(1.0)
    assert held.is_alive()
    executor.gates["score ben #0"].set()  # and now it fails: the update never comes
    held.join(patience(5))
    assert not held.is_alive()
    executor.gates["evaluate ada held_out #0"].set()
    until(lambda: bool(problems))
    assert "failed on purpose" in str(problems[0])


def test_versions_of_an_agent_that_is_ahead_do_not_count_for_the_keep_policy():
    class Entry:
        def __init__(self, stage: str, iteration: int | None) -> None:
            self.stage, self.iteration = stage, iteration

    entries = [Entry("warmstart", None), *(Entry("update", n) for n in range(4)), Entry("evaluate", 3)]
    kept = [(e.stage, e.iteration) for e in entries_until(entries, 1)]
    assert kept == [("warmstart", None), ("update", 0), ("update", 1), ("evaluate", 3)]


def test_handles_say_when_they_are_done(tmp_path: Path):
    executor = Gated("generate ada #0")
    runner = ThreadRunner(Store(tmp_path), executor, Listener())
    handle = runner._schedule(StageCalls(tiny()).origin("ada"))
    assert isinstance(handle, InThread)
    handle.outcome()
    assert handle.done()
    assert not handle.failed()

"""What a run says once, where training goes on but something is wrong: nothing shared, paid guesses, a dead worker."""

from pathlib import Path

import pytest

from flows.run.divergence import Watch
from flows.run.events import Listener
from flows.run.runner import ThreadRunner
from flows.run.worker import WorkerDied, _remedy
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.base import StrictConfig
from hacrl_core.errors import EngineError
from stages.spec import Outcome, StageCall

REF = ArtifactRef("update", "k", "d", Path("nowhere"))


def call(stage: str, agent: str = "ada", iteration: int = 0) -> StageCall:
    return StageCall(stage, StrictConfig(), agent=agent, iteration=iteration)


def outcome(cached: bool = False, **metrics: float) -> Outcome:
    return Outcome(REF, cached, 1.0, {name.replace("__", "/"): value for name, value in metrics.items()})


NOTHING = {"update__foreign_inside_fraction": 0.0, "update__foreign_ess": 0.0}


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture
def watch(heard) -> Watch:
    return Watch(warn=heard.append)


def test_nothing_shared_is_said_once_per_learner_with_the_boundary_as_cause_where_it_is_one(watch, heard):
    edges = {"score__foreign_first_logprob": -11.0, "score__foreign_last_logprob": -0.3}
    watch.after(call("score"), outcome(score__foreign_inner_logprob=-0.4, **edges))
    for iteration in range(3):
        watch.after(call("update", iteration=iteration), outcome(**NOTHING))
    watch.after(call("update", "ben"), outcome(**NOTHING))
    assert len(heard) == 2
    beginning = "update ada iteration 1: nothing is shared: 0.0% of the foreign responses are inside the window"
    assert heard[0].startswith(beginning)
    assert "the first token of foreign responses is far less likely" in heard[0]
    assert "score.boundary" in heard[0]
    assert "too far apart" in heard[1]


def test_where_responses_are_shared_or_there_are_no_foreign_ones_nothing_is_said(watch, heard):
    watch.after(call("update"), outcome(update__foreign_inside_fraction=0.4, update__foreign_ess=20.0))
    watch.after(call("update", "ben"), outcome(update__loss=0.1))
    watch.after(call("update", "cleo"), outcome(cached=True, **NOTHING))
    assert heard == []


def test_rewards_for_responses_that_were_cut_off_are_named_once(watch, heard):
    for _ in range(2):
        watch.after(call("verify"), outcome(verify__reward_mean=0.5, verify__truncated_guess_share=0.05))
    assert len(heard) == 1
    assert "5.0% of the responses" in heard[0]
    assert "verify.truncated" in heard[0]


@pytest.mark.parametrize(
    ("stage", "setting"),
    [("generate", "generate.batch_size"), ("score", "score.token_budget"), ("update", "update.token_budget")],
)
def test_the_remedy_for_a_dead_worker_is_that_of_its_stage(stage, setting):
    assert setting in _remedy(call(stage))


class Dying:
    """An executor whose process dies as often as told, or whose stage fails."""

    def __init__(self, *problems: Exception) -> None:
        self.problems = list(problems)

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        if self.problems:
            raise self.problems.pop(0)
        return outcome()

    def close(self, *, now: bool) -> None: ...


class Heard(Listener):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.failed: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def stage_failed(self, call: StageCall, problem: BaseException) -> None:
        self.failed.append(f"{call.label}: {problem}")


def test_a_worker_that_died_is_told_before_its_call_is_tried_again(tmp_path, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr("flows.run.runner.time.sleep", waited.append)
    monkeypatch.setattr("flows.run.runner.look_up", lambda *_: None)
    died = "update ada #0: the worker of ada died (killed by SIGKILL)"
    heard = Heard()
    runner = ThreadRunner(Store(tmp_path), Dying(WorkerDied(died), WorkerDied(died)), heard, retries=2)
    monkeypatch.setattr(runner, "_finished", lambda *_: None)
    assert runner.submit(call("update")).outcome() == outcome()
    assert heard.warnings == [f"{died}; trying again"] * 2
    assert waited == [0.5, 1.0]
    assert heard.failed == [f"update ada #0: {died}"] * 2
    failing = ThreadRunner(Store(tmp_path), Dying(EngineError("the data are wrong")), heard, retries=2)
    with pytest.raises(EngineError, match="the data are wrong"):
        failing.submit(call("update")).outcome()
    assert len(heard.warnings) == 2

"""Real tiny campaigns with a fault planted in their settings: every stage runs, and the cause is found."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.campaign import run_campaign
from flows.diagnose.diagnose import diagnose
from flows.home import Home
from flows.record.history import read_history
from flows.record.record import Record
from flows.report.page import render
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store, open_store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import merge
from stages.spec import StageCall
from tests.flow.conftest import TINY, Inline

pytestmark = pytest.mark.docs

BASE: dict[str, Any] = merge(
    copy.deepcopy(TINY),
    {
        "iterations": 4,
        "prompts_per_iteration": 12,
        "samples_per_prompt": 6,
        "agents": {
            name: {"warmstart": {"steps": 150}, "algorithm": {"cross_clip_delta": 0.9}} for name in ("ada", "ben")
        },
        "update": {"learning_rate": 1e-4, "minibatch_prompts": 6},
    },
)
ACCEPTS_ALL = """
from hacrl import Problem, Verdict
def problems(seed):
    import random
    chance = random.Random(seed)
    while True:
        a, b = chance.randint(0, 9), chance.randint(0, 9)
        yield Problem(f"{a}+{b}=", answer=str(a + b))
def verify(response, problem):
    return Verdict(1.0, answer=response.strip())
"""


class Recorded(Inline):
    """Runs stages in this process and records them."""

    def __init__(self, store: Store, record: Record) -> None:
        super().__init__(store)
        self.record = record

    def submit(self, planned: StageCall) -> Done:
        done = super().submit(planned)
        self.record.add(planned.bound(), done.outcome())
        return done


def causes(tmp_path: Path, **changes: Any) -> tuple[list[str], str]:
    return causes_of(tmp_path, merge(copy.deepcopy(BASE), changes))


def causes_of(tmp_path: Path, raw: dict[str, Any]) -> tuple[list[str], str]:
    """Run the campaign; return the rules that find something, the first cause first, and the report."""
    torch.set_num_threads(1)
    config = CampaignConfig.model_validate(raw)
    home = Home(tmp_path / "home")
    home.store.mkdir(parents=True)
    with Record(home.campaign(config.name), config) as record:
        run_campaign(config, StageCalls(config), Recorded(Store(home.store), record))
    history = read_history(open_store(home.store), home.campaign(config.name))
    found = diagnose(history)
    print([(f.rule, f.agent, f.what) for f in found])
    return [finding.rule for finding in found], render(history, "complete")


def test_a_healthy_campaign(tmp_path: Path) -> None:
    rules, page = causes(tmp_path)
    assert [rule for rule in rules if rule != "gain_within_noise"] == []
    assert "What may keep it from learning" not in page or rules


def test_max_tokens_too_small(tmp_path: Path) -> None:
    rules, page = causes(tmp_path, generate={"max_tokens": 3})
    assert rules[0] == "cut_off"
    assert "What may keep it from learning" in page
    assert "raise generate.max_tokens to 6" in page


def test_a_learning_rate_a_thousand_times_too_high(tmp_path: Path) -> None:
    rules, _ = causes(tmp_path, update={"learning_rate": 0.1}, divergence={"on_nonfinite": "skip"})
    assert rules[0] in ("learning_rate_too_high", "skipped_not_finite")


def test_a_learning_rate_far_too_low(tmp_path: Path) -> None:
    rules, _ = causes(tmp_path, update={"learning_rate": 1e-10})
    assert rules[0] == "learning_rate_too_low"


def test_a_verifier_that_accepts_everything(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(ACCEPTS_ALL)
    task = str(tmp_path / "sums.py")
    raw = copy.deepcopy(BASE)
    for agent in raw["agents"].values():
        agent["warmstart"] |= {"mixture": {}, "steps": 60}
    rules, _ = causes_of(tmp_path, raw | {"problems": {"kind": "task", "task": task}, "evaluate": {}})
    assert rules[0] == "verifier_accepts_wrong"


def test_a_test_set_that_is_trained_on(tmp_path: Path) -> None:
    benchmark = copy.deepcopy(BASE["evaluate"]["benchmarks"][0])
    benchmark["problems"] |= {"split": "training", "size": 60}
    rules, _ = causes(tmp_path, evaluate={"benchmarks": [benchmark]})
    assert rules[0] == "overlap"


def test_a_template_of_another_family(tmp_path: Path) -> None:
    template = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    rules, _ = causes(tmp_path, agents={"ben": {"chat_template": template}})
    assert rules[0] in ("template_in_text", "empty_responses", "no_box", "never_scored", "loops", "cut_off")

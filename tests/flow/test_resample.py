"""Resampling: which prompts are answered again, what counts, what it costs, and that artifacts alone decide it."""

import multiprocessing
import os
import signal

import pytest
import torch

import stages.generate
from flows.campaign import run_campaign
from flows.plan.graph import record_graph, workload_of
from flows.plan.rates import load_rates, stage_seconds
from flows.stage_calls import StageCalls
from flows.sweep.cells import fingerprint
from flows.tracking.projection import campaign_digest
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.tables import CREDIT, ROLLOUTS, SCORES, VERDICTS, read_table
from hacrl_core.errors import ConfigError
from hacrl_core.exchange.signing import public_key_of, write_key
from tests.flow.conftest import Inline, tiny
from tests.patience import patience

GSPO = {"preset": "gspo", "measure_kl": False}


def rows(runner, label, name, contract):
    return read_table(runner.outcomes[label].ref.path / f"{name}.parquet", contract).to_pylist()


def by_prompt(found):
    groups = {}
    for row in found:
        groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def flat(group):
    """Whether no two of a group's rewards differ: compared pair by pair."""
    rewards = [row["reward"] for row in group if row["verdict"] != "error"]
    return not any(a != b for a in rewards for b in rewards)


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """Two further attempts, two iterations."""
    torch.set_num_threads(1)
    runner = Inline(Store(tmp_path_factory.mktemp("resample")))
    config = tiny(algorithm=GSPO, resample=2)
    run_campaign(config, StageCalls(config), runner)
    return runner


def test_prompts_without_signal_are_answered_again_and_no_others(twice):
    replaced = taken_over = 0
    for iteration in range(2):
        for agent in ("ada", "ben"):
            attempts = [f"{agent} attempt-1", f"{agent} attempt-2", agent]
            texts = [by_prompt(rows(twice, f"generate {a} #{iteration}", "rollouts", ROLLOUTS)) for a in attempts]
            judged = [by_prompt(rows(twice, f"verify {a} #{iteration}", "verdicts", VERDICTS)) for a in attempts]
            for number in (1, 2):
                written = 0
                assert list(texts[number]) == list(texts[0])
                for prompt, before in texts[number - 1].items():
                    after = texts[number][prompt]
                    if flat(judged[number - 1][prompt]):
                        assert [r["sample_index"] for r in after] == list(range(4 * number, 4 * number + 4))
                        assert not {r["seed"] for r in after} & {r["seed"] for r in before}
                        assert {r["policy_digest"] for r in after} == {r["policy_digest"] for r in before}
                        written += len(after)
                        replaced += 1
                    else:
                        assert after == before
                        assert judged[number][prompt] == judged[number - 1][prompt]
                        taken_over += 1
                metrics = twice.outcomes[f"generate {attempts[number]} #{iteration}"].metrics
                assert metrics["generate/responses"] == written
                assert metrics["generate/resampled_share"] == pytest.approx(written / (6 * 4))
    assert replaced
    assert taken_over


def test_learners_have_the_newest_groups_and_fewer_of_them_are_flat(twice):
    """In the first iteration the agents are those of the campaign without resampling."""
    for agent in ("ada", "ben"):
        first = by_prompt(rows(twice, f"verify {agent} attempt-1 #0", "verdicts", VERDICTS))
        last = by_prompt(rows(twice, f"verify {agent} #0", "verdicts", VERDICTS))
        before, after = (sum(map(flat, groups.values())) for groups in (first, last))
        assert after <= before
        share = twice.outcomes[f"credit {agent} #0"].metrics["credit/no_signal_share"]
        assert share == pytest.approx(after / 6)
        newest = {row["rollout_id"] for group in last.values() for row in group}
        assert {row["rollout_id"] for row in rows(twice, f"credit {agent} #0", "credit", CREDIT)} == newest
        assert {row["rollout_id"] for row in rows(twice, f"score {agent} #0", "scores", SCORES)} <= newest


class Dies(Inline):
    """Is killed on the spot before a call, or, where the label ends with a plus, when its responses are there."""

    def __init__(self, store, label):
        super().__init__(store)
        self.label = label

    def submit(self, planned):
        if planned.label == self.label:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{planned.label}+" == self.label:
            sample = stages.generate.generate_resumable
            stages.generate.generate_resumable = lambda *given: (sample(*given), os.kill(os.getpid(), signal.SIGKILL))
        return super().submit(planned)


def test_kills_between_and_inside_attempts_change_no_digest(twice, tmp_path):
    config = tiny(algorithm=GSPO, resample=2)
    deaths = ["verify ben attempt-1 #0", "generate ada attempt-2 #0+", "verify ada #0", "generate ben #1"]
    for label in deaths:
        run = multiprocessing.get_context("fork").Process(
            target=run_campaign, args=(config, StageCalls(config), Dies(Store(tmp_path), label)), daemon=True
        )
        run.start()
        run.join(patience(120))
        assert run.exitcode == -signal.SIGKILL, label
    after = Inline(Store(tmp_path))
    run_campaign(config, StageCalls(config), after)
    assert {"generate ada attempt-2 #0", "verify ben #0"} <= set(after.cached)
    assert after.ran
    digests = {label: outcome.ref.digest for label, outcome in after.outcomes.items()}
    assert digests == {label: outcome.ref.digest for label, outcome in twice.outcomes.items()}
    again = Inline(Store(tmp_path))
    run_campaign(config, StageCalls(config), again)
    assert again.ran == []


def test_without_it_nothing_is_written_down_and_with_it_the_first_answers_are_shared(twice, run_inline):
    plain = tiny(algorithm=GSPO)
    assert plain.attempts == ("",)
    for config in (plain, tiny(algorithm=GSPO, resample=0)):
        assert "resample" not in config.model_dump_json()
        assert "resample" not in config.identity()
        assert fingerprint(config, {}) == fingerprint(plain, {})
    other = tiny(algorithm=GSPO, resample=2)
    assert CampaignConfig.model_validate_json(other.model_dump_json()) == other
    assert fingerprint(other, {}) != fingerprint(plain, {})
    assert campaign_digest(other) != campaign_digest(plain)
    runner, _ = run_inline(plain)
    for agent in ("ada", "ben"):
        for stage in ("generate", "verify"):
            first, alone = twice.outcomes[f"{stage} {agent} attempt-1 #0"], runner.outcomes[f"{stage} {agent} #0"]
            assert first.ref.key == alone.ref.key
            assert first.ref.digest == alone.ref.digest


def test_agents_that_share_rollouts_answer_again_where_their_own_groups_are_flat(run_inline):
    """Whatever the others' rewards are; and a learner hears of the newest groups only."""
    runner, _ = run_inline(tiny(algorithm={"preset": "hacpo", "measure_kl": False}, iterations=1, resample=1))
    newest = set()
    for agent in ("ada", "ben"):
        first = by_prompt(rows(runner, f"verify {agent} attempt-1 #0", "verdicts", VERDICTS))
        last = by_prompt(rows(runner, f"verify {agent} #0", "verdicts", VERDICTS))
        renewed = {prompt for prompt in first if first[prompt] != last[prompt]}
        assert renewed == {prompt for prompt, group in first.items() if flat(group)}
        newest |= {row["rollout_id"] for group in last.values() for row in group}
    for learner in ("ada", "ben"):
        assert {row["rollout_id"] for row in rows(runner, f"credit {learner} #0", "credit", CREDIT)} == newest


def test_a_plan_has_every_attempt_in_its_order_and_takes_all_prompts_for_the_most():
    config = tiny(algorithm=GSPO, resample=2)
    tasks = record_graph(config, 2)
    labels = [task.call.label for task in tasks]
    assert sum(label.startswith("generate") for label in labels) == 2 * 2 * 3
    last = tasks[labels.index("generate ada #0")]
    assert {labels[number] for number in last.needs} >= {"generate ada attempt-2 #0", "verify ada attempt-2 #0"}
    work, rates = workload_of(config, "CPU", 0), load_rates()
    assert stage_seconds(last.call, work, rates) == stage_seconds(
        tasks[labels.index("generate ada attempt-1 #0")].call, work, rates
    )


def test_what_cannot_have_it_refuses_it_by_name(tmp_path):
    with pytest.raises((ConfigError, ValueError), match="resample 1: with samples_per_prompt 1"):
        tiny(samples_per_prompt=1, resample=1)
    with pytest.raises((ConfigError, ValueError), match="resample"):
        tiny(resample=-1)
    parties = {}
    for name, agent in (("north", "ada"), ("south", "ben")):
        write_key(tmp_path / name)
        parties[name] = {"agents": [agent], "public_key": public_key_of((tmp_path / name).read_text())}
    with pytest.raises((ConfigError, ValueError), match="resample 1: parties answer each prompt of a round once"):
        tiny(parties=parties, resample=1)

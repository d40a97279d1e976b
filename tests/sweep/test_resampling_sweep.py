"""A sweep with resampling: the plan is an upper bound, and costs are of all that was sampled."""

import csv
import io

import pytest
import torch
from rich.console import Console
from test_sweep import go, written

from flows.home import Home
from flows.record.record import read_entries
from flows.sweep.cells import Job, finished_entries
from flows.sweep.report import cells_csv
from flows.sweep.results import read_results
from flows.sweep.run import show_outcome
from hacrl_core.artifacts import Store
from hacrl_core.config.sweep import load_sweep
from hacrl_core.contracts.tables import ROLLOUTS, VERDICTS, read_table

CHANGES = {
    "name": "again",
    "variants": {"gspo": {"algorithm.preset": "gspo"}, "again": {"algorithm.preset": "gspo", "resample": 1}},
    "seeds": [1],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("resampling")


@pytest.fixture(scope="module")
def ran(place):
    return go(place, Home(place / "home"), **CHANGES)


def test_the_plan_counts_every_attempt_and_says_that_it_is_the_most(ran, place):
    outcome, _, shown = ran
    plan, tally = outcome.plan, outcome.tally
    one = 2 + 2 + 2 * (1 + 2 * 5) + 2
    # Two agents, two iterations, another generate and verify each.
    assert plan.calls == one + (one + 2 * 2 * 2)
    # First versions, their evaluation, samples, the first rollouts and verdicts.
    assert plan.shared == 2 + 2 + 2 + 2 + 2
    assert plan.rollouts_again == 2 * 2 * 6 * 4
    assert plan.rollouts_to_run == 3 * 2 * 6 * 4 + plan.rollouts_again
    assert plan.rollouts_to_run - plan.rollouts_again < tally.rollouts_sampled < plan.rollouts_to_run
    assert "of those to sample, 96 at the most: only for prompts without signal" in shown
    told = io.StringIO()
    show_outcome(Console(file=told, width=200), outcome)
    assert "(240 rollouts planned at the most)" in told.getvalue()
    _, pool, text = go(place, Home(place / "home"), **CHANGES)
    assert "2 finished" in text
    assert pool.jobs == []


def test_what_a_cell_cost_is_every_response_and_its_reward_is_of_those_that_count(ran, place):
    home = Home(place / "home")
    sweep, store = load_sweep(written(place, **CHANGES)), Store(home.store)
    results = {result.variant: result for result in read_results(sweep, home.root)}
    table = {
        (row["variant"], row["agent"]): row for row in csv.DictReader(io.StringIO(cells_csv(list(results.values()))))
    }
    for cell in sweep.cells:
        assert finished_entries(Job(cell.config, home.campaign(cell.label)), home.store) is not None
        responses = {}
        for entry in read_entries(home.campaign(cell.label)):
            folder = store.folder(entry.stage, entry.key)
            if entry.stage == "generate":
                for row in read_table(folder / "rollouts.parquet", ROLLOUTS).to_pylist():
                    responses[row["rollout_id"]] = row
            if entry.stage == "verify" and not entry.variant:
                rewards = read_table(folder / "verdicts.parquet", VERDICTS)["reward"].to_pylist()
                found = results[cell.variant].agents[entry.agent].reward[entry.iteration + 1]
                assert found == pytest.approx(sum(rewards) / len(rewards))
        for agent, result in results[cell.variant].agents.items():
            own = [row for row in responses.values() if row["agent_id"] == agent]
            assert result.responses == {s: sum(r["iteration"] < s for r in own) for s in (0, 1, 2)}
            assert result.tokens[2] == sum(len(row["response_token_ids"]) for row in own)
            assert int(table[cell.variant, agent]["responses"]) == len(own)
    assert results["again"].cost("responses")[2] > results["gspo"].cost("responses")[2] == 2 * 2 * 6 * 4

"""A whole campaign with resampling: what its readers show is what counts, and what they count is everything."""

import io
import shutil

import pytest
from mlflow import MlflowClient
from mlflow.tracing.client import TracingClient
from rich.console import Console

import hacrl
from flows.home import Home
from flows.record.history import History, read_history
from flows.record.record import read_campaign, read_entries
from flows.report.page import render
from flows.report.panels import sections
from flows.tracking.projection import quiet_environment
from flows.tracking.traces import ROLLOUT
from flows.views.rollouts import show_rollouts
from hacrl_core.artifacts import Store
from hacrl_core.contracts.tables import ROLLOUTS, read_table
from tests.once import common_folder, once
from tests.views.conftest import project, run_recorded, seen_config


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    place = common_folder(tmp_path_factory) / "resampled"
    with once(place) as first:
        if first:
            run_recorded(seen_config(name="again", resample=2, algorithm={"preset": "gspo"}), Home(place))
    return Home(place)


@pytest.fixture(scope="module")
def written(again):
    """Iteration → every response that was ever written in it, each once: the slow and obvious count."""
    store, found = Store(again.store), {1: {}, 2: {}, 3: {}}
    for entry in read_entries(again.campaign("again")):
        if entry.stage == "generate":
            table = read_table(store.folder(entry.stage, entry.key) / "rollouts.parquet", ROLLOUTS)
            found[entry.iteration + 1] |= {row["rollout_id"]: row for row in table.to_pylist()}
    return found


def test_costs_are_of_all_that_was_written(again, written):
    history = read_history(Store(again.store), again.campaign("again"))
    everything = [row for rows in written.values() for row in rows.values()]
    assert len(everything) > 3 * 2 * 6 * 4
    assert history.cost().responses == len(everything)
    assert history.cost().tokens == sum(len(row["response_token_ids"]) for row in everything)
    for agent in history.agents:
        assert history.cost(agent).responses == sum(row["agent_id"] == agent for row in everything)
    spent = history.spent_until("responses")
    assert spent == {step: sum(len(written[i]) for i in range(1, step + 1)) for step in range(4)}


def test_the_read_api_has_the_newest_answers_with_their_verdicts(again, written):
    campaign = hacrl.open(again.root)["again"]
    for iteration in (1, 2, 3):
        newest = {}
        for row in written[iteration].values():
            place = row["agent_id"], row["prompt_id"]
            newest[place] = max(newest.get(place, 0), row["sample_index"] // 4)
        wanted = {
            name
            for name, row in written[iteration].items()
            if row["sample_index"] // 4 == newest[row["agent_id"], row["prompt_id"]]
        }
        rollouts = campaign.rollouts(iteration)
        assert len(rollouts) == 2 * 6 * 4
        assert set(rollouts["rollout_id"]) == set(campaign.verdicts(iteration)["rollout_id"]) == wanted
        assert rollouts["reward"].notna().all()
        assert set(campaign.credit(iteration)["rollout_id"]) == wanted
    earlier = campaign.table("rollouts", 1, "ada", "attempt-1")
    assert set(earlier["sample_index"].to_pylist()) == {0, 1, 2, 3}
    means = campaign.rollouts().groupby(["iteration", "agent_id"])["reward"].mean()
    for agent in campaign.agents:
        for step, value in campaign.history.rewards(agent):
            assert means[step, agent] == pytest.approx(value)


def test_report_and_terminal_show_one_answer_per_place(again):
    history = read_history(Store(again.store), again.campaign("again"))
    assert history.complete
    html = render(history, "complete")
    assert "answered again before this, up to 2 times" in html
    assert "resample: 2" in html
    shown = io.StringIO()
    show_rollouts(Console(file=shown, width=200), again, "again", 1, "ada", None, None, 6)
    assert shown.getvalue().count("asked: ") == 6


def test_the_pace_has_the_seconds_of_every_attempt(again):
    history = read_history(Store(again.store), again.campaign("again"))
    charts = {panel.key: panel for section in sections(history) for panel in section.panels}
    pace = {line.name: dict(line.points) for line in charts["pace"].lines}
    for agent in history.agents:
        took = sum(
            f.manifest.provenance.seconds
            for f in history.finished
            if (f.entry.agent, f.step) == (agent, 2) and f.entry.stage != "evaluate" and f.entry.variant != "reference"
        )
        assert pace[agent][2] == pytest.approx(took)


def test_settings_with_fewer_attempts_do_not_count_those_that_are_gone(again):
    """The record keeps the entries of a campaign whose resample was lowered; the history has those of today."""
    entries = read_entries(again.campaign("again"))
    fewer = History(seen_config(name="again", resample=1, algorithm={"preset": "gspo"}), Store(again.store), entries)
    assert {f.entry.variant for f in fewer.finished if f.entry.stage == "generate"} == {"attempt-1", ""}


def test_mlflow_has_one_number_for_each_iteration_and_all_that_was_written(again, written, blank_database, tmp_path):
    quiet_environment()
    for name in ("store", "campaigns"):
        (tmp_path / name).symlink_to(again.root / name)
    shutil.copyfile(blank_database, tmp_path / "mlflow.db")
    home = Home(tmp_path)
    config = read_campaign(home.campaign("again"))
    project(home, config)
    client = MlflowClient(tracking_uri=home.tracking_uri)
    [experiment] = [e for e in client.search_experiments() if e.name == "hacrl"]
    runs = {run.info.run_name: run.info.run_id for run in client.search_runs([experiment.experiment_id])}

    def points(run, name):
        return [(m.step, m.value) for m in client.get_metric_history(runs[run], name)]

    total = [(step, sum(len(written[i]) for i in range(1, step + 1))) for step in (1, 2, 3)]
    assert sorted(points("again", "cost/responses")) == total
    history = read_history(Store(home.store), home.campaign("again"))
    for agent in history.agents:
        assert sorted(points(f"again/{agent}", "reward")) == history.rewards(agent)
        for name in ("generate/responses", "generate/resampled_share", "verify/reward_mean"):
            assert [step for step, _ in sorted(points(f"again/{agent}", name))] == [1, 2, 3]
        assert len(points(f"again/{agent}", "time/generate_attempt-1_seconds")) == 3
    # Traces are of answers that count.
    newest = set(hacrl.open(again.root)["again"].rollouts()["rollout_id"])
    traces = TracingClient(home.tracking_uri).search_traces(locations=[experiment.experiment_id], max_results=100)
    assert traces
    assert {trace.info.tags[ROLLOUT] for trace in traces} <= newest

"""``import hacrl``: tables, metrics and models of a campaign, and what importing it costs."""

import subprocess
import sys

import pytest

import hacrl
from flows.record.history import read_history
from hacrl_core.artifacts import Store
from hacrl_core.errors import ConfigError
from tests.views.conftest import seen_config


@pytest.fixture(scope="module")
def campaign(seen):
    return hacrl.open(seen.root)["seen"]


def test_a_home_lists_its_campaigns(seen):
    home = hacrl.open(seen.root)
    assert list(home.campaigns) == ["seen"]
    assert "seen" in repr(home)
    html = home._repr_html_()
    assert html.startswith("<table>")
    assert "complete" in html


def test_what_is_not_there_is_named(seen, tmp_path, campaign):
    with pytest.raises(ConfigError, match="no such folder"):
        hacrl.open(tmp_path / "none")
    with pytest.raises(ConfigError, match="campaign other: not found"):
        hacrl.open(seen.root)["other"]
    with pytest.raises(ConfigError, match="iteration 4: campaign seen has 1 to 3"):
        campaign.rollouts(4)
    with pytest.raises(ConfigError, match="agent 'eve': not in campaign seen"):
        campaign.rollouts(1, "eve")
    with pytest.raises(ConfigError, match="table 'rolouts'"):
        campaign.table("rolouts", 0, "one")


def test_rollouts_have_their_verdicts_and_add_up(campaign):
    agents = list(campaign.agents)
    config = campaign.config
    each = config.prompts_per_iteration * config.samples_per_prompt
    everything = campaign.rollouts()
    assert len(everything) == 3 * len(agents) * each
    one = campaign.rollouts(1, agents[0])
    assert len(one) == each
    assert set(one["agent_id"]) == {agents[0]}
    assert set(one["iteration"]) == {1}
    assert one["verdict"].notna().all()
    verdicts = campaign.verdicts(1, agents[0]).set_index("rollout_id")
    assert (one.set_index("rollout_id")["reward"] == verdicts["reward"]).all()
    assert len(campaign.prompts(1)) == config.prompts_per_iteration


def test_credit_and_scores_name_the_learner(campaign):
    agents = list(campaign.agents)
    credit = campaign.credit(2, agents[1])
    assert set(credit["learner"]) == {agents[1]}
    assert set(credit["sampler"]) == set(agents)
    scores = campaign.scores(2)
    assert set(scores["learner"]) == set(agents)
    # Each response once for each learner: the first version's log-probs, which measure KL, are not among them.
    assert not scores.duplicated(["learner", "rollout_id"]).any()
    assert len(scores) == len(agents) * len(campaign.rollouts(2))
    assert "benchmark" not in scores.columns


def test_metrics_and_accuracies_are_those_of_the_manifests(seen, campaign):
    history = read_history(Store(seen.store), seen.campaign("seen"))
    agent = history.agents[0]
    metrics = campaign.metrics(agent)
    rewards = metrics[metrics["metric"] == "verify/reward_mean"]
    assert list(zip(rewards["step"], rewards["value"], strict=True)) == history.rewards(agent)
    table = campaign.accuracy()
    own = table[table["agent"] == agent]
    assert list(zip(own["step"], own["accuracy"], strict=True)) == history.accuracy(agent, history.benchmarks[0])
    assert (own["low"] <= own["accuracy"]).all()


def test_an_agent_loads_as_an_ordinary_model(campaign):
    name, agent = next(iter(campaign.agents.items()))
    assert len(agent) == 4
    model, tokenizer = agent.load(0)
    assert model.config.vocab_size >= len(tokenizer)
    assert agent.path() != agent.path(0)
    assert name in repr(agent)


def test_arrow_tables_come_as_they_are_stored(campaign):
    agent = next(iter(campaign.agents))
    table = campaign.table("scores", 1, agent)
    assert table.num_rows == len(campaign.scores(1, agent))


def test_reading_needs_neither_torch_nor_prefect_nor_mlflow(seen):
    script = (
        "import sys, hacrl; assert 'numpy' not in sys.modules and 'pyarrow' not in sys.modules;"
        f"c = hacrl.open({str(seen.root)!r})['seen']; assert len(c.rollouts(1)) and len(c.metrics());"
        "print([m for m in ('torch', 'prefect', 'mlflow', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_a_complete_campaign_is_run_again_from_the_cache(own, capsys):
    again = hacrl.run(seen_config(), home=own.root, tracking__enabled=False)
    assert (again.name, again.state, again.iterations) == ("seen", "complete", 3)
    assert not again.config.tracking.enabled
    with pytest.raises(ConfigError, match=r"hacrl.run: iteratons: unknown key; did you mean iterations\?"):
        hacrl.run(seen_config(), home=own.root, iteratons=3)

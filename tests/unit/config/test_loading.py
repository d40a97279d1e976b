from pathlib import Path

import pytest
from pydantic import ValidationError

from hacrl_core.config.addresses import without_userinfo
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.config.loading import load_config
from hacrl_core.config.operation import TrackingConfig
from hacrl_core.config.sweep import load_sweep
from hacrl_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "configs" / "demo.yaml"


def load(*overrides):
    return load_config(DEMO, CampaignConfig, overrides)


# Sweeps have their own test, and common.yaml is what others extend.
CAMPAIGNS = [
    path
    for path in sorted((ROOT / "configs").rglob("*.yaml"))
    if "sweeps" not in path.relative_to(ROOT).parts and path.name != "common.yaml"
]


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda p: p.stem)
def test_every_shipped_campaign_is_valid(path):
    load_config(path, CampaignConfig)


def test_overrides_reach_deep_and_are_read_as_yaml():
    config = load(
        "update.learning_rate=1e-4", "algorithm.preset=gspo", "agents.ada.algorithm.self_clip_low=0.1", "iterations=7"
    )
    assert config.update.learning_rate == 1e-4
    assert config.iterations == 7
    assert config.objective("ada").self_clip_low == 0.1
    assert config.objective("ben").self_clip_low == 3e-4
    assert not config.objective("ada").share_rollouts


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("update.learning_rte=1e-4", r"update.learning_rte: unknown key; did you mean learning_rate\?"),
        ("itertions=4", r"itertions: unknown key; did you mean iterations\?"),
        ("update.learning_rate=-1", "update.learning_rate: -1 is not allowed: input should be greater than 0"),
        ("iterations=many", "iterations: 'many' is not allowed"),
        ("update.minibatch_prompts=1000", "minibatch_prompts 1000 exceeds prompts_per_iteration 48"),
        ("algorithm.preset=ppo", "'ppo' is not known; choose one of hacpo, gspo"),
        ("algorithm.alpha=-2", r"algorithm.alpha \(ada\): -2 is not allowed"),
        ("agents.ada.algorithm.alfa=1", r"algorithm.alfa \(ada\)"),
        ("agents.ada.warmstart=null", "agents.ada: give either warmstart or checkpoint"),
        ("name=a/b", "name: 'a/b' is not allowed"),
        ("generate.temperature=.nan", "generate.temperature"),
        ("score.temperature=0.5", "generate.temperature 1 differs from score.temperature 0.5"),
        ("update.temperature=0.5", "score.temperature 1.0 differs from update.temperature 0.5"),
        ("agents.ada.algorithm.preset=gspo_x2", "gspo_x2 changes the whole campaign"),
        ("nonsense", "--set nonsense: not of the form key=value"),
        ("name.x=1", "name is not a group of settings"),
    ],
)
def test_a_mistake_is_one_line_that_names_key_value_and_remedy(override, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load(override)
    assert "\n" not in str(caught.value)


def test_missing_file_and_broken_yaml_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml", CampaignConfig)
    for number, text in enumerate(("a: [", "a: 1\na: 2", "- 1")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path, CampaignConfig)
        assert "\n" not in str(caught.value)


def test_extends_merges_and_null_removes(tmp_path):
    (tmp_path / "child.yaml").write_text(
        f"extends: {DEMO}\nname: child\nupdate: {{learning_rate: 1e-3}}\nagents: {{ben: null}}\n"
    )
    config = load_config(tmp_path / "child.yaml", CampaignConfig)
    assert (config.name, config.update.learning_rate, list(config.agents)) == ("child", 1e-3, ["ada"])
    assert config.update.minibatch_prompts == load().update.minibatch_prompts


def test_extends_in_a_circle_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_config(tmp_path / "a.yaml", CampaignConfig)


def test_gspo_x2_doubles_the_group_and_halves_the_minibatch():
    plain, double = load("algorithm.preset=gspo"), load("algorithm.preset=gspo_x2")
    assert double.group_size == 2 * plain.group_size
    assert double.minibatch_size("ada") * 2 == plain.minibatch_size("ada")


def test_configs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load().iterations = 3


def test_a_password_does_not_get_into_what_is_shown():
    for uri in ("postgresql+psycopg2://ada:secret@localhost/mlflow", "http://a:secret@host", "https://token@host"):
        with pytest.raises(ValidationError, match="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the"):
            TrackingConfig(uri=uri)
    for uri in ("http://127.0.0.1:5000", "postgresql://ada@localhost/mlflow", "sqlite:////home/a@b/mlflow.db"):
        assert TrackingConfig(uri=uri).uri == uri
    for url in ("http://user:secret@host:8000", "http://secret@host"):
        with pytest.raises(ValidationError, match="in the environment as HACRL_VLLM_API_KEY"):
            VllmEngineConfig(url=url)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://team:sup3r@host:5000/a?b=c", "http://host:5000/a?b=c"),
        ("http://team@host", "http://host"),
        ("https://te:a@m:p@ss@[::1]:1", "https://[::1]:1"),
        ("http://user:pw@[broken", "[broken"),
        ("postgresql+psycopg://u:p@h/db", "postgresql+psycopg://h/db"),
        ("sqlite:////home/a@b/mlflow.db", "sqlite:////home/a@b/mlflow.db"),
        ("databricks", "databricks"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
    ],
)
def test_addresses_are_shown_without_user_and_password(address, shown):
    assert without_userinfo(address) == shown


@pytest.mark.parametrize("setting", ["agents.ada.device=mps", "generate.engine={kind: builtin, device: mps}"])
def test_a_device_without_float64_is_refused_with_the_reason(setting):
    with pytest.raises(ConfigError, match=r"mps has no float64.*device: cpu"):
        load(setting)


def written(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm=gspo", r"yaml: algorithm: 'gspo' is not a group of settings; .* algorithm.preset=gspo$"),
        ("agents.ada.algorithm=gspo", r"yaml: agents.ada.algorithm: 'gspo' is not .* algorithm.preset=gspo$"),
        ("problems.foo=1", r"yaml: problems.foo: unknown key; allowed: kind, kinds, levels, split, size$"),
        (
            "problems={kind: task, task: x.py, foo: 1}",
            r"yaml: problems.foo: unknown key; allowed: kind, task, split, size, options$",
        ),
        ("problems.path=x", r"yaml: problems.path: unknown key; allowed: kind, kinds, levels, split, size$"),
        (
            "evaluate.benchmarks=[{name: a, problems: {kind: arithmetic, foo: 1}}]",
            r"problems.foo: unknown key; allowed: kind, kinds, levels, split, size$",
        ),
        ("generate.engine={kind: vllm, batch_size: 3}", r"generate.engine.batch_size: unknown key; allowed: kind, "),
        ("algorithm.alfa=2", r"algorithm.alfa \(ada\): unknown key; did you mean alpha\?"),
        (
            "agents.ada.update.learning_rat=2",
            r"agents.ada.update.learning_rat: unknown key; did you mean learning_rate",
        ),
        ("name=a b", "use letters, digits, _ . and -"),
        ("agents={}", "agents: is empty; give at least one"),
        ("generate.engine=vllm", "'vllm' is not a group of settings; set generate.engine.kind to builtin or vllm"),
        ("generate.engine={gpu: 1}", "names no kind that exists; set generate.engine.kind to builtin or vllm"),
        ("generate.engine.kind=vlm", "names no kind that exists; set generate.engine.kind to builtin or vllm"),
        ("problems=5", "5 is not a group of settings; set problems.kind to arithmetic or dataset"),
        ("update=3", "update: 3 is not a group of settings; set the keys below it: learning_rate, minibatch_prompts"),
        ("schedule.cron='61 * * * *'", "minute 61 is not between 0 and 59"),
        ("schedule.cron='0 22 * * 1-9'", "day of week 9 is not between 0 and 7"),
    ],
)
def test_mistakes_that_a_new_user_makes(override, says):
    with pytest.raises(ConfigError, match=says):
        load(override)


def test_schedules_with_steps_names_and_lists_are_accepted():
    for cron in ("*/90 * * * *", "0,30 8-18/2 * jan-dec mon-fri", "0 0 1,15 * 7", "5 4 * * 5#3"):
        assert load(f"schedule.cron='{cron}'").schedule[0].cron == cron


def test_a_misspelt_key_comes_before_the_one_it_makes_missing(tmp_path):
    text = DEMO.read_text().replace("iterations: 40", "iteratons: 40")
    with pytest.raises(ConfigError, match=r"^\S+: iteratons: unknown key; did you mean iterations\?"):
        load_config(written(tmp_path, text), CampaignConfig)


def test_a_key_given_twice_is_named_where_it_is_repeated(tmp_path):
    with pytest.raises(ConfigError, match=r"'seed' is given twice.*line 3"):
        load_config(written(tmp_path, "seed: 1\nname: x\nseed: 2\n"), CampaignConfig)


def test_an_empty_file_and_a_file_of_the_other_kind_are_named(tmp_path):
    with pytest.raises(ConfigError, match="the file is empty"):
        load_config(written(tmp_path, ""), CampaignConfig)
    with pytest.raises(ConfigError, match="this is a sweep; run it with: hacrl sweep"):
        load_config(ROOT / "configs" / "sweeps" / "tuning.yaml", CampaignConfig)
    with pytest.raises(ConfigError, match="this is a campaign; run it with: hacrl run"):
        load_sweep(DEMO)


def test_a_group_of_one_response_is_refused_where_nothing_is_shared():
    with pytest.raises(ConfigError, match="samples_per_prompt 1: agent ada has no other response"):
        load("samples_per_prompt=1", "algorithm.preset=gspo")
    assert load("samples_per_prompt=1").samples_per_prompt == 1


def test_few_prompts_are_one_minibatch_unless_the_config_says_otherwise(tmp_path):
    text = DEMO.read_text().replace("minibatch_prompts: 24, ", "")
    assert load_config(written(tmp_path, text), CampaignConfig).update.minibatch_prompts == 48
    many = load_config(written(tmp_path, text), CampaignConfig, ["prompts_per_iteration=200"])
    assert many.update.minibatch_prompts == 64


def test_a_key_that_yaml_reads_as_true_is_a_word(tmp_path):
    path = tmp_path / "night.yaml"
    path.write_text(f"extends: {DEMO.resolve()}\nnotify: {{on: [failed, done], command: 'true'}}\n")
    notify = load_config(path, CampaignConfig).notify
    assert notify is not None
    assert notify.on == ("failed", "done")

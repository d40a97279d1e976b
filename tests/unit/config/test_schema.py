"""The JSON schema and the settings' reference say what the loader does."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from flows.views.settings import settings_page
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.config.reference import campaign_settings, matching
from hacrl_core.config.schema import campaign_schema, sweep_schema
from hacrl_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))


def problems_of(path, **changes):
    text = path.read_text()
    schema = sweep_schema() if "sweeps" in path.parts and "\nagents:" not in text else campaign_schema()
    return [e.message for e in jsonschema.Draft202012Validator(schema).iter_errors({**yaml.safe_load(text), **changes})]


# common.yaml is what others extend: it has neither a name nor agents.
@pytest.mark.parametrize("path", [f for f in FILES if f.name != "common.yaml"], ids=lambda p: p.stem)
def test_every_shipped_file_fits_its_schema(path):
    assert problems_of(path) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"preset": "hacpo", "alfa": 1}},
        {"algorithm": {"preset": "ppo"}},
        {"agents": {"ada": {"update": {"learning_rat": 1}}}},
        {"problems": "maths"},
        {"iterations": 0},
        {"schedule": {"corn": "0 0 * * *"}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(changes):
    assert problems_of(ROOT / "configs" / "demo.yaml", **changes)


def test_the_schema_accepts_names_instead_of_mappings():
    changes = {"problems": "math", "evaluate": {"benchmarks": "math500"}, "schedule": {"cron": "0 0 * * *"}}
    assert not problems_of(ROOT / "configs" / "demo.yaml", **changes)
    assert not problems_of(ROOT / "configs" / "demo.yaml", evaluate={"benchmarks": ["math500", "aime2025"]})


def test_every_setting_is_explained_and_every_setting_of_the_algorithm_is_there():
    settings = campaign_settings()
    assert [s.key for s in settings if not s.description] == []
    keys = {s.key for s in settings}
    assert {f"algorithm.{name}" for name in HacpoConfig.model_fields} < keys
    assert {"samples_per_prompt", "update.minibatch_prompts", "generate.stop_strings"} < keys


def test_settings_are_found_by_group_by_path_and_by_name():
    settings = campaign_settings()
    assert [s.key for s in matching(settings, "update.lora.rank")] == ["update.lora.rank"]
    assert "algorithm.alpha" in [s.key for s in matching(settings, "alpha")]
    with pytest.raises(ConfigError, match="no setting is called 'alhpa'"):
        matching(settings, "alhpa")


def test_the_page_of_all_settings_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == settings_page(), "run: make reference"

"""Methods as settings of one model: which there are, what each changes, what does not fit together."""

import pytest
from pydantic import ValidationError

from hacrl_core.algorithm import foreign_window
from hacrl_core.config.algorithm import PRESETS, CampaignOverrides, HacpoConfig, campaign_overrides, preset
from hacrl_core.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_every_method_is_a_valid_config_that_survives_a_round_trip(name):
    config = preset(name)
    assert HacpoConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_default_is_hacpo():
    assert preset("hacpo") == HacpoConfig()
    config = HacpoConfig(cross_clip_delta=0.2, cross_clip_step=0.025)
    assert [foreign_window(m, config)[0] for m in (0, 1, 8, 100)] == pytest.approx([0.8, 0.825, 1.0, 1.0])
    assert max(foreign_window(m, config)[0] for m in range(50)) <= 1.0
    assert foreign_window(9, preset("without_stepwise"))[0] == pytest.approx(0.8)


def test_single_settings_over_a_preset():
    assert preset("grpo", self_clip_high=0.2).self_clip_high == 0.2
    assert preset("grpo", self_clip_high=0.2).ratio_level == "token"


def test_gspo_x2_doubles_the_samples_and_halves_the_minibatch():
    assert preset("gspo_x2") == preset("gspo")
    for agents in (1, 2, 3):
        overrides = campaign_overrides("gspo_x2", agents)
        assert (overrides.samples_per_prompt, overrides.minibatch_prompts) == (2.0, 0.5)
    assert campaign_overrides("hacpo", 3) == CampaignOverrides()


def test_gspo_xn_has_the_rollouts_that_n_agents_share():
    assert preset("gspo_xn") == preset("gspo")
    assert campaign_overrides("gspo_xn", 1) == CampaignOverrides()
    assert campaign_overrides("gspo_xn", 2) == campaign_overrides("gspo_x2", 2)
    three = campaign_overrides("gspo_xn", 3)
    assert (three.samples_per_prompt, three.minibatch_prompts) == (3.0, pytest.approx(1 / 3))


def test_only_a_result_that_changed_has_another_identity():
    new = {"ratio_length", "gradient_cosine_every", "method", "foreign_failure_cap", "replay_iterations"}
    old = set(HacpoConfig.model_fields) - new
    assert set(preset("hacpo").identity()) == old
    assert set(preset("hacpo", gradient_cosine_every=3).identity()) == old
    assert set(preset("hacpo", ratio_length="learner").identity()) == old | {"ratio_length"}
    assert set(preset("hacpo", foreign_failure_cap=1.0).identity()) == old | {"foreign_failure_cap"}
    assert set(preset("hacpo", replay_iterations=1).identity()) == old | {"replay_iterations"}
    assert set(preset("hacpo_calibrated").identity()) == old | {"calibrated_for"}
    assert set(preset("topr").identity()) == old | {"method", "method_version"}


def test_unknown_names_say_what_there_is():
    with pytest.raises(ConfigError, match="'hacp' is not known; choose one of hacpo, gspo"):
        preset("hacp")
    with pytest.raises(ConfigError, match="not known"):
        campaign_overrides("hacp", 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio_level": "token"}, "share_rollouts: false or foreign_treatment: as_own"),
        ({"pessimistic": True, "cross_clip": False}, "pessimistic changes the foreign window"),
        ({"calibrated_share": 0.5, "share_rollouts": False}, "calibrated_share changes the foreign window"),
        (
            {"ratio_length": "sampler", "share_rollouts": False},
            "ratio_length 'sampler' changes the ratio to the",
        ),
        ({"ratio_length": "learner", "foreign_treatment": "as_own"}, "foreign_treatment to hacpo or sampler_ratio_min"),
        ({"cross_clip": False, "alpha": 9.0}, "overflows"),
        ({"cross_clip_delta": 1.5}, "less than or equal to 1"),
        ({"alpha": float("nan")}, "finite"),
        ({"delta": 0.2}, "Extra inputs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        HacpoConfig(**settings)


def test_every_field_is_described():
    assert all(field.description for field in HacpoConfig.model_fields.values())

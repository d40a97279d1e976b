"""Schedules in a campaign's config."""

import pytest

from hacrl_core.config.loading import validate
from hacrl_core.errors import ConfigError
from tests.flow.conftest import TINY, tiny


def test_one_appointment_or_several():
    night = {"cron": "0 22 * * 1-5", "timezone": "Europe/Berlin", "more_iterations": 50}
    weekend = {"cron": "0 8 * * 6", "settings": {"generate.batch_size": 64}}
    assert [s.cron for s in tiny(schedule=night).schedule] == ["0 22 * * 1-5"]
    both = tiny(schedule=[night, weekend]).schedule
    assert [s.timezone for s in both] == ["Europe/Berlin", "UTC"]
    assert tiny(schedule=[s.model_dump() for s in both]).schedule == both
    assert tiny().schedule == ()


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ({"cron": "22 * *"}, "five fields"),
        ({"cron": "0 22 * * ;"}, "five fields"),
        ({"cron": "0 22 * * *", "timezone": "Mars/Base"}, "Mars/Base"),
        ({"cron": "0 22 * * *", "timezone": "../etc/passwd"}, "not known"),
        ({"cron": "0 22 * * *", "more_iterations": 0}, "more_iterations"),
        ({"cron": "0 22 * * *", "at": "noon"}, "unknown key"),
    ],
)
def test_a_wrong_schedule_is_one_line(schedule, says):
    from hacrl_core.config.campaign import CampaignConfig

    with pytest.raises(ConfigError, match=says) as problem:
        validate({**TINY, "schedule": schedule}, CampaignConfig, "x.yaml")
    assert "\n" not in str(problem.value)


def test_a_schedule_changes_no_identity():
    from flows.tracking.projection import campaign_digest

    assert campaign_digest(tiny()) == campaign_digest(tiny(schedule={"cron": "0 1 * * *"}, runtime={"slots": ["gpu"]}))

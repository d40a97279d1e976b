"""Training that goes wrong in its numbers, provoked for real: the campaign stops, or skips, and the last good version
stays current.
"""

import json

import pytest

from flows.home import Home
from flows.run.divergence import collapse
from hacrl_core.config.operation import CollapseConfig
from hacrl_core.errors import DivergenceError, VerificationError
from tests.flow.conftest import tiny
from tests.flow.homes import Here, digests, home_over, of_label, own_copy, run_here

pytestmark = pytest.mark.slow
HUGE = {"learning_rate": 1e30, "minibatch_prompts": 3}
ONE_UPDATE = {"learning_rate": 1e30, "minibatch_prompts": 6}


@pytest.fixture(scope="module")
def taught(shared_store, tmp_path_factory) -> Home:
    home = home_over(shared_store, tmp_path_factory.mktemp("taught"))
    run_here(tiny(iterations=1, evaluate={}), home)
    return home


@pytest.fixture
def home(taught, tmp_path) -> Home:
    stages = ("warmstart", "sample", "generate", "verify", "credit", "score")
    return own_copy(taught, "tiny", tmp_path / "home", stages, record=False)


def campaign(**changes):
    return tiny(**{"iterations": 2, "evaluate": {}, **changes})


def metrics(home: Home, label: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((of_label(home, "tiny", label) / "manifest.json").read_text())["metrics"]
    return found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"update": HUGE}, r"(loss|a weight|a log-prob).* is not finite; the last good version stays current"),
        # A single update has no next one that would meet the new weights: the stage looks at them itself.
        (
            {"update": ONE_UPDATE, "algorithm": {"preset": "gspo"}},
            r"(a weight|the loss under the new weights).* is not finite",
        ),
    ],
)
def test_not_finite_stops_before_anything_is_published_and_a_lower_rate_goes_on(home, changes, says):
    with pytest.raises(DivergenceError, match=says):
        run_here(campaign(**changes), home)
    assert not (home.store / "objects" / "update").exists()
    assert list((home.store / "staging").iterdir()) == []
    ran = run_here(campaign(), home)
    assert "update ada #0" in ran
    assert "generate ada #0" not in ran  # the rollouts are as good as they were


def test_not_finite_may_be_skipped_and_says_so(home, capsys):
    skipping = campaign(update=HUGE, divergence={"on_nonfinite": "skip"})
    run_here(skipping, home)
    found = digests(home, "tiny")
    assert found["warmstart ada"] == found["update ada #0"] == found["update ada #1"]
    assert metrics(home, "update ben #1") == {"update/skipped": 1.0, "update/not_finite": 1.0}
    assert "is not finite; the update is skipped and the version stays as it was" in " ".join(
        capsys.readouterr().out.split()
    )
    assert run_here(skipping, home) == []
    with pytest.raises(DivergenceError, match="was skipped in an earlier run"):
        run_here(campaign(update=HUGE), home)


def test_a_healthy_update_is_the_same_under_either_setting(home, taught):
    run_here(campaign(iterations=1, divergence={"on_nonfinite": "skip", "collapse": None}), home)
    assert digests(home, "tiny") == digests(taught, "tiny")
    assert metrics(home, "update ada #0")["update/skipped"] == 0.0


def test_a_failing_verifier_stops_the_campaign_or_skips_its_updates(home, tmp_path, monkeypatch):
    (tmp_path / "moody_verifier.py").write_text(
        "def judge(response, gold):\n    if len(response) % 3 == 0:\n        raise RuntimeError('no')\n    return "
        "response.endswith(gold)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    moody = {"verify": {"verifier": "moody_verifier:judge"}}
    with pytest.raises(VerificationError, match=r"of 24 answers ended in an error .*, more than max_error_share 0.05"):
        run_here(campaign(**moody), home)
    assert not (home.store / "objects" / "update").exists()
    run_here(campaign(**moody, divergence={"on_verifier_failure": "skip"}), home)
    found = digests(home, "tiny")
    assert found["warmstart ada"] == found["update ada #1"]
    assert metrics(home, "update ada #0") == {"update/skipped": 1.0, "update/verifier_failed": 1.0}
    tolerant = {"verifier": "moody_verifier:judge", "max_error_share": 1.0}
    run_here(campaign(verify=tolerant, divergence={"on_verifier_failure": "skip"}), home)
    assert digests(home, "tiny")["update ada #0"] != found["update ada #0"]


def test_collapsed_rewards_stop_the_campaign_before_the_next_update(home):
    """A rate that ruins the policies but leaves them finite."""
    watch = {"collapse": {"share": 0.5, "window": 1, "iterations": 2, "action": "stop"}}
    ruin = {"learning_rate": 1.0, "minibatch_prompts": 3}
    with pytest.raises(
        DivergenceError,
        match=r"mean reward below 50% of its best \(0\.\d+, iterations 1 to 1\) for 2 iterations in a row",
    ):
        run_here(campaign(iterations=6, update=ruin, divergence=watch), home)
    assert "update ada #1" in Here.ran or "update ben #1" in Here.ran
    made = {label for label in digests(home, "tiny") if label.startswith("update")}
    assert not {"update ada #2", "update ben #2"} <= made
    watch["collapse"]["action"] = "warn"
    run_here(campaign(iterations=3, update=ruin, divergence=watch), home)
    assert "update ada #2" in digests(home, "tiny")


def test_collapse_is_judged_by_the_best_window_before():
    settings = CollapseConfig(share=0.5, window=2, iterations=2)
    assert collapse([0.8, 0.6, 0.1, 0.1], settings) == (pytest.approx(0.7), 0)
    assert collapse([0.1, 0.2, 0.8, 0.6, 0.3, 0.34], settings) == (pytest.approx(0.7), 2)
    assert collapse([0.8, 0.6, 0.1, 0.4], settings) is None  # not all of the last are low
    assert collapse([0.8, 0.1, 0.1], settings) is None  # no window before them
    assert collapse([0.0, 0.0, 0.0, 0.0], settings) is None  # nothing to fall from

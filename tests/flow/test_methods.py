"""Every method trains the tiny pair, and the relations between methods hold to the bit."""

import os

import numpy as np
import pytest

from hacrl_core.config.algorithm import PRESETS, HacpoConfig
from hacrl_core.contracts.tables import CAPABILITY, CREDIT, ROLLOUTS, SCORES, read_table
from hacrl_core.errors import AlgorithmError
from hacrl_core.methods import METHODS
from tests.flow.conftest import AGENT, TINY, tiny


def digests(state):
    return {agent: handle.outcome().ref.digest for agent, handle in state.versions.items()}


# Methods with a file of their own run through the same code; three of them stand for all.
TRAINED = sorted(set(PRESETS) - set(METHODS) - {"sapo"} | {"sgt", "topr", "xgrpo"})


@pytest.mark.parametrize("preset", TRAINED)
def test_every_method_trains_the_pair(run_inline, preset):
    runner, state = run_inline(tiny(algorithm={"preset": preset}, iterations=1))
    start = {agent: runner.outcomes[f"warmstart {agent}"].ref.digest for agent in ("ada", "ben")}
    for agent, digest in digests(state).items():
        assert digest != start[agent]
        metrics = runner.outcomes[f"update {agent} #0"].metrics
        assert np.isfinite(list(metrics.values())).all()
        assert metrics["update/own_ratio_mean"] == pytest.approx(1.0, abs=0.5)
        if preset != "sgt":  # whether there is anything to rescue depends on the prompts
            learns = HacpoConfig(**PRESETS[preset]).learns_from_others
            assert ("update/foreign_ratio_mean" in metrics) == learns


def test_one_agent_alone_makes_hacpo_equal_gspo_bit_for_bit(run_inline):
    alone = {"ada": TINY["agents"]["ada"]}
    results = [
        digests(run_inline(tiny(agents=alone, algorithm={"preset": preset}))[1])["ada"] for preset in ("hacpo", "gspo")
    ]
    # The optimizer state is in the digest too: weights, moments and counts are all equal.
    assert results[0] == results[1]


def test_the_same_campaign_gives_the_same_bits_in_another_store(run_inline, tmp_path):
    first, second = run_inline(tiny()), run_inline(tiny(), tmp_path)
    assert digests(first[1]) == digests(second[1])
    assert second[0].cached == []


def test_three_agents_two_of_them_with_one_tokenizer(run_inline):
    agents = {**TINY["agents"], "cyd": {"warmstart": {**AGENT, "model": {**AGENT["model"], "hidden_size": 32}}}}
    runner, _ = run_inline(tiny(agents=agents))
    scores = read_table(runner.outcomes["score ada #0"].ref.path / "scores.parquet", SCORES).to_pylist()
    assert {row["sampler"] for row in scores} == {"ada", "ben", "cyd"}
    written = read_table(runner.outcomes["generate cyd #0"].ref.path / "rollouts.parquet", ROLLOUTS).to_pylist()
    ids = {row["rollout_id"]: row["response_token_ids"] for row in written}
    assert all(row["token_ids"] == ids[row["rollout_id"]] for row in scores if row["sampler"] == "cyd")
    credit = read_table(runner.outcomes["credit ada #1"].ref.path / "credit.parquet", CREDIT).to_pylist()
    assert len(credit) == 3 * 6 * 4
    metrics = runner.outcomes["update ada #0"].metrics
    assert metrics["update/updates"] == 2 * 3  # two minibatches of each sampler
    assert {"credit/omega/ben", "credit/omega/cyd"} <= set(runner.outcomes["credit ada #0"].metrics)


def test_a_newcomer_joins_later_and_the_past_stays_valid(run_inline):
    run_inline(tiny(iterations=2))
    newcomer = {"warmstart": {**AGENT, "model": {**AGENT["model"], "hidden_size": 32}}, "joins": 2}
    joined, _ = run_inline(tiny(agents={**TINY["agents"], "cyd": newcomer}, iterations=4))
    assert not [label for label in joined.ran if label.endswith(("#0", "#1"))]
    assert {"generate cyd #2", "update ada #2", "update cyd #3"} <= set(joined.ran)
    history = read_table(joined.outcomes["credit cyd #2"].ref.path / "capability.parquet", CAPABILITY).to_pylist()
    seen = {agent: [row["iteration"] for row in history if row["agent_id"] == agent] for agent in ("ada", "ben", "cyd")}
    assert seen == {"ada": [0, 1, 2], "ben": [0, 1, 2], "cyd": [2]}


def test_an_agent_leaves_and_the_others_go_on(run_inline):
    run_inline(tiny(iterations=2))
    agents = {**TINY["agents"], "ben": {**TINY["agents"]["ben"], "leaves": 1}}
    left, state = run_inline(tiny(agents=agents, iterations=2))
    assert not [label for label in left.ran if label.endswith("#0")]
    assert "generate ben #1" not in left.outcomes
    assert "update ada #1" in left.ran
    assert digests(state)["ben"] == left.outcomes["update ben #0"].ref.digest


def test_own_scores_are_the_denominator_and_match_sampling(run_inline):
    runner, _ = run_inline(tiny())
    metrics = runner.outcomes["score ada #0"].metrics
    assert metrics["score/sampling_mismatch_max"] < 1e-4


def test_kl_to_the_start_is_measured_against_the_first_version(run_inline):
    runner, _ = run_inline(tiny(algorithm={"preset": "hacpo", "kl_coefficient": 0.001}))
    first, second = (runner.outcomes[f"update ada #{i}"].metrics["update/kl_to_start"] for i in (0, 1))
    assert abs(first) < 1e-9  # nothing has been learned yet
    assert second > 1e-6
    assert "score ada reference #1" in runner.ran


def test_kl_is_watched_on_a_subsample_without_being_in_the_loss(run_inline):
    runner, _ = run_inline(tiny())
    watched = runner.outcomes["score ada reference #1"].ref.path / "scores.parquet"
    assert read_table(watched, SCORES).num_rows == 6 * 4
    assert runner.outcomes["update ada #1"].metrics["update/kl_to_start"] > 0
    silent, _ = run_inline(tiny(algorithm={"preset": "hacpo", "measure_kl": False}))
    assert not any("reference" in label for label in silent.outcomes)


def test_per_learner_settings_change_only_that_learner(run_inline):
    base, _ = run_inline(tiny(iterations=1))
    agents = {**TINY["agents"], "ben": {**TINY["agents"]["ben"], "algorithm": {"cross_clip_delta": 0.5}}}
    changed, _ = run_inline(tiny(agents=agents, iterations=1))
    assert "update ben #0" in changed.ran
    assert {"update ada #0", "credit ada #0", "credit ben #0", "score ben #0"} <= set(changed.cached)
    assert base.outcomes["update ada #0"].ref == changed.outcomes["update ada #0"].ref


def test_a_missing_sampler_is_named_and_nothing_is_written(run_inline):
    from hacrl_core.config.algorithm import CreditConfig
    from stages.credit import CreditSlice
    from stages.runner import run_stage
    from stages.spec import Context, StageCall, find_stage

    runner, _ = run_inline(tiny(iterations=1))
    store = runner.store
    good = runner.outcomes
    call = StageCall(
        "credit",
        CreditSlice(learner="ada", agents=("ada", "ben"), iteration=0, algorithm=CreditConfig()),
        {"verdicts/ada": good["verify ada #0"].ref, "verdicts/ben": good["verify ada #0"].ref},
        agent="ada",
        iteration=0,
    )
    with pytest.raises(AlgorithmError, match=r"credit ada iteration 1: rollout .* appears twice"):
        run_stage(store, call, Context())
    assert store.lookup(find_stage("credit").identity(call)) is None
    # Tests of another process may be staging in the same store just now.
    assert not list((store.root / "staging").glob(f"*.{os.getpid()}.*"))

"""The paper's three kinds of heterogeneity: training state, size, model. One iteration each, through every stage."""

import math

import numpy as np
import pytest

from hacrl_core.agents.agent import load_agent, load_tokenizer
from hacrl_core.contracts.tables import ROLLOUTS, SCORES, read_table
from hacrl_core.rendering import decode_response
from tests.flow.conftest import AGENT, tiny

ELDER = AGENT
YOUNGER = {**ELDER, "steps": 110}  # the same model earlier in its training
LARGER = {**ELDER, "model": {**AGENT["model"], "hidden_size": 24, "layers": 2}}
FOREIGNER = {
    **ELDER,
    "model": {**AGENT["model"], "architecture": "qwen3"},
    "tokenizer": {"kind": "bpe", "vocab_size": 300},
}
KINDS = {"state": YOUNGER, "size": LARGER, "model": FOREIGNER}


@pytest.fixture(params=KINDS)
def pair(request, run_inline):
    agents = {"ada": {"warmstart": ELDER}, request.param: {"warmstart": KINDS[request.param]}}
    runner, state = run_inline(tiny(name=request.param, iterations=1, agents=agents, evaluate={}))
    return request.param, runner, state


def test_both_learn_from_each_other_in_their_own_tokens(pair):
    kind, runner, state = pair
    outcomes = runner.outcomes
    for learner, sampler in (("ada", kind), (kind, "ada")):
        path = outcomes[f"score {learner} #0"].ref.path
        rows = [r for r in read_table(path / "scores.parquet", SCORES).to_pylist() if r["sampler"] == sampler]
        written = read_table(outcomes[f"generate {sampler} #0"].ref.path / "rollouts.parquet", ROLLOUTS).to_pylist()
        theirs = {r["rollout_id"]: r for r in written}
        assert {r["rollout_id"] for r in rows} == theirs.keys()
        tokenizer = load_tokenizer(outcomes[f"warmstart {learner}"].ref.path)
        verbatim = [r["token_ids"] == theirs[r["rollout_id"]]["response_token_ids"] for r in rows]
        assert all(verbatim) == (kind != "model")
        for row in rows:
            assert (
                row["truncated"]
                or decode_response(tokenizer, row["token_ids"]) == theirs[row["rollout_id"]]["response_text"]
            )
        metrics = outcomes[f"update {learner} #0"].metrics
        assert math.isfinite(metrics["update/loss"])
        assert metrics["update/own_ratio_min"] > 0.5
        assert 0 < metrics["update/foreign_ratio_mean"] <= math.exp(10)
        before, after = (
            load_agent(p)
            for p in (outcomes[f"warmstart {learner}"].ref.path, state.versions[learner].outcome().ref.path)
        )
        moved = [
            float((a - b).detach().abs().max())
            for a, b in zip(after.model.parameters(), before.model.parameters(), strict=True)
        ]
        assert max(moved) > 0


def test_the_pairs_differ_in_what_they_should(pair):
    kind, runner, _ = pair
    one, two = (load_agent(runner.outcomes[f"warmstart {name}"].ref.path) for name in ("ada", kind))
    shapes = [[tuple(p.shape) for p in agent.model.parameters()] for agent in (one, two)]
    same_vocabulary = one.tokenizer.get_vocab() == two.tokenizer.get_vocab()
    if kind == "state":
        assert shapes[0] == shapes[1]
        assert not np.array_equal(*(next(a.model.parameters()).detach().numpy() for a in (one, two)))
    assert (shapes[0] == shapes[1]) == (kind == "state")
    assert same_vocabulary == (kind != "model")
    assert (one.model.config.model_type == two.model.config.model_type) == (kind != "model")

"""Replay of the others' successes: which responses a learner sees again, and that artifacts alone decide it."""

import numpy as np
import pytest

from hacrl_core.contracts.tables import CREDIT, ROLLOUTS, SCORES, read_table
from hacrl_core.errors import ConfigError
from hacrl_core.exchange.signing import public_key_of, write_key
from hacrl_core.learning.learner import Learner
from tests.flow.conftest import TINY, tiny

# GSPO's term for foreign responses: advantages are pooled, so that nearly every prompt with a success has one above 0.
REPLAY = {"preset": "shared_gspo", "replay_iterations": 2}


@pytest.fixture
def seen(monkeypatch):
    """Learner and iteration → the responses that it learned from."""
    found = {}
    learn = Learner.learn

    def told(self, responses, progress):
        found[self.name, self.iteration] = list(responses)
        return learn(self, responses, progress)

    monkeypatch.setattr(Learner, "learn", told)
    return found


def rows(runner, label, name, contract):
    return read_table(runner.outcomes[label].ref.path / f"{name}.parquet", contract).to_pylist()


def test_the_others_successes_of_the_last_iterations_come_again(run_inline, tmp_path, seen):
    runner, _ = run_inline(tiny(algorithm=REPLAY, iterations=4), tmp_path)
    replayed = 0
    for iteration in range(4):
        for learner, other in (("ada", "ben"), ("ben", "ada")):
            now = {r["rollout_id"] for r in rows(runner, f"credit {learner} #{iteration}", "credit", CREDIT)}
            extra = [r for r in seen[learner, iteration] if r.rollout_id not in now]
            wanted, tokens, written = {}, {}, {}
            for past in range(max(0, iteration - 2), iteration):
                credit = rows(runner, f"credit {learner} #{past}", "credit", CREDIT)
                wanted |= {r["rollout_id"]: r for r in credit if r["sampler"] == other and r["reward"] > r["baseline"]}
                scores = rows(runner, f"score {learner} #{past}", "scores", SCORES)
                tokens |= {r["rollout_id"]: tuple(r["token_ids"]) for r in scores}
                rollouts = rows(runner, f"generate {other} #{past}", "rollouts", ROLLOUTS)
                written |= {r["rollout_id"]: np.mean(r["response_logprobs"]) for r in rollouts}
            assert {r.rollout_id for r in extra} == set(wanted)
            for r in extra:
                assert r.advantage == wanted[r.rollout_id]["advantage"] > 0
                assert r.token_ids == tokens[r.rollout_id]
                assert r.sampler_mean == pytest.approx(written[r.rollout_id], abs=1e-4)
            replayed += len(extra)
    assert replayed
    assert "update ada #3" in runner.ran
    # Nothing but artifacts: the same campaign again is in the store altogether.
    again, _ = run_inline(tiny(algorithm=REPLAY, iterations=4), tmp_path)
    assert again.ran == []


def test_the_first_iteration_has_nothing_to_replay(run_inline):
    plain, _ = run_inline(tiny(algorithm={"preset": "shared_gspo"}, iterations=1))
    replay, _ = run_inline(tiny(algorithm=REPLAY, iterations=1))
    for agent in ("ada", "ben"):
        label = f"update {agent} #0"
        assert plain.outcomes[label].ref.key != replay.outcomes[label].ref.key
        assert plain.outcomes[label].ref.digest == replay.outcomes[label].ref.digest


@pytest.mark.parametrize("preset", ["gspo", "naive", "xgrpo", "hacpo_calibrated"])
def test_what_has_nothing_to_replay_refuses_it(preset):
    with pytest.raises((ConfigError, ValueError), match="replay_iterations 1"):
        tiny(algorithm={"preset": preset, "replay_iterations": 1})


def test_parties_do_not_replay(tmp_path):
    parties = {}
    for name, agent in (("north", "ada"), ("south", "ben")):
        write_key(tmp_path / name)
        parties[name] = {"agents": [agent], "public_key": public_key_of((tmp_path / name).read_text())}
    with pytest.raises((ConfigError, ValueError), match="replay_iterations"):
        tiny(algorithm=REPLAY, parties=parties)
    assert tiny(parties=parties).iterations == TINY["iterations"]

"""What could go wrong on ranks: hardly any work, no work, adapters on a tied head, a kill between weights and state."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hacrl_core.agents.agent import load_agent
from hacrl_core.config.training import LoraConfig
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence
from tests.flow.conftest import TINY, tiny
from tests.patience import patience
from tests.ranks.tasks import Score, Train, settings
from tests.ranks.test_sharded_learner import ROWS, alone, assert_close, tensors

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_minibatch_of_fewer_rows_than_ranks(group, checkpoint, kind):
    folder = checkpoint(kind, tied=True)
    short = [TrainSequence(row.prompt_token_ids, row.response_token_ids[:1]) for row in ROWS[:2]]
    for few in (ROWS[:2], short, [ROWS[0]] * 3):
        assert_close(group(4).run(Train(folder, settings(ranks=4), few)), alone(folder, settings(), few))
    for few in (ROWS[:1], ROWS[:3], []):
        scored = group(4).run(Score(folder, few))
        wanted = score_sequences(load_agent(folder), few, token_budget=200)
        assert len(scored) == len(wanted)
        for ours, theirs in zip(scored, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_adapters_on_a_model_with_a_tied_head_over_three_ranks(group, checkpoint, tmp_path):
    folder = checkpoint("gemma3", tied=True)
    lora = LoraConfig(rank=2, alpha=5.0)
    theirs = alone(folder, settings(lora=lora), steps=2, save=tmp_path / "one")
    ours = group(3).run(Train(folder, settings(lora=lora, ranks=3), ROWS, steps=2, save=tmp_path / "many"))
    assert_close(ours, theirs)
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, rtol=1e-4, atol=2e-6, err_msg=name)
    first = load_agent(folder).model.get_input_embeddings().weight
    saved = load_agent(tmp_path / "many").model
    assert saved.get_output_embeddings().weight is saved.get_input_embeddings().weight
    assert np.array_equal(saved.get_input_embeddings().weight.detach(), first.detach()), "the tied head is frozen"


# --- a campaign that goes on with other ranks -------------------------------------------------------------------------

MOVED = {"ranks": 3, "ranks_until": {1: 2}}
SCRIPT = """
import json, os, signal, sys
from pathlib import Path

import torch

from flows.campaign import run_campaign
from flows.stage_calls import StageCalls
from hacrl_core.agents import checkpoints
from hacrl_core.artifacts import Store
from tests.flow.conftest import Inline
from tests.ranks.test_rank_attacks import campaign

if __name__ == "__main__":
    torch.set_num_threads(1)
    root, update, doomed = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "kill"
    layout, saved = checkpoints.optimizer_layout, []

    def dies(folder, sizes, files):
        saved.append(folder)
        if doomed and len(saved) == 2:
            assert (folder / "model.safetensors").stat().st_size > 10_000
            os.kill(os.getpid(), signal.SIGKILL)
        return layout(folder, sizes, files)

    checkpoints.optimizer_layout = dies
    config = campaign(update)
    runner = Inline(Store(root))
    run_campaign(config, StageCalls(config), runner)
    runner.context.warm.close()
    print(json.dumps({"ran": runner.ran, "digests": {label: o.ref.digest for label, o in runner.outcomes.items()}}))
"""


def campaign(update):
    """One agent, two iterations."""
    update = {**update, "ranks_until": {int(end): ranks for end, ranks in update.get("ranks_until", {}).items()}}
    return tiny(iterations=2, update={**TINY["update"], **update}, evaluate={}, agents={"ada": TINY["agents"]["ada"]})


def run(root: Path, script: Path, update: dict, *, kill: bool = False) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, str(script), str(root), json.dumps(update), "kill" if kill else "stay"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=patience(300), check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"said": done.stderr}


def test_killed_between_weights_and_state_and_resumed_with_other_ranks(tmp_path):
    """Two ranks make version 1 and are killed in mid-save of version 2; three ranks go on from version 1."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, found = run(tmp_path / "killed", script, {"ranks": 2}, kill=True)
    assert code == -signal.SIGKILL, found
    published = [p.name for p in (tmp_path / "killed" / "objects" / "update").iterdir()]
    assert len(published) == 1, "half a version was published"
    code, resumed = run(tmp_path / "killed", script, MOVED)
    assert code == 0, resumed
    assert "update ada #0" not in resumed["ran"]
    assert "update ada #1" in resumed["ran"]
    code, quiet = run(tmp_path / "quiet", script, MOVED)
    assert code == 0, quiet
    assert resumed["digests"] == quiet["digests"]
    code, two = run(tmp_path / "killed", script, {"ranks": 2})
    assert code == 0, two
    assert two["digests"]["update ada #0"] == quiet["digests"]["update ada #0"]
    assert two["digests"]["update ada #1"] != quiet["digests"]["update ada #1"], "three ranks sum in another order"
    assert list((tmp_path / "killed" / "staging").iterdir()) == []

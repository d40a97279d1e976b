"""Several ranks against one process: the same loss, gradient, log-probs and files, up to the order of sums."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hacrl_core.agents.agent import load_agent
from hacrl_core.config.training import LoraConfig, UpdateConfig
from hacrl_core.errors import AlgorithmError, EngineError
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence
from hacrl_core.learning.sharded.dealing import deal
from hacrl_core.learning.sharded.policy import Numerics
from hacrl_core.learning.trainer import Trainer
from tests.ranks import tasks
from tests.ranks.tasks import Score, Train, compare, objective, sequences, settings

ROWS = sequences()


def alone(folder: Path, config: UpdateConfig, rows=ROWS, *, steps=1, resume=False, save=None, clipped=()):
    """The same as `tasks.Train`, on one process."""
    agent = load_agent(folder)
    trainer = Trainer(agent, config, optimizer_state=folder if resume else None, seed=4)
    norm = trainer.gradient_norm(rows, objective(rows, clipped=clipped))
    gradient = {n: p.grad.clone() for n, p in agent.model.named_parameters() if p.requires_grad}
    results = [trainer.step(rows, objective(rows, clipped=clipped)) for _ in range(steps)]
    if save is not None:
        trainer.save(save)
    return {"norm": norm, "gradient": gradient, "steps": results, "agent": agent, "updates": trainer.updates}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k: v for f in sorted(folder.rglob("*.safetensors")) for k, v in load_file(f).items()}


def digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def assert_close(ours, theirs, rtol=1e-6):
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=max(rtol, 1e-5))
    assert compare(ours["gradient"], theirs["gradient"]) <= rtol
    for a, b in zip(ours["steps"], theirs["steps"], strict=True):
        assert abs(a.loss - b.loss) <= max(rtol, 1e-6)
        assert a.tokens > 0
        assert a.stats.keys() == b.stats.keys()
        for name, column in b.stats.items():
            np.testing.assert_allclose(a.stats[name], column, rtol=1e-4, atol=1e-5, err_msg=name)


# --- quick: one group of two ranks ------------------------------------------------------------------------------------


def test_two_ranks_score_train_and_save_what_one_process_does(group, checkpoint, tmp_path):
    folder = checkpoint("qwen3", tied=True)
    theirs = alone(folder, settings(entropy=True), save=tmp_path / "one")
    ours = group(2).run(Train(folder, settings(entropy=True, ranks=2), ROWS, save=tmp_path / "two"))
    assert_close(ours, theirs)
    assert ours["finite"]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert len(list((tmp_path / "two" / "training").glob("*.safetensors"))) == 8
    scored = group(2).run(Score(folder, ROWS))
    for a, b in zip(scored, score_sequences(load_agent(folder), ROWS, token_budget=200), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_an_error_on_one_rank_is_raised_as_it_is_and_the_next_group_works(group, checkpoint):
    folder = checkpoint("qwen3", tied=True)
    with pytest.raises(AlgorithmError, match="row of rank 1"):
        group(2).run(tasks.Fails(AlgorithmError("row of rank 1"), at=1))
    with pytest.raises(EngineError, match="shape"):
        group(2).run(tasks.Fails(EngineError("shape"), at=0))
    assert len(group(2).run(Score(folder, ROWS[:1]))) == 1


def test_rows_are_dealt_by_length_and_none_is_lost():
    for ranks in (1, 2, 3, 7):
        for whole in (False, True):
            hands = deal(ROWS, ranks, whole_prompts=whole)
            assert sorted(int(row) for hand in hands for row in hand) == list(range(len(ROWS)))
            if whole:
                prompts = [{ROWS[row].prompt_token_ids for row in hand} for hand in hands]
                assert all(not (a & b) for i, a in enumerate(prompts) for b in prompts[:i])
    tokens = [
        sum(len(ROWS[r].prompt_token_ids) + len(ROWS[r].response_token_ids) for r in hand) for hand in deal(ROWS, 3)
    ]
    longest = max(len(r.prompt_token_ids) + len(r.response_token_ids) for r in ROWS)
    assert max(tokens) - min(tokens) <= longest
    assert [len(hand) for hand in deal(ROWS[:2], 4)] == [1, 1, 0, 0]


# --- every family, 2, 3 and 4 ranks -----------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("ranks", [2, 3, 4])  # last: groups of equally many ranks follow one another
def test_loss_and_gradient_are_those_of_one_process(group, checkpoint, tmp_path, ranks, kind, tied):
    folder = checkpoint(kind, tied=tied)
    theirs = alone(folder, settings(), steps=2)
    ours = group(ranks).run(Train(folder, settings(ranks=ranks), ROWS, steps=2, save=tmp_path / "a"))
    assert_close(ours, theirs)
    group(ranks).run(Train(folder, settings(ranks=ranks), ROWS, steps=2, save=tmp_path / "b"))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not info["missing_keys"]
    trained = load_agent(tmp_path / "a")
    for (name, a), b in zip(trained.model.named_parameters(), theirs["agent"].model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    scored = group(ranks).run(Score(folder, ROWS))
    for a, b in zip(scored, score_sequences(load_agent(folder), ROWS, token_budget=200), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_whose_rows_are_all_clipped_or_that_has_none_does_not_hang_the_others(group, checkpoint, ranks):
    folder = checkpoint("llama", tied=False)
    clipped = tuple(int(row) for row in deal(ROWS, ranks, whole_prompts=True)[1])
    theirs = alone(folder, settings(), clipped=clipped)
    ours = group(ranks).run(Train(folder, settings(ranks=ranks), ROWS, clipped=clipped))
    assert_close(ours, theirs)
    assert all(ours["steps"][0].stats["above"][list(clipped)] == 1)
    for few in (ROWS[:1], []):
        assert_close_or_empty(group(ranks).run(Train(folder, settings(ranks=ranks), few)), folder, few)


def assert_close_or_empty(ours, folder: Path, rows: list[TrainSequence]) -> None:
    if rows:
        assert_close(ours, alone(folder, settings(), rows))
        return
    assert ours["norm"] == 0
    assert ours["steps"][0].loss == 0
    assert ours["updates"] == 1


@pytest.mark.ranks
def test_training_goes_on_with_another_number_of_ranks(group, checkpoint, tmp_path):
    folder = checkpoint("qwen3", tied=True)
    config = settings(ranks=2)
    group(2).run(Train(folder, config, ROWS, save=tmp_path / "2"))
    one = alone(tmp_path / "2", settings(state_files=8), resume=True, save=tmp_path / "2-1")
    four = group(4).run(Train(tmp_path / "2", config, ROWS, resume=True, save=tmp_path / "4"))
    assert (one["updates"], four["updates"]) == (2, 2)
    assert digests(tmp_path / "2-1").keys() == digests(tmp_path / "4").keys()
    for name, value in tensors(tmp_path / "2-1").items():
        torch.testing.assert_close(tensors(tmp_path / "4")[name], value, rtol=1e-4, atol=2e-6, msg=name)
    last = alone(tmp_path / "4", settings(), resume=True, save=tmp_path / "1")
    assert last["updates"] == 3
    straight = alone(folder, settings(), steps=3)
    for (name, a), b in zip(
        load_agent(tmp_path / "1").model.named_parameters(), straight["agent"].model.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    # The file of one process, as versions of before have it, is read by ranks.
    back = group(4).run(Train(tmp_path / "1", config, ROWS, resume=True))
    assert back["updates"] == 4


@pytest.mark.ranks
def test_the_files_do_not_depend_on_who_wrote_them(group, checkpoint, tmp_path):
    folder = checkpoint("gemma3", tied=True)
    for ranks in (2, 3):
        group(ranks).run(Train(folder, settings(ranks=ranks), [], steps=0, save=tmp_path / f"{ranks}"))
    group(3).run(tasks.WithoutSharedDisk(Train(folder, settings(ranks=3), [], steps=0, save=tmp_path / "gathered")))
    assert digests(tmp_path / "2") == digests(tmp_path / "3") == digests(tmp_path / "gathered")
    for name, value in tensors(folder).items():
        assert torch.equal(tensors(tmp_path / "3")[name], value), name


@pytest.mark.ranks
def test_large_weights_are_split_into_files_that_transformers_reads(group, checkpoint, tmp_path):
    folder = checkpoint("qwen3", tied=True)
    group(2).run(tasks.InSmallFiles(Train(folder, settings(ranks=2), ROWS, steps=0, save=tmp_path / "many"), 20_000))
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for a, b in zip(model.parameters(), load_agent(folder).model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert len(group(2).run(Score(tmp_path / "many", ROWS[:3]))) == 3


@pytest.mark.ranks
def test_no_rank_holds_the_whole_model_while_it_loads(group, checkpoint):
    folder = checkpoint("llama", tied=False)
    whole = sum(4 * p.numel() for p in load_agent(folder).model.parameters())
    largest = max(4 * p.numel() for p in load_agent(folder).model.parameters())
    for held, peak in group(4).run(tasks.MeasureLoading(folder)):
        assert held <= math.ceil(whole / 4) * 1.1
        assert peak <= held + 2 * largest / 4 + 1024, "one slice at a time beside what is held"


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_gradient_checkpointing_and_offload_change_nothing(group, checkpoint):
    folder = checkpoint("llama", tied=True)
    plain = group(2).run(Train(folder, settings(ranks=2), ROWS))
    again = group(2).run(Train(folder, settings(ranks=2, gradient_checkpointing=True), ROWS))
    assert compare(again["gradient"], plain["gradient"]) < 1e-6
    offloaded = group(2).run(Train(folder, settings(ranks=2, offload="optimizer"), ROWS, steps=2))
    assert_close(offloaded, alone(folder, settings(), steps=2))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_bf16_body_with_float32_head_stays_near(group, checkpoint, kind):
    folder = checkpoint(kind, tied=True)
    config = settings(ranks=2, autocast="bf16")
    ours, theirs = group(2).run(Train(folder, config, ROWS)), alone(folder, settings())
    assert 1e-6 < compare(ours["gradient"], theirs["gradient"]) < 5e-2
    assert abs(ours["steps"][0].loss - theirs["steps"][0].loss) < 5e-3
    scored = group(2).run(Score(folder, ROWS, Numerics("bf16")))
    exact = score_sequences(load_agent(folder), ROWS, token_budget=200)
    gaps = [float(np.abs(a - b).max()) for a, b in zip(scored, exact, strict=True)]
    assert 1e-6 < max(gaps) < 0.1
    assert group(2).run(tasks.SlicesAreFloat32(folder, Numerics("bf16")))


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_lora_trains_the_same_adapters_and_resumes(group, checkpoint, tmp_path, ranks):
    folder = checkpoint("qwen3", tied=True)
    lora = LoraConfig(rank=3, alpha=6.0)
    theirs = alone(folder, settings(lora=lora), steps=2, save=tmp_path / "one")
    ours = group(ranks).run(Train(folder, settings(lora=lora, ranks=ranks), ROWS, steps=2, save=tmp_path / "many"))
    assert_close(ours, theirs)
    assert digests(tmp_path / "one").keys() - digests(tmp_path / "many").keys() == {"training/optimizer.safetensors"}
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    for name, value in one.items():
        torch.testing.assert_close(many[name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    more = group(ranks).run(Train(tmp_path / "many", settings(lora=lora, ranks=ranks), ROWS, resume=True))
    assert_close(more, alone(tmp_path / "one", settings(lora=lora), resume=True), rtol=2e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("autocast", ["none", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_own_ratio_begins_at_one_and_score_and_update_agree(group, checkpoint, ranks, autocast):
    """GSPO's window is 3e-4 wide. In bfloat16 a log-prob depends on its batch, so the update reads its own first."""
    for kind, tied in (("llama", False), ("qwen3", True), ("gemma3", True)):
        config = settings(ranks=ranks, autocast=autocast, gradient_checkpointing=ranks == 3)
        found = group(ranks).run(tasks.ScoreAndUpdate(checkpoint(kind, tied=tied), ROWS, config))
        scored, read, seen = map(np.array, found)
        assert np.abs(read - seen).max() < 2e-6, kind
        assert np.abs(scored - seen).max() < {"none": 2e-6, "bf16": 2e-3}[autocast], kind


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ({"autocast": "bf16"}, {"gradient_checkpointing": True}),
        ({"autocast": "bf16"}, {"offload": "optimizer"}),
        ({"lora": LoraConfig(rank=3, alpha=6.0)}, {"gradient_checkpointing": True}),
        ({"lora": LoraConfig(rank=3, alpha=6.0)}, {"offload": "optimizer"}),
        ({}, {"gradient_checkpointing": True, "offload": "optimizer"}),
        ({"lora": LoraConfig(rank=3, alpha=6.0), "autocast": "bf16"}, {"gradient_checkpointing": True}),
    ],
)
def test_modes_together(group, checkpoint, base, changes):
    """Where memory is saved numbers stay, also beside a mode that changes them."""
    folder = checkpoint("qwen3", tied=True)
    plain = group(2).run(Train(folder, settings(ranks=2, **base), ROWS, steps=2))
    both = group(2).run(Train(folder, settings(ranks=2, **base, **changes), ROWS, steps=2))
    assert_close(both, plain)
    exact = alone(folder, settings(**{name: value for name, value in base.items() if name != "autocast"}), steps=2)
    assert_close(both, exact) if "autocast" not in base else None
    assert compare(both["gradient"], exact["gradient"]) < 5e-2

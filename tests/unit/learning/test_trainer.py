"""The trainer: same gradient as naive code, any microbatch size, exact resume, nothing done on non-finite numbers."""

import hashlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learning_models import naive_logprobs, random_sequences, sequence_objective, tiny_agent, token_objective

from hacrl_core.agents.agent import Agent, load_agent
from hacrl_core.config.training import LoraConfig, UpdateConfig
from hacrl_core.errors import EngineError
from hacrl_core.learning import trainer as trainer_module
from hacrl_core.learning.fused import Objective
from hacrl_core.learning.sequences import TrainSequence, merge_identical, plan_rows
from hacrl_core.learning.trainer import Trainer, exact_norm

SEQUENCES = random_sequences(14)
ADVANTAGE = torch.randn(14, generator=torch.Generator().manual_seed(2))
OLD = torch.full((14,), -3.97)


def config(**changes: object) -> UpdateConfig:
    return UpdateConfig(**{"learning_rate": 1e-2, "token_budget": 100, **changes})


def weights(agent: Agent) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in agent.model.named_parameters()}


def assert_equal_weights(a: Agent, b: Agent, atol: float = 0.0) -> None:
    for name, value in weights(a).items():
        torch.testing.assert_close(value, weights(b)[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def digests(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_the_norm_of_a_long_gradient_is_exact():
    flat = torch.empty(30_000_001)
    flat.normal_(generator=torch.Generator().manual_seed(0))
    wanted = math.sqrt(sum(float(part.double().square().sum()) for part in flat.split(1 << 20)))
    assert exact_norm(flat) == pytest.approx(wanted, rel=1e-6)
    assert float(torch.linalg.vector_norm(flat)) < wanted * (1 - 1e-3), "one float32 sum stagnates"
    for shape in (1, 4096, 4097):
        assert exact_norm(torch.full((shape,), 0.1)) == pytest.approx(0.1 * math.sqrt(shape), rel=1e-5)
    assert math.isnan(exact_norm(torch.tensor([1.0, math.nan])))


def test_a_long_gradient_is_clipped_by_its_exact_norm(monkeypatch):
    norms = []
    monkeypatch.setattr(trainer_module, "_ONE_SUM", 0)
    monkeypatch.setattr(trainer_module, "exact_norm", lambda flat: norms.append(flat.clone()) or 50.0)
    agent = tiny_agent()
    step = Trainer(agent, config(gradient_norm=0.5)).step(SEQUENCES, sequence_objective(ADVANTAGE, OLD))
    assert step.gradient_norm == 50.0
    clipped = torch.cat([p.grad.flatten() for p in agent.model.parameters()])
    torch.testing.assert_close(clipped, norms[0] / 100)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma2"])
@pytest.mark.parametrize("objective", [sequence_objective(ADVANTAGE, OLD), token_objective(ADVANTAGE, 14)])
def test_one_step_equals_a_naive_loop(kind, objective):
    tied = {} if kind == "gpt2" else {"tied": True}
    ours, theirs = tiny_agent(kind, **tied), tiny_agent(kind, **tied)
    result = Trainer(ours, config()).step(SEQUENCES, objective)
    optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for row, sequence in enumerate(SEQUENCES):
        logprobs = naive_logprobs(theirs.model, sequence)[None]
        loss, _ = objective(logprobs, torch.ones_like(logprobs, dtype=torch.bool), torch.tensor([row]))
        loss.backward()
        losses.append(loss.item())
    norm = torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 1.0)
    assert result.loss == pytest.approx(sum(losses), rel=1e-5)
    assert result.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    gradients = torch.cat([p.grad.flatten() for p in theirs.model.parameters()])
    clipped = torch.cat([p.grad.flatten() for p in ours.model.parameters()])
    assert float((gradients - clipped).norm() / gradients.norm()) < 1e-5
    optimizer.step()
    # AdamW's first step is ±lr wherever |g| > eps, so compare where the gradient is not rounding noise.
    for (name, mine), other in zip(weights(ours).items(), theirs.model.parameters(), strict=True):
        sure = other.grad.abs() > 1e-5
        torch.testing.assert_close(
            mine[sure], other.detach()[sure], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_any_microbatch_size_gives_the_same_update():
    objective = sequence_objective(ADVANTAGE, OLD)
    gradients = [
        Trainer(tiny_agent(), config(token_budget=b)).gradient(SEQUENCES, objective) for b in (1, 64, 300, 10_000)
    ]
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-6


def test_statistics_come_back_in_row_order():
    agent = tiny_agent()
    result = Trainer(agent, config(entropy=True)).step(SEQUENCES, _row_number())
    np.testing.assert_array_equal(result.stats["row"], np.arange(14))
    np.testing.assert_array_equal(result.stats["length"], [len(s.response_token_ids) for s in SEQUENCES])
    assert np.all((result.stats["entropy"] > 3.5) & (result.stats["entropy"] <= np.log(53) + 1e-6))
    assert result.tokens == sum(len(s.prompt_token_ids) + len(s.response_token_ids) - 1 for s in SEQUENCES)
    assert 0 < result.padding_share < 0.5


def _row_number() -> Objective:
    def objective(
        logprobs: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -(logprobs * mask).sum(), {"row": rows, "length": mask.sum(1)}

    return objective


def test_gradient_checkpointing_changes_nothing():
    """GPT-2 has dropout 0.1: it must stay off although checkpointing needs training mode."""
    objective = sequence_objective(ADVANTAGE, OLD)
    plain, frugal = tiny_agent("gpt2"), tiny_agent("gpt2")
    Trainer(plain, config()).step(SEQUENCES, objective)
    calls = []
    trainer = Trainer(frugal, config(gradient_checkpointing=True))
    frugal.model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    trainer.step(SEQUENCES, objective)
    assert len(calls) == 6, "the layer must run again in the backward pass"
    frugal = tiny_agent("gpt2")
    Trainer(frugal, config(gradient_checkpointing=True)).step(SEQUENCES, objective)
    assert_equal_weights(plain, frugal)


def test_autocast_keeps_float32_weights_and_a_close_loss():
    objective = sequence_objective(ADVANTAGE, OLD)
    agent = tiny_agent()
    half = Trainer(agent, config(autocast="bf16")).step(SEQUENCES, objective)
    full = Trainer(tiny_agent(), config()).step(SEQUENCES, objective)
    assert half.loss == pytest.approx(full.loss, abs=2e-2)
    assert half.loss != full.loss
    assert all(p.dtype == torch.float32 for p in agent.model.parameters())


def test_half_precision_master_weights_are_refused():
    agent = tiny_agent()
    agent.model.bfloat16()
    with pytest.raises(EngineError, match="float32 master weights"):
        Trainer(agent, config())


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_non_finite_numbers_change_nothing_and_are_reported(broken):
    def objective(
        logprobs: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if broken == "loss":
            return logprobs.sum() * float("nan"), {}
        return ((logprobs - logprobs.detach()) * 1e38 * 1e10).sum(), {}

    agent, twin = tiny_agent(), tiny_agent()
    trainer, other = Trainer(agent, config()), Trainer(twin, config())
    result = trainer.step(SEQUENCES, objective)
    assert not result.finite
    assert_equal_weights(agent, twin)
    good = sequence_objective(ADVANTAGE, OLD)
    assert trainer.step(SEQUENCES, good).finite
    other.step(SEQUENCES, good)
    assert_equal_weights(agent, twin)
    assert trainer.updates == 1


def test_finite_weights_and_moments_pass_an_empty_parameter_too():
    agent = tiny_agent()
    agent.model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0)))
    trainer, objective = Trainer(agent, config()), sequence_objective(ADVANTAGE, OLD)
    assert trainer.is_finite()
    before = weights(agent)
    assert trainer.gives_finite(SEQUENCES, objective, steps=10**6)
    assert all(torch.equal(now, before[name]) for name, now in weights(agent).items())
    assert trainer.step(SEQUENCES, objective).finite
    assert trainer.is_finite()
    assert trainer.gives_finite(SEQUENCES, objective, steps=10**6)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["weight", "exp_avg", "exp_avg_sq"])
def test_a_single_number_that_is_not_finite_is_found(where, number):
    agent = tiny_agent()
    trainer, objective = Trainer(agent, config()), sequence_objective(ADVANTAGE, OLD)
    trainer.step(SEQUENCES, objective)
    head = agent.model.lm_head.weight
    tensor = head.data if where == "weight" else trainer._optimizer.state[head][where]
    tensor[-1, -1] = number
    assert not trainer.is_finite()
    # A moment shows in the next step only, a weight in the loss of now.
    assert trainer.gives_finite(SEQUENCES, objective, steps=10**6) == (where != "weight")
    tensor[-1, -1] = 0.5
    assert trainer.is_finite()
    assert trainer.gives_finite(SEQUENCES, objective, steps=10**6)


def test_out_of_memory_names_the_remedy_of_training(monkeypatch):
    trainer = Trainer(tiny_agent(), config())
    monkeypatch.setattr("hacrl_core.learning.trainer.response_states", lambda *_: torch.empty(1 << 60))
    with pytest.raises(EngineError, match=r"agent tiny: out of memory training on cpu; lower update.token_budget or"):
        trainer.step(SEQUENCES, sequence_objective(ADVANTAGE, OLD))
    monkeypatch.setattr("hacrl_core.learning.trainer._one_buffer", lambda _: torch.empty(1 << 60))
    with pytest.raises(EngineError, match=r"update.gradient_checkpointing, or train update.lora"):
        Trainer(tiny_agent(), config())


def test_warmup_scales_the_first_updates():
    objective = sequence_objective(ADVANTAGE, OLD)
    slow, fast = tiny_agent(), tiny_agent()
    start = weights(fast)
    Trainer(slow, config(warmup_updates=4, weight_decay=0.0)).step(SEQUENCES, objective)
    Trainer(fast, config(weight_decay=0.0)).step(SEQUENCES, objective)
    for name, before in start.items():
        torch.testing.assert_close(
            (weights(slow)[name] - before) * 4, weights(fast)[name] - before, rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4.0)])
def test_same_inputs_same_digests_and_resume(tmp_path, lora):
    objective = sequence_objective(ADVANTAGE, OLD)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        trainer = Trainer(tiny_agent(), config(lora=lora), seed=3)
        for _ in range(2):
            trainer.step(SEQUENCES, objective)
        trainer.save(folder)
    assert digests(folders[0]) == digests(folders[1])
    assert not [name for name in digests(folders[0]) if name.endswith((".bin", ".pt", ".pkl", ".pth"))]
    resumed = load_agent(folders[0])
    # The merged or plain checkpoint runs alone and is what the trainer held.
    for sequence in SEQUENCES[:3]:
        with torch.no_grad():
            torch.testing.assert_close(
                naive_logprobs(resumed.model, sequence),
                naive_logprobs(trainer.agent.model, sequence),
                rtol=0,
                atol=2e-6,
            )
    again = Trainer(resumed, config(lora=lora), optimizer_state=folders[0], seed=9)
    assert again.updates == 2
    trainer.step(SEQUENCES, objective)
    again.step(SEQUENCES, objective)
    assert_equal_weights(trainer.agent, resumed, atol=0.0 if lora is None else 1e-5)


def test_lora_trains_adapters_only_and_leaves_a_plain_checkpoint(tmp_path):
    agent = tiny_agent("qwen3", tied=True)
    names = {name for name, _ in agent.model.named_parameters()}
    trainer = Trainer(agent, config(lora=LoraConfig(rank=2, alpha=4.0)))
    before = {n: p for n, p in weights(agent).items() if "lora_" not in n}
    trainer.step(SEQUENCES, sequence_objective(ADVANTAGE, OLD))
    for name, value in before.items():
        assert torch.equal(value, weights(agent)[name]), name
    trainer.save(tmp_path)
    assert {name for name, _ in load_agent(tmp_path).model.named_parameters()} == names
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    with pytest.raises(EngineError, match="output head"):
        Trainer(tiny_agent(), config(lora=LoraConfig(rank=2, alpha=4.0, target_modules=("lm_head",))))


def test_lora_without_peft_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(EngineError, match=r"hacrl\[lora\]"):
        Trainer(tiny_agent(), config(lora=LoraConfig(rank=2, alpha=4.0)))


def test_a_foreign_or_damaged_optimizer_state_is_refused(tmp_path):
    with pytest.raises(EngineError, match="cannot be read"):
        Trainer(tiny_agent(), config(), optimizer_state=tmp_path)
    trainer = Trainer(tiny_agent(), config())
    trainer.save(tmp_path)
    with pytest.raises(EngineError, match="other parameters"):
        Trainer(tiny_agent("gpt2"), config(), optimizer_state=tmp_path)
    with pytest.raises(EngineError, match="another shape"):
        Trainer(_wider(), config(), optimizer_state=tmp_path)
    (tmp_path / "training" / "optimizer.safetensors").write_bytes(b"torn")
    with pytest.raises(EngineError, match="cannot be read"):
        Trainer(tiny_agent(), config(), optimizer_state=tmp_path)


def _wider() -> Agent:
    agent = tiny_agent()
    agent.model.resize_token_embeddings(60)
    return agent


# --- no wasted work, exactly ------------------------------------------------------------------------------------------


def _trained(
    sequences: list[TrainSequence], advantage: torch.Tensor, weight: torch.Tensor, total: float, budget: int
) -> Agent:
    """Two updates; the loss is divided by the weight of the whole minibatch, left-out rows included.

    A large epsilon makes AdamW a smooth function of the gradient: with 1e-8 its first step is ±lr even where the
    gradient is rounding noise.
    """
    agent = tiny_agent()
    trainer = Trainer(agent, config(token_budget=budget, learning_rate=1e-3, epsilon=1e-3))
    objective = sequence_objective(advantage, torch.full((len(sequences),), -3.97), weight, total)
    for _ in range(2):
        trainer.step(sequences, objective)
    return agent


def test_dropped_and_merged_rows_leave_the_update_as_it_was():
    doubled = [*SEQUENCES, SEQUENCES[3], SEQUENCES[5], SEQUENCES[3]]
    advantage = torch.cat([ADVANTAGE, ADVANTAGE[[3, 5, 3]]])
    advantage[[0, 4, 7]] = 0.0
    keys = [(s, float(a)) for s, a in zip(doubled, advantage, strict=True)]
    plan = plan_rows(keys, advantage.numpy(), np.zeros(17), [len(s.response_token_ids) for s in doubled])
    assert len(plan.rows_K) == 11
    assert plan.weights_K.sum() == 14
    assert plan.saved_share > 0.2
    assert [int(plan.representative_B[i]) for i in (3, 14, 16)] == [int(plan.representative_B[3])] * 3
    assert plan.representative_B[4] == -1
    lean_rows = [doubled[i] for i in plan.rows_K]
    for budget in (10_000, 60):
        whole = _trained(doubled, advantage, torch.ones(17), 17.0, budget)
        lean = _trained(lean_rows, advantage[plan.rows_K], torch.from_numpy(plan.weights_K).float(), 17.0, budget)
        assert_equal_weights(whole, lean, atol=1e-7)


def test_dropping_alone_is_exact_to_the_bit():
    """One row per microbatch: the same products of the same shapes, so the zeros must vanish without a trace."""
    advantage = ADVANTAGE.clone()
    advantage[[0, 4, 7, 8, 9, 11]] = 0.0
    kept = advantage != 0
    lean_rows = [s for s, keep in zip(SEQUENCES, kept, strict=True) if keep]
    whole = _trained(SEQUENCES, advantage, torch.ones(14), 14.0, budget=1)
    lean = _trained(lean_rows, advantage[kept], torch.full((8,), 1.0), 14.0, budget=1)
    assert_equal_weights(whole, lean)


def test_rows_with_a_kl_term_are_kept():
    plan = plan_rows(["a", "b", "c"], [0.0, 0.0, 1.0], [0.001, 0.0, 0.0], [1, 1, 1])
    assert plan.rows_K.tolist() == [0, 2]
    with pytest.raises(EngineError, match="equal keys"):
        plan_rows(["a", "a"], [0.0, 1.0], [0.0, 0.0], [1, 1])
    empty = plan_rows(["a", "b"], [0.0, 0.0], [0.0, 0.0], [4, 4])
    assert empty.rows_K.tolist() == []
    assert empty.saved_share == 1.0
    assert [a.tolist() for a in merge_identical(["x", "y", "x"])] == [[0, 1], [0, 1, 0]]


def test_a_minibatch_without_signal_steps_exactly_as_if_computed():
    """Momentum moves the weights even when the gradient is zero: leaving the rows out must not leave the step out."""
    computed, dropped = tiny_agent(), tiny_agent()
    first = sequence_objective(ADVANTAGE, OLD)
    zeros = sequence_objective(torch.zeros(14), OLD)
    for agent, rows in ((computed, SEQUENCES), (dropped, [])):
        trainer = Trainer(agent, config())
        trainer.step(SEQUENCES, first)
        before = weights(agent)
        trainer.step(rows, zeros)
        assert any(not torch.equal(before[name], value) for name, value in weights(agent).items())
    assert_equal_weights(computed, dropped)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"lora": LoraConfig(rank=2, alpha=4.0)},
        {"lora": LoraConfig(rank=2, alpha=4.0), "gradient_checkpointing": True},
    ],
    ids=["plain", "checkpointing", "lora", "both"],
)
def test_what_was_trained_goes_on_exactly_as_what_was_saved(tmp_path, settings):
    """The next stages take the agent from memory: bits, flags and the next update must be those of the file."""
    objective = sequence_objective(ADVANTAGE, OLD)
    trainer = Trainer(tiny_agent(tied=True), config(**settings), seed=3)
    trainer.step(SEQUENCES, objective)
    trainer.save(tmp_path / "one")
    loaded = load_agent(tmp_path / "one")
    kept = replace(trainer.trained(), tokenizer=loaded.tokenizer)  # as WarmModels.keep_agent does
    ours, theirs = kept.model.state_dict(), loaded.model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    flags = [[(name, p.requires_grad) for name, p in a.model.named_parameters()] for a in (kept, loaded)]
    assert flags[0] == flags[1]
    assert [(type(m), m.training) for m in kept.model.modules()] == [
        (type(m), m.training) for m in loaded.model.modules()
    ]
    saved = []
    for number, agent in enumerate((kept, loaded)):
        again = Trainer(agent, config(**settings), optimizer_state=tmp_path / "one", seed=3)
        again.step(SEQUENCES, objective)
        again.save(tmp_path / f"two{number}")
        files = digests(tmp_path / f"two{number}")
        saved.append({name: digest for name, digest in files.items() if not name.startswith("tokenizer")})
    assert saved[0] == saved[1]

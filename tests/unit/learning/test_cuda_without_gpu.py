"""Score, update and checkpoints on CUDA tensors without numbers: devices and types fit, and the host does not wait."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from fake_cuda import fake_cuda, moved_to_cuda
from learning_models import tiny_model, tiny_tokenizer
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hacrl_core.agents.agent import Agent
from hacrl_core.algorithm.objective import ObjectiveRows, make_objective
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.config.training import UpdateConfig
from hacrl_core.errors import AlgorithmError
from hacrl_core.learning.fused import Objective, linear_loss, rowwise
from hacrl_core.learning.scoring import score_sequences
from hacrl_core.learning.sequences import TrainSequence
from hacrl_core.learning.trainer import Trainer

KINDS = ["llama", "qwen3", "gemma3"]
ROWS = 12


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """CUDA without a GPU; the objective's slopes are made up, for autograd refuses such tensors."""

    def with_slopes(
        objective: Objective, logprobs_BT: Tensor, mask_BT: Tensor, rows_B: Tensor, *, wanted: bool
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        loss, stats = objective(logprobs_BT, mask_BT, rows_B)
        return loss, stats, torch.ones_like(logprobs_BT)

    monkeypatch.setattr(linear_loss, "_with_slopes", with_slopes)
    monkeypatch.setattr(rowwise, "_refusal", "no GPU")
    with fake_cuda() as waits:
        yield waits


def agent_on_cuda(kind: str) -> Agent:
    model = moved_to_cuda(tiny_model(kind, tied=kind != "llama"))
    assert isinstance(model, transformers.PreTrainedModel)
    return Agent(model, tiny_tokenizer(), (1,), Path("tiny"))  # type: ignore[arg-type]


def sequences(alike: int = 9) -> list[TrainSequence]:
    return [TrainSequence((3, 4, 5), tuple(range(3, 3 + alike))) for _ in range(ROWS)]


def rows(**changes: object) -> ObjectiveRows:
    zeros = torch.zeros(ROWS, dtype=torch.float64)
    numbers = {
        "sampler_mean_logprob_B": zeros - 1.0,
        "advantage_B": zeros + 0.5,
        "is_own_B": torch.arange(ROWS) % 2 == 0,
        "omega_B": zeros + 1.0,
        "weight_B": zeros + 1.0,
        "old_logprobs": [torch.zeros(9) - 1.0] * ROWS,
        "reference_logprobs": [torch.zeros(9) - 1.0] * ROWS,
    }
    return ObjectiveRows(**{**numbers, "total_weight": float(ROWS), **changes})  # type: ignore[arg-type]


def objective_of(level: str = "sequence", update_index: int = 2) -> Objective:
    with unset_fake_temporarily():
        treatment = "as_own" if level == "token" else "hacpo"
        config = HacpoConfig(ratio_level=level, foreign_treatment=treatment, kl_coefficient=0.01)
        return make_objective(rows(), update_index=update_index, config=config)


def waits_in(work: Callable[[int], object], waits: list[str]) -> list[list[str]]:
    """Where the host waits in one, two and four microbatches of the same rows."""
    found = []
    for microbatches in (1, 2, 4):
        waits.clear()
        work(11 * ROWS // microbatches)
        found.append(list(waits))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_waits_once_however_many_microbatches(kind: str, cuda: list[str]) -> None:
    agent = agent_on_cuda(kind)
    score_sequences(agent, sequences(), token_budget=99)  # the head is looked at once per model
    one, two, four = waits_in(lambda budget: score_sequences(agent, sequences(), token_budget=budget), cuda)
    assert len(one) == len(two) == len(four) == 1, four


def waits_of_updates(agent: Agent, objective: Objective | None, level: str, waits: list[str]) -> list[list[str]]:
    def step(budget: int) -> None:
        trainer = Trainer(agent, UpdateConfig(learning_rate=1e-4, token_budget=budget))
        waits.clear()
        trainer.step(sequences(), objective or objective_of(level))

    return waits_in(step, waits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_an_update_waits_per_step_and_not_per_microbatch(kind: str, level: str, cuda: list[str]) -> None:
    one, two, four = waits_of_updates(agent_on_cuda(kind), None, level, cuda)
    assert 0 < len(one) == len(two) == len(four), sorted(set(four))


def test_the_heads_products_are_exact_float32_whatever_the_process_allows(
    cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[str] = []
    product = torch.mm

    def recorded(*args: Tensor, **kwargs: Tensor) -> Tensor:
        allowed.append(torch.backends.cuda.matmul.fp32_precision)
        return product(*args, **kwargs)

    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        monkeypatch.setattr(linear_loss.torch, "mm", recorded)
        score_sequences(agent_on_cuda("llama"), sequences(), token_budget=99)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert set(allowed) == {"ieee"}


def mixed_devices(logprobs_BT: Tensor) -> Tensor:
    return (logprobs_BT * torch.ones(logprobs_BT.shape)).sum()


def mixed_types(logprobs_BT: Tensor) -> Tensor:
    return torch.mm(logprobs_BT.to(torch.bfloat16), logprobs_BT.t()).sum()


def whole_numbers(logprobs_BT: Tensor) -> Tensor:
    whole = logprobs_BT.to(torch.int64)
    return torch.mm(whole, whole.t()).sum()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (mixed_devices, "at least two devices"),
        (mixed_types, "product of different types"),
        (whole_numbers, "no product of torch.int64"),
    ],
)
def test_planted_faults_are_found(fault: Callable[[Tensor], Tensor], says: str, cuda: list[str]) -> None:
    trainer = Trainer(agent_on_cuda("llama"), UpdateConfig(learning_rate=1e-4))
    with pytest.raises((RuntimeError, TypeError), match=says):
        trainer.step(sequences(), lambda logprobs_BT, mask_BT, rows_B: (fault(logprobs_BT), {}))


@pytest.mark.parametrize(
    "fault",
    [
        lambda x, mask: float(x.sum()),
        lambda x, mask: bool((x > 0).any()),
        lambda x, mask: x.cpu(),
        lambda x, mask: x[mask],
        lambda x, mask: mask.nonzero(),
        lambda x, mask: torch.zeros(3).to(x.device),
    ],
    ids=["float", "bool", "cpu", "mask", "nonzero", "copy"],
)
def test_planted_waits_are_counted_in_every_microbatch(
    fault: Callable[[Tensor, Tensor], object], cuda: list[str]
) -> None:
    def objective(logprobs_BT: Tensor, mask_BT: Tensor, rows_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        fault(logprobs_BT, mask_BT)
        return logprobs_BT.sum(), {}

    one, two, four = waits_of_updates(agent_on_cuda("llama"), objective, "sequence", cuda)
    assert (len(two) - len(one), len(four) - len(one)) == (1, 3)


def test_what_a_gpu_leaves_open_is_refused_by_name_when_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    with unset_fake_temporarily():
        config = HacpoConfig(kl_coefficient=0.01)
        ids = [f"r{row}" for row in range(ROWS)]
        objective = make_objective(rows(rollout_ids=ids), update_index=2, config=config)
        short = make_objective(
            rows(rollout_ids=ids, old_logprobs=[torch.zeros(7)] * ROWS), update_index=2, config=config
        )
        good, mask = torch.zeros(2, 9) - 1.0, torch.ones(2, 9, dtype=torch.bool)
        bad = good.index_fill(0, torch.tensor([1]), torch.nan)
        cases = [
            (objective, bad, mask, "NaN or infinite: rollout r4"),
            (short, good, mask, "7 log-probs for the 9 tokens"),
        ]
        cases.append((objective, good, mask & torch.tensor([[True], [False]]), "without tokens: rollout r4"))
        for made, logprobs, where, says in cases:
            with pytest.raises(AlgorithmError, match=says):
                made(logprobs, where, torch.tensor([3, 4]))
            with monkeypatch.context() as later:  # as on a GPU, where nothing is asked at once
                later.setattr(type(made), "refuse", lambda self, faults: self.unsettled.append(faults))
                made(logprobs, where, torch.tensor([3, 4]))
            with pytest.raises(AlgorithmError, match=says):
                made.settle()
            made.settle()

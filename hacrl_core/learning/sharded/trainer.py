"""The trainer of several ranks: each runs its rows through the sharded model and steps its slices of the weights.

It does what `hacrl_core.learning.trainer.Trainer` does on one process, up to the order of sums. Every rank calls the
same methods with the same sequences, and gets the same answers.
"""

import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hacrl_core.agents import checkpoints
from hacrl_core.agents.out_of_memory import out_of_memory_explained
from hacrl_core.config.training import UpdateConfig
from hacrl_core.errors import EngineError
from hacrl_core.learning.fused import (
    Gradients,
    Head,
    Objective,
    Outcome,
    Settles,
    fused_pass,
    loss_node,
    plan_chunks,
    read_head,
)
from hacrl_core.learning.prefixes import attention_of, response_states
from hacrl_core.learning.scoring import by_sequence
from hacrl_core.learning.sequences import Ints, Microbatch, TrainSequence, check_sequences, microbatches
from hacrl_core.learning.sharded import adapters
from hacrl_core.learning.sharded.dealing import deal
from hacrl_core.learning.sharded.loading import TensorFiles, local, rows_of
from hacrl_core.learning.sharded.policy import ShardedAgent, set_checkpointing, slices
from hacrl_core.learning.sharded.saving import save_version
from hacrl_core.learning.sharded.scoring import all_rows
from hacrl_core.learning.trainer import FAR, StepResult, exact_norm, mean_entropies

_REMEDY = "lower update.token_budget or update.max_logits_mb, set update.gradient_checkpointing, or use more ranks"


@dataclass(frozen=True)
class _Share:
    """What one rank found out about a minibatch."""

    loss: float
    stats: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]  # rows of the minibatch, their numbers
    tokens: int
    padded: int


class ShardedTrainer:
    """Updates a sharded agent in place; one per rank, all of them in step."""

    def __init__(self, agent: ShardedAgent, config: UpdateConfig, *, optimizer_state: Path | None = None) -> None:
        """``optimizer_state`` is a folder with moments that any number of ranks has saved."""
        self.agent = agent
        self.config = config
        self.updates = 0
        self._rank = agent.rank
        self._names = [name for name, _ in slices(agent.model, trained=True)]
        self._sharded = [parameter for _, parameter in slices(agent.model, trained=True)]
        # AdamW works number by number: on plain slices it does to each number what it does on one process.
        self._slices = [nn.Parameter(local(parameter)) for parameter in self._sharded]
        self._optimizer = torch.optim.AdamW(
            [p for p in self._slices if p.numel()] or self._slices,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        set_checkpointing(agent, config.gradient_checkpointing)
        if optimizer_state is not None:
            self.updates = self._load_moments(optimizer_state)

    def step(self, sequences: Sequence[TrainSequence], objective: Objective) -> StepResult:
        """One optimizer step on a minibatch; one without sequences makes its step with a zero gradient."""
        share = self._accumulate(sequences, objective)
        norm = self._norm()
        finite = math.isfinite(share.loss) and math.isfinite(norm)
        if finite:
            for parameter, sharded in zip(self._slices, self._sharded, strict=True):
                parameter.grad = torch.zeros_like(parameter) if sharded.grad is None else local(sharded.grad)
                if norm > self.config.gradient_norm:
                    parameter.grad.mul_(self.config.gradient_norm / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = self.config.learning_rate * min(
                    1.0, (self.updates + 1) / max(1, self.config.warmup_updates)
                )
            with out_of_memory_explained(self.agent.checkpoint, f"training on {self._rank.device}", _REMEDY):
                self._optimizer.step()
            self.updates += 1
            self._forget_gradient()
        stats = {name: values for name, (_, values) in share.stats.items()}
        return StepResult(share.loss, norm, stats, share.tokens, 1 - share.tokens / max(1, share.padded), finite)

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Return the log-probs of the response tokens as a `step` on these sequences computes them now.

        Gradients stay enabled, because without them torch may choose another kernel.
        """
        hand, batches, idle = self._own_batches(sequences)
        with out_of_memory_explained(self.agent.checkpoint, f"training on {self._rank.device}", _REMEDY):
            found = [self._pass(batch, None).logprobs_R.detach() for batch in batches]
            for batch in idle:
                self._pass(batch, None)
        self.agent.policy.reshard()  # type: ignore[operator]
        return all_rows(self._rank, hand, by_sequence(batches, found, len(sequences)))

    def gradient_norm(self, sequences: Sequence[TrainSequence], objective: Objective, *, add: bool = False) -> float:
        """Return the norm of the loss's gradient; with ``add``, of its sum with the gradient of the call before."""
        self._accumulate(sequences, objective, add=add)
        return self._norm()

    def whole_gradient(self, name: str) -> Tensor:
        """Gather the gradient of one parameter on every rank; for tests and questions, not for training."""
        parameter = self._sharded[self._names.index(name)]
        if parameter.grad is None:
            return torch.zeros(parameter.shape)
        whole: Tensor = parameter.grad.full_tensor()  # type: ignore[attr-defined]
        return whole

    def is_finite(self) -> bool:
        """Whether every trained weight and every moment of the optimizer is a number, on every rank."""
        moments = [t for state in self._optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        with torch.no_grad():
            numbers = [t for t in (*self._slices, *moments) if t.numel()]
            largest = torch._foreach_norm(numbers, ord=math.inf) if numbers else []
        fine = all(math.isfinite(float(norm)) for norm in largest)
        return all(self._rank.gather(fine))

    def gives_finite(self, sequences: Sequence[TrainSequence], objective: Objective, steps: int) -> bool:
        """Whether loss and gradient of these sequences are finite under the weights of now; nothing is updated."""
        with torch.set_grad_enabled(self.config.learning_rate * steps > FAR):
            share = self._accumulate(sequences, objective)
        finite = math.isfinite(share.loss) and math.isfinite(self._norm())
        self._forget_gradient()
        return finite

    def save(self, folder: Path) -> None:
        """Write a plain checkpoint that runs alone, and the state needed to train on with any number of ranks."""
        moments = {}
        for name, parameter in zip(self._names, self._slices, strict=True):
            state = self._optimizer.state.get(parameter, {})
            for moment in checkpoints.MOMENTS:
                moments[f"{moment}/{name}"] = state[moment] if state else torch.zeros_like(parameter)
        save_version(self.agent, folder, moments, self.updates, self.config.files_of_state)

    def trained(self) -> ShardedAgent:
        """Return the agent with the weights that ``save`` wrote; its version has no digest yet.

        The trainer's memory is freed, so it cannot be used afterwards.
        """
        self._forget_gradient()
        self._optimizer.state.clear()
        if self.config.lora is not None:
            adapters.fold(self.agent.model, self._rank)
        return replace(self.agent, digest="", folded=self.config.lora is not None)

    def peak_memory_bytes(self) -> int:
        """Return the largest peak of the ranks: of the process (CPU) or of the device's allocator (CUDA)."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._rank.device.type == "cuda":
            own = torch.cuda.max_memory_allocated(self._rank.device)
        return max(self._rank.gather(own))

    def _forget_gradient(self) -> None:
        for parameter, sharded in zip(self._slices, self._sharded, strict=True):
            parameter.grad = sharded.grad = None

    def _norm(self) -> float:
        """Return the norm of the gradient over all ranks, right to 1e-5 at any size."""
        gradients = [local(p.grad).flatten() for p in self._sharded if p.grad is not None]
        own = sum(exact_norm(gradient) ** 2 for gradient in gradients if gradient.numel())
        return math.sqrt(sum(self._rank.gather(float(own))))

    def _accumulate(self, sequences: Sequence[TrainSequence], objective: Objective, *, add: bool = False) -> _Share:
        """Add the gradient of the minibatch to the slices, and return what all ranks together found."""
        agent = self.agent
        _, batches, idle = self._own_batches(sequences)
        if not add:
            self._forget_gradient()
        with out_of_memory_explained(agent.checkpoint, f"training on {self._rank.device}", _REMEDY):
            outcomes = [self._pass(batch, objective) for batch in batches]
            for batch in idle:
                self._pass(batch, _no_loss)
        agent.policy.reshard()  # type: ignore[operator]
        if isinstance(objective, Settles):
            objective.settle()
        return _together(self._rank.gather(self._share(batches, outcomes)), len(sequences))

    def _own_batches(self, sequences: Sequence[TrainSequence]) -> tuple[Ints, list[Microbatch], list[Microbatch]]:
        """Return the rows of the minibatch that are this rank's, their microbatches, and what to run after those.

        FSDP2 gathers weights in every microbatch, and a rank that left one out would keep the others waiting. So all
        ranks agree on the number beforehand, and one that has fewer runs the shortest row for the rest, for nothing.
        """
        agent = self.agent
        check_sequences(sequences, vocabulary=agent.vocabulary, context_length=agent.context_length)
        hand = deal(sequences, self._rank.count, whole_prompts=agent.shares_prefixes)[self._rank.index]
        batches = microbatches(
            [sequences[row] for row in hand],
            self.config.token_budget,
            agent.pad_token_id,
            share_prefixes=agent.shares_prefixes,
        )
        batches = [replace(batch, rows_B=hand[batch.rows_B]) for batch in batches]
        missing = max(self._rank.gather(len(batches))) - len(batches)
        shortest = sorted(sequences, key=lambda s: len(s.prompt_token_ids) + len(s.response_token_ids))[:1]
        return hand, batches, microbatches(shortest, 1, agent.pad_token_id) * missing

    def _pass(self, batch: Microbatch, objective: Objective | None) -> Outcome:
        """Run one microbatch forward and, with an objective and where gradients are enabled, backward."""
        device = self._rank.device
        targets_R = torch.from_numpy(batch.targets_R).to(device, non_blocking=True)
        rows_B = torch.from_numpy(batch.rows_B).to(device, non_blocking=True)
        found: list[Outcome] = []

        def work(model: nn.Module) -> Tensor:
            hidden_RH = response_states(model, batch)
            head = read_head(model)
            limit = self.config.max_logits_mb
            chunks = plan_chunks(batch.lengths, len(head.weight_VH), max_logits_mb=limit, device=device)

            def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, gradients: Gradients | None) -> Tensor:
                outcome = fused_pass(
                    hidden,
                    Head(weight, bias, head.scale, head.softcap),
                    targets_R,
                    batch.lengths,
                    rows_B,
                    chunks,
                    temperature=self.config.temperature,
                    objective=objective,
                    gradients=gradients,
                    entropy=self.config.entropy,
                    precision=self.config.head_precision,
                )
                found.append(outcome)
                return outcome.loss.clone()

            if not torch.is_grad_enabled() or objective is None:
                return run(hidden_RH.detach(), head.weight_VH, head.bias_V, None)
            return loss_node(hidden_RH, head, run)

        loss = self.agent.policy(work)
        if torch.is_grad_enabled() and objective is not None:
            with attention_of(self.agent.model, batch):
                loss.backward()
        return found[0]

    def _share(self, batches: Sequence[Microbatch], outcomes: Sequence[Outcome]) -> _Share:
        parts = [part for outcome in outcomes for part in outcome.stats]
        rows = torch.cat([rows_B for rows_B, _ in parts]).cpu().numpy() if parts else np.zeros(0, np.int64)
        names = parts[0][1] if parts else {}
        stats = {name: (rows, torch.cat([stats[name] for _, stats in parts]).double().cpu().numpy()) for name in names}
        if self.config.entropy and batches:
            order = np.concatenate([batch.rows_B for batch in batches])
            stats["entropy"] = (order, mean_entropies(batches, outcomes))
        return _Share(
            loss=float(sum(outcome.loss for outcome in outcomes)),
            stats=stats,
            tokens=sum(batch.tokens for batch in batches),
            padded=sum(batch.input_ids_BT.size for batch in batches),
        )

    def _load_moments(self, folder: Path) -> int:
        """Read this rank's rows of saved moments; return the number of updates they have seen."""
        updates, paths = checkpoints.optimizer_files(folder)
        with TensorFiles(paths) as files:
            if set(files) != {f"{moment}/{name}" for moment in checkpoints.MOMENTS for name in self._names}:
                raise EngineError(
                    f"optimizer state {folder}: belongs to other parameters (changed model or LoRA settings); "
                    "start without it"
                )
            for name, parameter, sharded in zip(self._names, self._slices, self._sharded, strict=True):
                state: dict[str, Tensor] = {"step": torch.tensor(float(updates), device=parameter.device)}
                for moment in checkpoints.MOMENTS:
                    entry = f"{moment}/{name}"
                    if files.shape(entry) != tuple(sharded.shape):
                        raise EngineError(
                            f"optimizer state {folder}: {name} has another shape than in the model; start without it"
                        )
                    rows = files.rows(entry, rows_of(sharded.shape[0], self._rank))
                    state[moment] = rows.to(parameter.device).clone()
                self._optimizer.state[parameter] = state
        return updates


def _no_loss(logprobs_BT: Tensor, mask_BT: Tensor, rows_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs_BT.new_zeros(()), {}


def _together(shares: Sequence[_Share], rows: int) -> _Share:
    """Add up the ranks' shares, in their order, and put the rows' numbers into the order of the minibatch."""
    stats = {}
    for name in dict.fromkeys(name for share in shares for name in share.stats):
        column = np.empty(rows)
        for share in shares:
            if name in share.stats:
                order, values = share.stats[name]
                column[order] = values
        stats[name] = (np.arange(rows), column)
    return _Share(
        loss=sum(share.loss for share in shares),
        stats=stats,
        tokens=sum(share.tokens for share in shares),
        padded=sum(share.padded for share in shares),
    )

"""The trainer: forward and backward over microbatches, gradient clip, AdamW.

Blind to the algorithm: the loss is an argument.
"""

import math
import resource
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from hacrl_core.agents import checkpoints
from hacrl_core.agents.agent import Agent
from hacrl_core.agents.freed_memory import is_large, large_blocks_given_back
from hacrl_core.agents.out_of_memory import out_of_memory_explained
from hacrl_core.config.training import UpdateConfig
from hacrl_core.errors import EngineError
from hacrl_core.learning import lora
from hacrl_core.learning.fused import (
    Chunk,
    Gradients,
    Head,
    Objective,
    Outcome,
    Settles,
    fused_pass,
    plan_chunks,
    read_head,
)
from hacrl_core.learning.prefixes import attention_of, response_states, shares_prefixes
from hacrl_core.learning.scoring import by_sequence
from hacrl_core.learning.sequences import Microbatch, TrainSequence, check_sequences, microbatches, padding_share

# One float32 sum over a long buffer stagnates: a norm of 134M elements came out 1.4 % too small.
_ONE_SUM = 1 << 19
_BLOCK = 1 << 12
FAR = 1e-2  # learning rate × steps beyond which an update may have led anywhere


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    gradient_norm: float  # before clipping
    stats: dict[str, npt.NDArray[np.float64]]  # the objective's statistics, one number per sequence, in the order given
    tokens: int  # that went through the model, padding left out
    padding_share: float
    finite: bool  # False: loss or gradient was not finite, and weights and optimizer are untouched


class Trainer:
    """Updates ``agent.model`` in place.

    The model stays in evaluation mode: dropout would make the learner's log-probs differ from the scored ones, and the
    ratio is compared with a window of 3e-4.
    """

    def __init__(
        self, agent: Agent, config: UpdateConfig, *, optimizer_state: Path | None = None, seed: int = 0
    ) -> None:
        """``optimizer_state`` is a folder written by ``save``; ``seed`` is used to initialise LoRA adapters only."""
        self.agent = agent
        self.config = config
        self.updates = 0
        if any(p.dtype != torch.float32 for p in agent.model.parameters()):
            raise EngineError(
                f"agent {agent.checkpoint}: training needs float32 master weights; load it with dtype=torch.float32"
            )
        agent.model.eval()
        read_head(agent.model)  # refuses unsupported heads before any adapter is attached
        self._shares_prefixes = config.autocast == "none" and shares_prefixes(agent.model)
        self._adapters = (
            lora.attach(agent.model, config.lora, optimizer_state, seed, as_merged=config.autocast == "bf16")
            if config.lora
            else None
        )
        trained = [(name, p) for name, p in agent.model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in trained], [p for _, p in trained]
        with self._memory_explained():
            self._gradient = _one_buffer(self._parameters)
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if config.gradient_checkpointing:
            _checkpoint_layers(agent)
        # Layers that run again leave gaps of every size: 2.7 GB at 135M parameters and 4096 tokens, more than the rest.
        self._gives_back = config.gradient_checkpointing and agent.device.type == "cpu" and is_large(agent.model)
        if optimizer_state is not None:
            self.updates = checkpoints.load_optimizer(optimizer_state, self._optimizer, self._names)

    def step(self, sequences: Sequence[TrainSequence], objective: Objective) -> StepResult:
        """One optimizer step on a minibatch.

        A minibatch without sequences (all of them dropped as certain zeros) still makes its step with a zero gradient:
        AdamW moves on by its momentum and decays the weights, exactly as if the zeros had been computed.
        """
        loss, stats, batches = self._accumulate(sequences, objective)
        # Tiny agents keep the plain sum that they have always been clipped by, bit for bit.
        few = self._gradient.numel() <= _ONE_SUM
        norm = float(torch.linalg.vector_norm(self._gradient)) if few else exact_norm(self._gradient)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            if norm > self.config.gradient_norm:
                self._gradient.mul_(self.config.gradient_norm / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = self.config.learning_rate * min(
                    1.0, (self.updates + 1) / max(1, self.config.warmup_updates)
                )
            with self._memory_explained():  # the first step makes the moments
                self._optimizer.step()
            self.updates += 1
        return StepResult(loss, norm, stats, sum(batch.tokens for batch in batches), padding_share(batches), finite)

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Return the log-probs of the response tokens as a `step` on these sequences computes them under these weights.

        Microbatches and kernels are the step's own: under autocast another batch shape rounds differently. Gradients
        stay enabled, because without them torch may choose another kernel.
        """
        head = read_head(self.agent.model)
        batches = self._microbatches(sequences, head)
        found = []
        with self._memory_explained(), large_blocks_given_back(wanted=self._gives_back):
            for batch in batches:
                hidden_RH = self._states(batch).detach()
                targets_R = torch.from_numpy(batch.targets_R).to(self.agent.device, non_blocking=True)
                chunks = self._chunks(batch, head)
                outcome = fused_pass(
                    hidden_RH,
                    head,
                    targets_R,
                    batch.lengths,
                    targets_R,
                    chunks,
                    temperature=self.config.temperature,
                    precision=self.config.head_precision,
                )
                found.append(outcome.logprobs_R.detach())
        return by_sequence(batches, found, len(sequences))

    def gradient(self, sequences: Sequence[TrainSequence], objective: Objective) -> Tensor:
        """Return the gradient of the loss, flat and unclipped; nothing is updated."""
        self._accumulate(sequences, objective)
        return self._gradient.clone()

    def gradient_norm(self, sequences: Sequence[TrainSequence], objective: Objective, *, add: bool = False) -> float:
        """Return the norm of the loss's gradient; with ``add``, of its sum with the gradient of the call before.

        Nothing is updated. Norms of two gradients and of their sum give their cosine without a copy of either.
        """
        self._accumulate(sequences, objective, add=add)
        return exact_norm(self._gradient)

    def is_finite(self) -> bool:
        """Whether every trained weight and every moment of the optimizer is a number."""
        moments = [t for state in self._optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        with torch.no_grad():
            numbers = [t for t in (*self._parameters, *moments) if t.numel()]  # an empty one has no largest
            # Sums of squares are sixteen times faster than the largest, and overflow where that may be finite.
            return _all_finite(torch._foreach_norm(numbers)) or _all_finite(torch._foreach_norm(numbers, ord=math.inf))

    def gives_finite(self, sequences: Sequence[TrainSequence], objective: Objective, steps: int) -> bool:
        """Whether loss and gradient of these sequences are finite under the weights of now; nothing is updated.

        The gradient was finite at weights ``steps`` updates ago. AdamW moves a weight by a few times the learning rate
        per step at most, so where that is little, it is finite still, and the loss alone is looked at.
        """
        with torch.set_grad_enabled(self.config.learning_rate * steps > FAR):
            loss, _, _ = self._accumulate(sequences, objective)
        return math.isfinite(loss) and math.isfinite(exact_norm(self._gradient))  # isfinite would copy the buffer

    def save(self, folder: Path) -> None:
        """Write a plain checkpoint that runs alone, with the tokenizer and the state needed to train on."""
        folder.mkdir(parents=True, exist_ok=True)
        merged = None if self._adapters is None else lora.save(self._adapters, self.agent.model, folder)
        checkpoints.save_model(self.agent, folder, merged)
        checkpoints.save_optimizer(folder, self._optimizer, self._names, self.updates, files=self.config.files_of_state)

    def trained(self) -> Agent:
        """Return the agent as if loaded from what ``save`` wrote, so that no stage has to read it again.

        Adapters are merged, as in the file. The trainer's memory is freed, so it cannot be used afterwards.
        """
        for parameter in self._parameters:
            parameter.grad = None
        if self._adapters is not None:
            lora.merge(self._adapters)
            self._adapters = None
        if self.config.gradient_checkpointing:
            self.agent.model.gradient_checkpointing_disable()
            self.agent.model.eval()
        return self.agent

    def peak_memory_bytes(self) -> int:
        """Return the peak of the process (CPU) or of the device's allocator (CUDA)."""
        if self.agent.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.agent.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _accumulate(
        self, sequences: Sequence[TrainSequence], objective: Objective, *, add: bool = False
    ) -> tuple[float, dict[str, npt.NDArray[np.float64]], list[Microbatch]]:
        head = read_head(self.agent.model)
        batches = self._microbatches(sequences, head)
        if not add:
            self._gradient.zero_()
        with self._memory_explained(), large_blocks_given_back(wanted=self._gives_back):
            outcomes = [self._backward(batch, head, objective) for batch in batches]
        if isinstance(objective, Settles):
            objective.settle()
        loss = float(sum(outcome.loss for outcome in outcomes))
        stats = _rowwise(outcomes, len(sequences))
        if self.config.entropy and outcomes:
            entropies = np.empty(len(sequences))
            entropies[np.concatenate([batch.rows_B for batch in batches])] = mean_entropies(batches, outcomes)
            stats["entropy"] = entropies
        return loss, stats, batches

    def _microbatches(self, sequences: Sequence[TrainSequence], head: Head) -> list[Microbatch]:
        check_sequences(sequences, vocabulary=len(head.weight_VH), context_length=self.agent.context_length)
        return microbatches(
            sequences, self.config.token_budget, self.agent.pad_token_id, share_prefixes=self._shares_prefixes
        )

    def _states(self, batch: Microbatch) -> Tensor:
        """Return the last hidden states that predict the responses' tokens.

        Autocast keeps no copies of its own: the graph has those that the backward pass needs, which with checkpointing
        are one layer's.
        """
        half = self.config.autocast == "bf16"
        with torch.autocast(self.agent.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            return response_states(self.agent.model, batch)

    def _chunks(self, batch: Microbatch, head: Head) -> list[Chunk]:
        """Return which rows of logits are computed together, alike for a step and for its old log-probs."""
        limit = self.config.max_logits_mb
        return plan_chunks(batch.lengths, len(head.weight_VH), max_logits_mb=limit, device=self.agent.device)

    def _memory_explained(self) -> AbstractContextManager[None]:
        remedy = (
            "lower update.token_budget or update.max_logits_mb, set update.gradient_checkpointing, or train update.lora"
        )
        return out_of_memory_explained(self.agent.checkpoint, f"training on {self.agent.device}", remedy)

    def _backward(self, batch: Microbatch, head: Head, objective: Objective) -> Outcome:
        """Add the microbatch's gradient to the parameters' ``grad``."""
        config, device = self.config, self.agent.device
        hidden_RH = self._states(batch)
        gradients = Gradients(
            torch.zeros_like(hidden_RH, dtype=torch.float32),
            head.weight_VH.grad if head.weight_VH.requires_grad else None,
            head.bias_V.grad if head.bias_V is not None and head.bias_V.requires_grad else None,
        )
        outcome = fused_pass(
            hidden_RH,
            head,
            torch.from_numpy(batch.targets_R).to(device, non_blocking=True),
            batch.lengths,
            torch.from_numpy(batch.rows_B).to(device, non_blocking=True),
            self._chunks(batch, head),
            temperature=config.temperature,
            objective=objective,
            gradients=gradients,
            entropy=config.entropy,
            precision=config.head_precision,
        )
        if hidden_RH.requires_grad and outcome.has_gradient:
            with attention_of(self.agent.model, batch):
                torch.autograd.backward(hidden_RH, gradients.hidden_RH.to(hidden_RH.dtype))
        return outcome


def exact_norm(flat: Tensor) -> float:
    """Return the Euclidean norm of a flat float32 tensor, right to 1e-5 at any size, without a copy of it."""
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:]).view(1)
    return float(torch.linalg.vector_norm(torch.cat([blocks, rest]).cpu().double()))


def _all_finite(norms: Sequence[Tensor]) -> bool:
    """A norm is NaN if one of its numbers is."""
    return bool(torch.isfinite(torch.stack([norm.cpu() for norm in norms])).all())


def _one_buffer(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """Give all gradients one flat tensor, so that zeroing, norm and clip are one call each."""
    flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


def _checkpoint_layers(agent: Agent) -> None:
    """Recompute layers in the backward pass.

    transformers does so only in training mode, so the layers' own flag is set, and not that of the modules inside them:
    dropout stays off.
    """
    agent.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in agent.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise EngineError(
            f"model {type(agent.model).__name__}: has no layers to checkpoint; set gradient_checkpointing: false"
        )
    for layer in layers:
        layer.training = True


def _rowwise(outcomes: Sequence[Outcome], rows: int) -> dict[str, npt.NDArray[np.float64]]:
    parts = [part for outcome in outcomes for part in outcome.stats]
    if not parts:
        return {}
    order = torch.cat([rows_B for rows_B, _ in parts]).cpu().numpy()
    table = {}
    for name in parts[0][1]:
        column = np.empty(rows)
        column[order] = torch.cat([stats[name] for _, stats in parts]).cpu().numpy()
        table[name] = column
    return table


def mean_entropies(batches: Sequence[Microbatch], outcomes: Sequence[Outcome]) -> npt.NDArray[np.float64]:
    """Return the mean entropy along each response, in the order of the microbatches' rows."""
    means = []
    for batch, outcome in zip(batches, outcomes, strict=True):
        assert outcome.entropies_R is not None
        lengths = np.array(batch.lengths)
        sums = np.add.reduceat(outcome.entropies_R.cpu().numpy(), np.cumsum(lengths) - lengths)
        means.append((sums / lengths).astype(np.float64))
    return np.concatenate(means)

"""A whole update against TRL's GRPOTrainer with sequence-level ratios: same model, same sequences, same AdamW.

TRL's trainer runs as shipped, except that its generation is replaced by the prepared responses, so that both sides time
forward, backward, clip and optimizer only. First every response is informative, then half of the groups have no signal.
CPU seconds of the process, one thread, rounds alternate between the two. Prints a table and one JSON line. Run:
``python benchmarks/update.py`` (needs the ``bench`` extra).
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from hacrl_core.agents.agent import Agent
from hacrl_core.config.training import UpdateConfig
from hacrl_core.learning.sequences import TrainSequence, plan_rows
from hacrl_core.learning.trainer import Trainer

PROMPTS, SAMPLES, VOCABULARY, PAD, END = 16, 8, 256, 0, 1
LEARNING_RATE = 1e-4


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=END, bos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<end>": END, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def make_sequences(longest: int) -> list[TrainSequence]:
    """Prompts of 8 to 24 tokens; responses from a few tokens to the longest allowed, as sampling gives them."""
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(PROMPTS):
        prompt = tuple(int(i) for i in rng.integers(2, VOCABULARY, rng.integers(8, 25)))
        for _ in range(SAMPLES):
            length = int(rng.integers(max(2, longest // 4), longest + 1))
            sequences.append(TrainSequence(prompt, tuple(int(i) for i in rng.integers(2, VOCABULARY, length))))
    return sequences


def make_advantages(informative: float) -> Tensor:
    advantage_PG = torch.randn(PROMPTS, SAMPLES, generator=torch.Generator().manual_seed(1))
    advantage_PG = advantage_PG - advantage_PG.mean(1, keepdim=True)
    advantage_PG[int(PROMPTS * informative) :] = 0.0
    return advantage_PG.flatten()


def pad(rows: list[tuple[int, ...]], left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        part = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, part], mask[i, part] = torch.tensor(row), 1
    return ids, mask


class PreparedGRPO(GRPOTrainer):
    """TRL's trainer on given responses."""

    prepared: dict[str, Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return dict(self.prepared)


class Clock(TrainerCallback):
    """CPU time at the end of each optimizer step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.process_time())


def trl_seconds(
    sequences: list[TrainSequence], advantages: Tensor, steps: int, microbatch: int, folder: str
) -> tuple[float, Tensor]:
    """Seconds per update after the first, and the weights after the last."""
    clock, model = Clock(), make_model()
    arguments = GRPOConfig(
        output_dir=folder, max_steps=steps + 1, per_device_train_batch_size=microbatch, num_generations=SAMPLES,
        gradient_accumulation_steps=len(sequences) // microbatch, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.01, beta=0.0, loss_type="grpo", importance_sampling_level="sequence", max_grad_norm=1.0,
        epsilon=3e-4, epsilon_high=4e-4,
        bf16=False, gradient_checkpointing=False, use_cpu=True, report_to=[], logging_strategy="no",
        save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["w3 w4"] * PROMPTS})
    trainer = PreparedGRPO(
        model, lambda completions, **_: [0.0] * len(completions), args=arguments, train_dataset=data,
        processing_class=make_tokenizer(),
        callbacks=[clock],
    )  # fmt: skip
    prompt_ids, prompt_mask = pad([s.prompt_token_ids for s in sequences], left=True)
    completion_ids, completion_mask = pad([s.response_token_ids for s in sequences], left=False)
    trainer.prepared = {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages, "num_items_in_batch": completion_mask.sum(),
    }  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return statistics.median(np.diff(clock.ends)), flat_weights(model)


def our_seconds(
    sequences: list[TrainSequence], advantages: Tensor, steps: int, token_budget: int
) -> tuple[float, Tensor]:
    """Planning of the rows included: leaving out and merging are part of an update."""
    agent = Agent(make_model(), make_tokenizer(), (END,), Path("bench"))
    trainer = Trainer(agent, UpdateConfig(learning_rate=LEARNING_RATE, token_budget=token_budget, weight_decay=0.01))
    total, ends = len(sequences), []
    for _ in range(steps + 1):
        keys = [
            (s.prompt_token_ids, s.response_token_ids, a) for s, a in zip(sequences, advantages.tolist(), strict=True)
        ]
        plan = plan_rows(keys, advantages.numpy(), np.zeros(total), [len(s.response_token_ids) for s in sequences])
        advantage_K, weight_K = advantages[plan.rows_K], torch.from_numpy(plan.weights_K).float()

        def objective(
            logprobs_BT: Tensor,
            mask_BT: Tensor,
            rows_B: Tensor,
            advantage_K: Tensor = advantage_K,
            weight_K: Tensor = weight_K,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            mean_B = (logprobs_BT * mask_BT).sum(1) / mask_BT.sum(1)
            ratio_B, a_B = (mean_B - mean_B.detach()).exp(), advantage_K[rows_B]
            gain_B = torch.minimum(ratio_B * a_B, ratio_B.clamp(1 - 3e-4, 1 + 4e-4) * a_B)
            return -(gain_B * weight_K[rows_B]).sum() / total, {"ratio": ratio_B.detach()}

        trainer.step([sequences[i] for i in plan.rows_K], objective)
        ends.append(time.process_time())
    return statistics.median(np.diff(ends)), flat_weights(agent.model)


def flat_weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=64, help="longest response in tokens")
    parser.add_argument("--token-budget", type=int, default=2048)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sequences = make_sequences(arguments.longest)
    parameters = sum(p.numel() for p in make_model().parameters())
    print(
        f"{parameters / 1e6:.2f}M parameters, {PROMPTS} prompts × {SAMPLES} responses of up to {arguments.longest} "
        "tokens"
    )
    print(
        f"  {'groups with signal':20s} {'TRL upd/s':>10s} {'ours upd/s':>11s} {'ratio':>6s} {'weights differ by':>18s}"
    )
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        # TRL gets whichever of two microbatch sizes suits it better on this machine.
        probe = {size: trl_seconds(sequences, make_advantages(1.0), 2, size, folder)[0] for size in (128, 32)}
        microbatch = min(probe, key=lambda size: probe[size])
        for informative, target in ((1.0, 2.5), (0.5, 4.0)):
            advantages, pairs, gap = make_advantages(informative), [], 0.0
            for _ in range(arguments.rounds):
                theirs, their_weights = trl_seconds(sequences, advantages, arguments.steps, microbatch, folder)
                ours, our_weights = our_seconds(sequences, advantages, arguments.steps, arguments.token_budget)
                pairs.append((theirs, ours))
                start = flat_weights(make_model())
                gap = float((our_weights - their_weights).norm() / (their_weights - start).norm())
            ratio = statistics.median(theirs / ours for theirs, ours in pairs)
            theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"  {informative:20.0%} {1 / theirs:10.2f} {1 / ours:11.2f} {ratio:6.2f} {gap:17.1%}")
            name = f"updates per CPU second / TRL's, {informative:.0%} of the groups informative"
            figures.append(
                {"name": name, "value": round(float(ratio), 2), "target": target, "met": bool(ratio >= target)}
            )
    for one in figures:
        print(f"  {'met   ' if one['met'] else 'MISSED'} {one['name']}: {one['value']} (target ≥ {one['target']})")
    conditions = (
        f"float32, 1 thread, CPU seconds, {parameters} parameters, {len(sequences)} sequences, TRL microbatch "
        f"{microbatch}, "
        f"our token budget {arguments.token_budget}, median of {arguments.rounds} rounds, torch {torch.__version__}, "
        f"{platform.machine()}"
    )
    print(json.dumps({"benchmark": "update", "figures": figures, "conditions": conditions}))


if __name__ == "__main__":
    main()

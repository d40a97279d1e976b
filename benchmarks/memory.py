"""Peak memory of generate, score and update of two models against the estimate of ``hacrl doctor``.

    python benchmarks/memory.py [gemma]        only the cases whose name matches the expression

Each case runs in a fresh process: weights of the shape of SmolLM2-135M, or of gemma-3-270m with its vocabulary of
262,144 tokens (random: memory does not depend on their values), float32, on the CPU. Ends with an error if the update
takes more than 6 GiB at the default token budget, or if an estimate is more than 10 % off.
"""

import json
import pickle
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GIB = 1 << 30
PROMPT, RESPONSE, ROWS = 56, 200, 16
LIMIT = 6 * GIB
OFF = 0.1  # how far the estimate may be from the peak
CASES = {
    "generate 16 × 256": {"stage": "generate"},
    "generate, bfloat16": {"stage": "generate", "dtype": "bfloat16"},
    "score 16 × 256": {"stage": "score"},
    "score, bf16": {"stage": "score", "autocast": "bf16"},
    "update, default budget": {"stage": "update"},
    "update, budget 2048": {"stage": "update", "token_budget": 2048},
    "update, bf16": {"stage": "update", "autocast": "bf16"},
    "update, checkpointing": {"stage": "update", "token_budget": 4096, "gradient_checkpointing": True},
    "update, bf16 and checkpt.": {
        "stage": "update", "token_budget": 4096, "gradient_checkpointing": True, "autocast": "bf16",
    },
    "update, LoRA rank 16": {"stage": "update", "lora": {"rank": 16, "alpha": 32}},
    "update, LoRA, bf16": {"stage": "update", "lora": {"rank": 16, "alpha": 32}, "autocast": "bf16"},
    "update, LoRA and checkpt.": {
        "stage": "update", "lora": {"rank": 16, "alpha": 32}, "token_budget": 4096, "gradient_checkpointing": True,
    },
    "gradient cosine": {"stage": "update", "cosine": True},
    "2 ranks, score": {"stage": "score", "ranks": 2},
    "2 ranks, score, bf16": {"stage": "score", "ranks": 2, "autocast": "bf16"},
    "2 ranks, update": {"stage": "update", "ranks": 2, "token_budget": 512},
    "2 ranks, update, bf16": {"stage": "update", "ranks": 2, "token_budget": 512, "autocast": "bf16"},
    "2 ranks, update, checkpt.": {
        "stage": "update", "ranks": 2, "token_budget": 2048, "gradient_checkpointing": True,
    },
    "2 ranks, bf16 and checkpt.": {
        "stage": "update", "ranks": 2, "token_budget": 2048, "gradient_checkpointing": True, "autocast": "bf16",
    },
    "2 ranks, update, LoRA": {"stage": "update", "ranks": 2, "token_budget": 512, "lora": {"rank": 16, "alpha": 32}},
    "2 ranks, update, offload": {"stage": "update", "ranks": 2, "token_budget": 512, "offload": "optimizer"},
    "4 ranks, update": {"stage": "update", "ranks": 4, "token_budget": 512},
    "2 ranks, gradient cosine": {"stage": "update", "ranks": 2, "token_budget": 512, "cosine": True},
    "gemma generate": {"stage": "generate", "model": "gemma", "rows": 16, "response": 16},
    "gemma score": {"stage": "score", "model": "gemma", "rows": 4, "response": 80},
    "gemma update": {"stage": "update", "model": "gemma", "rows": 4, "response": 80, "token_budget": 544},
    "gemma update, bf16": {
        "stage": "update", "model": "gemma", "rows": 4, "response": 80, "token_budget": 544, "autocast": "bf16",
    },
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
}  # fmt: skip
GEMMA3 = {
    "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
    "sliding_window": 512,
}  # fmt: skip


def main() -> int:
    print(f"{'case':27} {'estimated':>10} {'measured':>10} {'ratio':>6} {'seconds':>8}")
    worst, far = 0, []
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, case in CASES.items():
        if not re.search(wanted, name):
            continue
        done = subprocess.run([sys.executable, __file__, json.dumps(case)], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}: ended with {done.returncode}: {(done.stderr.splitlines() or [''])[-1]}")
            return 1
        found = json.loads(done.stdout.splitlines()[-1])
        guess, peak = found["estimated"], found["peak"]
        sizes = f"{guess / GIB:8.2f} G {peak / GIB:8.2f} G {guess / peak:6.2f}"
        print(f"{name:27} {sizes} {found['seconds']:8.1f}", flush=True)
        far += [name] if abs(guess / peak - 1) > OFF else []
        worst = max(worst, peak) if name == "update, default budget" else worst
    print(f"update with a budget of 1024 tokens: {worst / GIB:.2f} GiB, at most {LIMIT / GIB:.0f} wanted")
    print(f"estimates more than {OFF:.0%} off: {', '.join(far) or 'none'}")
    return int(worst > LIMIT or bool(far))


def measure(case: dict) -> dict:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hacrl_core.instructions import settle_instructions

    settle_instructions()
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

    from hacrl_core.agents.agent import Agent
    from hacrl_core.config.generation import GenerateConfig
    from hacrl_core.config.training import ScoreConfig, UpdateConfig
    from hacrl_core.learning.memory import estimate, host_bytes
    from hacrl_core.learning.sequences import TrainSequence
    from hacrl_core.learning.shape import shape_of
    from stages import memory as peak

    torch.set_num_threads(1)
    ends = {"tie_word_embeddings": True, "eos_token_id": 2, "pad_token_id": 2}
    large = case.pop("model", "") == "gemma"
    config = Gemma3TextConfig(**GEMMA3, **ends) if large else LlamaConfig(**SMOLLM2, **ends)
    stage, cosine, dtype = case.pop("stage"), case.pop("cosine", False), case.pop("dtype", "float32")
    count, response = case.pop("rows", ROWS if stage == "generate" else None), case.pop("response", RESPONSE)
    generate = GenerateConfig(max_tokens=response, batch_size=count or ROWS, engine={"kind": "builtin", "dtype": dtype})
    update = UpdateConfig(learning_rate=1e-6, **case)
    score = ScoreConfig(autocast=update.autocast, token_budget=min(4096, (count or ROWS) * (PROMPT + response)))
    guess = getattr(estimate(shape_of(config), generate, score, update, PROMPT), stage)
    rng = np.random.default_rng(0)
    # All rows that a microbatch holds, and one more; on every rank.
    budget = score.token_budget if stage == "score" else update.token_budget
    if count is None:
        count = update.ranks * (budget // (PROMPT + response) + 1)
    rows = [tuple(map(int, rng.integers(3, config.vocab_size, PROMPT + response))) for _ in range(count)]
    sequences = [TrainSequence(row[:PROMPT], row[PROMPT:]) for row in rows]
    if update.ranks > 1:
        # On the CPU what is offloaded stays in the same memory: each rank holds its share of it.
        guess += host_bytes(shape_of(config), update) // update.ranks
        return {"estimated": guess, **_on_ranks(config, OnRank(stage, update, sequences, cosine))}
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
    agent = Agent(model, _Tokenizer(), (2,), Path("random"))
    peak.begin()
    begun = time.perf_counter()
    {"generate": _generate, "score": _score, "update": _cosine if cosine else _update}[stage](agent, sequences, update)
    return {"estimated": guess, "peak": peak.end().host_bytes, "seconds": time.perf_counter() - begun}


class _Tokenizer:
    pad_token_id = 2


def _generate(agent, sequences, update) -> None:
    import torch

    from hacrl_core.generation.builtin.decoder import GenericDecoder
    from hacrl_core.generation.builtin.fast import build_fast_decoder
    from hacrl_core.generation.builtin.scheduler import Scheduler, StopRule
    from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
    from hacrl_core.generation.stop_strings import StopStrings

    decoder = build_fast_decoder(agent.model, 2, 8192) or GenericDecoder(agent.model, 2)
    requests = [GenerationRequest(str(i), s.prompt_token_ids, i) for i, s in enumerate(sequences)]
    stop = StopRule((), StopStrings(agent.tokenizer, ()))
    with torch.inference_mode():
        Scheduler(
            decoder, requests, SamplingParams(max_tokens=len(sequences[0].response_token_ids)), stop,
            batch_size=len(sequences), device=agent.device,
            logits_alone=None, on_progress=None,
        ).run()  # fmt: skip


def _score(agent, sequences, update) -> None:
    from hacrl_core.learning.scoring import score_sequences

    budget = min(4096, sum(len(s.prompt_token_ids) + len(s.response_token_ids) for s in sequences))
    score_sequences(agent, sequences, token_budget=budget, autocast=update.autocast)


def _objective(logprobs_BT, mask_BT, rows_B):
    return -(logprobs_BT * mask_BT).sum() / ROWS, {}


def _trainer(agent, update):
    from hacrl_core.learning.sequences import TrainSequence
    from hacrl_core.learning.trainer import Trainer

    trainer = Trainer(agent, update)
    trainer.step([TrainSequence((3, 4), (5, 6))], _objective)  # AdamW's moments are there from the first step on
    return trainer


def _update(agent, sequences, update) -> None:
    _trainer(agent, update).step(sequences, _objective)


def _cosine(agent, sequences, update) -> None:
    """What the learner does for the cosine of two gradients: norms of both and of their sum, in the one buffer."""
    _three_norms(_trainer(agent, update), sequences)


def _three_norms(trainer, sequences) -> None:
    half = len(sequences) // 2
    trainer.gradient_norm(sequences[:half], _objective)
    trainer.gradient_norm(sequences[half:], _objective, add=True)
    trainer.gradient_norm(sequences[half:], _objective)


# -- several ranks -----------------------------------------------------------------------------------------------------


# In a process of its own: rank 0 is the process that measures, and its peak must not contain the whole model.
_WRITE = """
import pickle, sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_config(pickle.load(sys.stdin.buffer)).save_pretrained(sys.argv[1])
"""


def _on_ranks(config, task) -> dict:
    """Return the highest peak of the ranks, and the seconds of the task."""
    from hacrl_core.learning.sharded.ranks import RankGroup

    with tempfile.TemporaryDirectory() as place:
        written = [sys.executable, "-c", _WRITE, place]
        subprocess.run(written, input=pickle.dumps(config), check=True, capture_output=True)
        group = RankGroup(task.update.ranks, "cpu")
        try:
            return group.run(replace(task, checkpoint=place))
        finally:
            group.close()


@dataclass(frozen=True)
class OnRank:
    """What each rank does: load its slices, run the stage, and say how high its memory rose."""

    stage: str
    update: Any
    sequences: list
    cosine: bool
    checkpoint: str = ""

    def __call__(self, rank) -> dict:
        from hacrl_core.config.training import ScoreConfig
        from hacrl_core.learning.sequences import TrainSequence
        from hacrl_core.learning.sharded.policy import load_sharded, numerics_of
        from hacrl_core.learning.sharded.scoring import score_sharded
        from hacrl_core.learning.sharded.trainer import ShardedTrainer
        from stages import memory as peak

        numerics = numerics_of(self.update, "auto", adapters=self.stage == "update")
        agent = load_sharded(rank, Path(self.checkpoint), "", numerics)
        begun = time.perf_counter()
        peak.begin()
        if self.stage == "score":
            score_sharded(agent, self.sequences, token_budget=ScoreConfig().token_budget)
        else:
            trainer = ShardedTrainer(agent, self.update)
            trainer.step([TrainSequence((3, 4), (5, 6))], _objective)
            if self.cosine:
                _three_norms(trainer, self.sequences)
            else:
                trainer.step(self.sequences, _objective)
        peaks = rank.gather(peak.end().host_bytes)
        return {"peak": max(peaks), "seconds": time.perf_counter() - begun}


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    else:
        sys.exit(main())

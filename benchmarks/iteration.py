"""A whole GSPO iteration against TRL's: the second half of ``generate.py``, which runs it.

16 prompts x 8 responses x 16 tokens, GSPO, one update. TRL's GRPOTrainer runs as shipped (sequence-level ratios, no KL,
no logging, whichever of two microbatch sizes is faster here). Ours runs the campaign's own loop and stages (sample,
generate, verify, score, credit, update) in this process with store, Parquet files, checkpoints, optimizer state and
manifests; diagnostics that TRL does not compute here (KL to the start, gradient cosine) are off. Same weights, prompts
and AdamW. Responses are equally long at no cost to either side: the end token has an id that the model has no output
for. The reward, the same on both sides, asks whether the last boxed number of the response is near 96: about every
second one is right, so nearly every group has something to teach. The first step of each round is left out.
"""

import json
import re
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from figures import GROUP, PROMPT_TOKENS, TINY, figure
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from flows.campaign import run_campaign
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from stages.runner import run_stage
from stages.spec import Context, StageCall

PROMPTS, RESPONSE_TOKENS, POOL = 16, 16, 64  # prompts per iteration, tokens per response, prompts to draw from
NEVER = 256  # the end token: the model has 256 outputs, 0 to 255
LEARNING_RATE = 1e-4
GOLD, NEAR = 96.0, 0.5  # 48 to 192 are right


class Clock(TrainerCallback):  # type: ignore[misc]
    """CPU and wall time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def mark(self) -> None:
        self.ends.append((time.process_time(), time.perf_counter()))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.mark()

    def seconds(self) -> tuple[list[float], list[float]]:
        """CPU and wall seconds of every step but the first."""
        cpu_K, wall_K = np.diff(np.array(self.ends), axis=0).T
        return cpu_K.tolist(), wall_K.tolist()


def word(token: int) -> str:
    return f"\\boxed{{{token}}}"


def save_numbers_agent(folder: Path) -> None:
    """The 0.9M-parameter model with a vocabulary of numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(**TINY, eos_token_id=NEVER, pad_token_id=0, bos_token_id=None)
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({**{word(i): i for i in range(NEVER)}, "<end>": NEVER}, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=word(0), eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def numbers_prompts() -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(map(word, rng.integers(1, NEVER, PROMPT_TOKENS).tolist())) for _ in range(POOL)]


def near_gold(completions: list[str], **_: Any) -> list[float]:
    numbers = [float((re.findall(r"\\boxed\{(\d+)\}", text) or ["0"])[-1]) for text in completions]
    return [float(abs(number - GOLD) <= NEAR * max(number, GOLD)) for number in numbers]


def trl_clock(agent: Path, folder: str, steps: int, microbatch: int = PROMPTS * GROUP) -> Clock:
    arguments = GRPOConfig(
        output_dir=folder, max_steps=steps + 1, per_device_train_batch_size=microbatch, num_generations=GROUP,
        gradient_accumulation_steps=PROMPTS * GROUP // microbatch,
        max_completion_length=RESPONSE_TOKENS, temperature=1.0, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.01, beta=0.0, loss_type="grpo", importance_sampling_level="sequence", scale_rewards="group",
        max_grad_norm=1.0,
        epsilon=3e-4, epsilon_high=4e-4, bf16=False, gradient_checkpointing=False, use_cpu=True, report_to=[],
        logging_strategy="no",
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        LlamaForCausalLM.from_pretrained(agent), near_gold, args=arguments,
        train_dataset=Dataset.from_dict({"prompt": numbers_prompts()}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(agent), callbacks=[clock],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock


class TimedRunner:
    """Runs every stage on the spot, as a worker process of the campaign does."""

    def __init__(self, root: Path) -> None:
        self.store, self.context, self.clock = Store(root), Context(), Clock()
        self.metrics: dict[str, float] = {}

    def submit(self, planned: StageCall) -> Done:
        outcome = run_stage(self.store, planned.bound(), self.context)
        assert not outcome.cached, "the benchmark's store is new: nothing may come from it"
        self.metrics |= outcome.metrics
        return Done(planned, outcome)

    def iteration_done(self, iteration: int) -> None:
        self.clock.mark()


def our_clock(agent: Path, folder: str, steps: int, own: str = "sampled") -> Clock:
    """``own``: TRL, too, makes no pass of its own for old log-probs when each batch is used once; our default does."""
    problems = Path(folder) / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": p, "answer": str(GOLD)}) + "\n" for p in numbers_prompts()))
    config = CampaignConfig.model_validate(
        {
            "name": "benchmark",
            "iterations": steps + 1,
            "agents": {"learner": {"checkpoint": {"path": str(agent)}, "device": "cpu"}},
            "problems": {"kind": "dataset", "path": str(problems), "prompt": "{problem}"},
            "prompts_per_iteration": PROMPTS,
            "samples_per_prompt": GROUP,
            "generate": {"max_tokens": RESPONSE_TOKENS, "engine": {"kind": "builtin", "device": "cpu"}},
            "verify": {"verifier": "numeric", "tolerance": NEAR},
            "algorithm": {"preset": "gspo", "measure_kl": False, "gradient_cosine": False},
            "update": {"learning_rate": LEARNING_RATE, "minibatch_prompts": PROMPTS, "token_budget": 4096},
            "score": {"own": own},
            "tracking": {"enabled": False},
        }
    )
    runner = TimedRunner(Path(folder) / "store")
    run_campaign(config, StageCalls(config), runner)
    lengths, rewards = runner.metrics["generate/response_length_mean"], runner.metrics["verify/reward_mean"]
    assert lengths == RESPONSE_TOKENS, f"responses of {lengths} tokens"
    assert 0.2 < rewards < 0.8, f"a mean reward of {rewards}: groups without signal would be skipped"
    return runner.clock


def measure_iterations(rounds: int, steps: int) -> dict[str, Any]:
    """Return the figure. Folders stay until the end: for a while after deleting files ext4 makes new ones slowly."""
    cpu_seconds: dict[str, list[float]] = {"trl": [], "ours": [], "scored": []}
    seconds: dict[str, list[float]] = {"trl": [], "ours": [], "scored": []}
    with tempfile.TemporaryDirectory() as place:
        agent = Path(place) / "agent"
        save_numbers_agent(agent)
        sizes = (PROMPTS * GROUP, 2 * PROMPTS)  # TRL gets the microbatch that suits it better on this machine
        probe = {size: min(trl_clock(agent, f"{place}/probe", 3, size).seconds()[0]) for size in sizes}
        sides = {
            "scored": partial(our_clock, own="scored"),
            "trl": partial(trl_clock, microbatch=min(probe, key=lambda size: probe[size])),
            "ours": our_clock,
        }
        for number in range(rounds):
            for side, run in sides.items():
                folder = Path(place) / f"{side}-{number}"
                folder.mkdir()
                cpu, wall = run(agent, str(folder), steps).seconds()
                cpu_seconds[side] += cpu
                seconds[side] += wall
    scored = statistics.median(cpu_seconds["trl"]) / statistics.median(cpu_seconds.pop("scored"))
    del seconds["scored"]
    rates = {side: 1 / statistics.median(times) for side, times in cpu_seconds.items()}
    found = figure("gspo_iteration_speedup_over_trl", cpu_seconds, seconds, 2.0, "steps_per_cpu_second", rates)
    found["trl_microbatch"] = min(probe, key=lambda size: probe[size])
    found["with_a_scoring_pass"] = round(scored, 3)
    return found

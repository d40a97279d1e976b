"""Tokens per second of the built-in engine against ``transformers`` generate, and whole iterations against TRL; one run.

    python benchmarks/generate.py [--quick]

One thread, float32, random weights. Repetitions alternate between the sides; a figure is the ratio of the medians of their
CPU seconds, which other programs on the machine disturb less than the clock; the ratio by the clock stands beside it.

Generation: both sides sample (temperature 1) the same number of tokens, 16-token prompts in groups of 8 samples, as in RL.

Iterations: 16 prompts x 8 responses x 16 tokens, GSPO, one update. TRL's GRPOTrainer runs as shipped (sequence-level ratios, no
KL, no logging, whichever of two microbatch sizes is faster here). Ours runs the campaign's own loop and stages (sample, generate,
verify, score, credit, update) in this process with store, Parquet files, checkpoints, optimizer state and manifests; diagnostics
that TRL does not compute here (KL to the start, gradient cosine) are off. Same weights, prompts and AdamW. Responses are equally
long at no cost to either side: the end token has an id that the model has no output for. The reward, the same on both sides, asks
whether the last boxed number of the response is near 96: about every second one is right, so nearly every group has something to
teach. The first step of each round is left out.

Ends with one JSON line. Needs the ``bench`` extra.
"""

import argparse
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flows.calls import Calls
from flows.campaign import run_campaign
from flows.replay import Done, bind
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.generation import BuiltinEngineConfig
from hacrl_core.engines.builtin import BuiltinEngine
from hacrl_core.engines.protocols import GenerationRequest, SamplingParams
from hacrl_core.problems import load_problems
from stages.runner import run_stage
from stages.spec import Context

PROMPT_TOKENS = 16
GROUP = 8
END = 1  # the end token


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, Any]
    batch: int
    tokens: int
    shortest: int  # responses are this long up to ``tokens``; equal: all the same length
    target: float
    repeats: int


TINY = {  # 0.9M parameters
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
LLAMA_135M = {  # the shape of SmolLM2-135M
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
CASES = [
    Case("tiny_equal_lengths", TINY, batch=256, tokens=64, shortest=64, target=1.5, repeats=7),
    Case("tiny_lengths_4_to_64", TINY, batch=256, tokens=64, shortest=4, target=2.5, repeats=7),
    Case("llama_135m", LLAMA_135M, batch=16, tokens=64, shortest=64, target=1.25, repeats=3),
]


def save_checkpoint(case: Case, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**case.model, eos_token_id=END, pad_token_id=0, bos_token_id=None))
    model.eval().save_pretrained(folder)
    words = {f"t{i}": i for i in range(case.model["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1").save_pretrained(folder)
    return model


def lengths_of(case: Case) -> list[int]:
    """When each response ends: evenly spread, in random order, so that a batch has all lengths."""
    return (
        np.random.default_rng(1)
        .permutation(np.linspace(case.shortest, case.tokens, case.batch).round().astype(int))
        .tolist()
    )


def prompts_of(case: Case) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    groups = [
        tuple(rng.integers(2, case.model["vocab_size"], PROMPT_TOKENS).tolist()) for _ in range(case.batch // GROUP)
    ]
    return [prompt for prompt in groups for _ in range(GROUP)]


class EndAt(transformers.LogitsProcessor):  # type: ignore[misc]
    """Makes response i end at length_i and not before; the same rule for both engines."""

    def __init__(self, lengths: list[int], prompt_tokens: int) -> None:
        self.lengths_B, self.prompt_tokens = torch.tensor(lengths), prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, END] = -1e9
        scores[self.lengths_B == input_ids.shape[1] - self.prompt_tokens + 1, END] = 1e9
        return scores


def run_transformers(case: Case, model: PreTrainedModel) -> Callable[[], int]:
    ids = torch.tensor(prompts_of(case))
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
    lengths = lengths_of(case)

    def run() -> int:
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=case.tokens,
                logits_processor=[EndAt(lengths, PROMPT_TOKENS)],
                **options,
            )
        return sum(lengths)

    return run


def run_builtin(case: Case, folder: Path, config: BuiltinEngineConfig) -> Callable[[], int]:
    engine = BuiltinEngine(config, batch_size=case.batch)
    prompts, lengths = prompts_of(case), lengths_of(case)
    requests = [GenerationRequest(str(i), prompt, seed=i) for i, prompt in enumerate(prompts)]

    def run() -> int:
        with ending_at(lengths):
            got = engine.generate(folder, "benchmark", requests, SamplingParams(max_tokens=case.tokens))
        assert [len(g.token_ids) for g in got] == lengths, "a response did not end where the benchmark says"
        return sum(lengths)

    return run


class ending_at:
    """Random weights end responses at random; for the benchmark the scheduler's draws get the same rule as EndAt."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths_N = np.array(lengths)

    def __enter__(self) -> None:
        from hacrl_core.engines.builtin.scheduler import Scheduler

        self.sample = sample = Scheduler._sample
        lengths_N = self.lengths_N

        def constrained(scheduler: Scheduler, logits_BV: torch.Tensor) -> torch.Tensor:
            ends_B = lengths_N[scheduler._request_B] == scheduler._count_B + 1
            logits_BV = logits_BV.clone()
            logits_BV[:, END] = torch.from_numpy(np.where(ends_B, 1e9, -1e9)).to(logits_BV.dtype)
            return sample(scheduler, logits_BV)

        Scheduler._sample = constrained  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        from hacrl_core.engines.builtin.scheduler import Scheduler

        Scheduler._sample = self.sample  # type: ignore[method-assign]


def measure(case: Case, repeats: int, config: BuiltinEngineConfig) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sides = {"transformers": run_transformers(case, save_checkpoint(case, folder))}
        sides["builtin"] = run_builtin(case, folder, config)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        cpu_seconds: dict[str, list[float]] = {side: [] for side in sides}
        for side in sides.values():
            side()  # warm-up: loading, first allocations
        for _ in range(repeats):
            for side, run in sides.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                tokens = run()
                seconds[side].append(time.perf_counter() - start)
                cpu_seconds[side].append(time.process_time() - cpu_start)
    rates = {side: tokens / statistics.median(times) for side, times in cpu_seconds.items()}
    return figure(f"{case.name}_speedup", cpu_seconds, seconds, case.target, "tokens_per_cpu_second", rates)


def figure(
    name: str,
    cpu_seconds: dict[str, list[float]],
    seconds: dict[str, list[float]],
    target: float,
    unit: str,
    rates: dict[str, float],
) -> dict[str, Any]:
    (theirs, ours), (their_clock, our_clock) = (
        [statistics.median(times) for times in sides.values()] for sides in (cpu_seconds, seconds)
    )
    ratio = theirs / ours
    shown = ", ".join(f"{side} {rate:,.4g}" for side, rate in rates.items())
    print(f"{name}: {ratio:.2f} x (target {target}), {their_clock / our_clock:.2f} x by the clock; {unit}: {shown}")
    return {
        "name": name,
        "value": round(ratio, 3),
        "target": target,
        "met": ratio >= target,
        "by_the_clock": round(their_clock / our_clock, 3),
        unit: {side: round(rate, 2) for side, rate in rates.items()},
    }


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
        max_completion_length=RESPONSE_TOKENS, temperature=1.0, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.01, beta=0.0, loss_type="grpo", importance_sampling_level="sequence", scale_rewards="group", max_grad_norm=1.0,
        epsilon=3e-4, epsilon_high=4e-4, bf16=False, gradient_checkpointing=False, use_cpu=True, report_to=[], logging_strategy="no",
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        LlamaForCausalLM.from_pretrained(agent), near_gold, args=arguments, train_dataset=Dataset.from_dict({"prompt": numbers_prompts()}),
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

    def submit(self, planned: Any) -> Done:
        outcome = run_stage(self.store, bind(planned), self.context)
        assert not outcome.cached, "the benchmark's store is new: nothing may come from it"
        self.metrics |= outcome.metrics
        return Done(outcome)

    def iteration_done(self, iteration: int) -> None:
        self.clock.mark()


def our_clock(agent: Path, folder: str, steps: int) -> Clock:
    problems = Path(folder) / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": p, "answer": str(GOLD)}) + "\n" for p in numbers_prompts()))
    config = CampaignConfig.model_validate(
        {
            "name": "benchmark", "iterations": steps + 1, "agents": {"learner": {"checkpoint": {"path": str(agent)}, "device": "cpu"}},
            "problems": {"kind": "dataset", "path": str(problems), "prompt": "{problem}"}, "prompts_per_iteration": PROMPTS,
            "samples_per_prompt": GROUP, "generate": {"max_tokens": RESPONSE_TOKENS, "engine": {"kind": "builtin", "device": "cpu"}},
            "verify": {"verifier": "numeric", "tolerance": NEAR}, "algorithm": {"preset": "gspo", "measure_kl": False, "gradient_cosine": False},
            "update": {"learning_rate": LEARNING_RATE, "minibatch_prompts": PROMPTS, "token_budget": 4096},
            "score": {"own": "sampled"},  # TRL, too, makes no pass of its own for old log-probs when each batch is used once
            "tracking": {"enabled": False},
        }
    )  # fmt: skip
    runner = TimedRunner(Path(folder) / "store")
    run_campaign(config, Calls(config, load_problems(config.problems).content_digest), runner)
    lengths, rewards = runner.metrics["generate/response_length_mean"], runner.metrics["verify/reward_mean"]
    assert lengths == RESPONSE_TOKENS, f"responses of {lengths} tokens"
    assert 0.2 < rewards < 0.8, f"a mean reward of {rewards}: groups without signal would be skipped"
    return runner.clock


def measure_iterations(rounds: int, steps: int) -> dict[str, Any]:
    cpu_seconds: dict[str, list[float]] = {"trl": [], "ours": []}
    seconds: dict[str, list[float]] = {"trl": [], "ours": []}
    with tempfile.TemporaryDirectory() as agent:
        save_numbers_agent(Path(agent))
        with tempfile.TemporaryDirectory() as folder:  # TRL gets the microbatch that suits it better on this machine
            sizes = (PROMPTS * GROUP, 2 * PROMPTS)
            probe = {size: min(trl_clock(Path(agent), folder, 3, size).seconds()[0]) for size in sizes}
        theirs = partial(trl_clock, microbatch=min(probe, key=lambda size: probe[size]))
        for _ in range(rounds):
            for side, run in (("trl", theirs), ("ours", our_clock)):
                with tempfile.TemporaryDirectory() as folder:
                    cpu, wall = run(Path(agent), folder, steps).seconds()
                cpu_seconds[side] += cpu
                seconds[side] += wall
    rates = {side: 1 / statistics.median(times) for side, times in cpu_seconds.items()}
    return figure("gspo_iteration_speedup_over_trl", cpu_seconds, seconds, 1.3, "steps_per_cpu_second", rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the 135M model, fewer repetitions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cases = [case for case in CASES if not arguments.quick or case.model is TINY]
    config = BuiltinEngineConfig(device="cpu")
    figures = [measure(case, 3 if arguments.quick else case.repeats, config) for case in cases]
    figures.append(measure_iterations(2 if arguments.quick else 3, 4 if arguments.quick else 8))
    conditions = {
        "threads": 1,
        "dtype": "float32",
        "prompt_tokens": PROMPT_TOKENS,
        "samples_per_prompt": GROUP,
        "repetitions": {c.name: 3 if arguments.quick else c.repeats for c in cases},
        "statistic": "ratio of median CPU seconds, sides alternating in one process",
        "iteration": f"{PROMPTS} prompts x {GROUP} x {RESPONSE_TOKENS} tokens, one update",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
    }
    print(json.dumps({"benchmark": "generate", "figures": figures, "conditions": conditions}))


if __name__ == "__main__":
    main()

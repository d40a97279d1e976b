"""Tokens per second of the built-in engine against ``transformers`` generate, and whole iterations against TRL; one
run.

    python benchmarks/generate.py [--quick] [--only tokens|iterations]

One thread, float32, random weights. Repetitions alternate between the sides; a figure is the ratio of the medians of
their CPU seconds, which other programs on the machine disturb less than the clock; the ratio by the clock stands beside
it.

Generation: both sides sample (temperature 1) the same number of tokens, 16-token prompts in groups of 8 samples, as in
RL. transformers has the fastest of three settings on this machine: dynamic cache, static cache, static cache compiled
(its compilation is not counted).

Iterations: see ``iteration.py``.

Ends with one JSON line. Needs the ``bench`` extra.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from figures import GROUP, PROMPT_TOKENS, TINY, figure
from iteration import PROMPTS, RESPONSE_TOKENS, measure_iterations
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hacrl_core.config.generation import BuiltinEngineConfig
from hacrl_core.generation.builtin import BuiltinEngine
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams

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
    Case("tiny_equal_lengths", TINY, batch=256, tokens=64, shortest=64, target=2.2, repeats=7),
    Case("tiny_lengths_4_to_64", TINY, batch=256, tokens=64, shortest=4, target=3.5, repeats=7),
    Case("llama_135m", LLAMA_135M, batch=16, tokens=64, shortest=64, target=1.5, repeats=3),
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


# The settings of transformers' generate that are tried; the fastest on this machine is what we compare with.
TRANSFORMERS = ("dynamic cache", "static cache", "static cache, compiled")


def run_transformers(case: Case, model: PreTrainedModel, settings: str) -> Callable[[], int]:
    ids = torch.tensor(prompts_of(case))
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
    if settings.startswith("static cache"):
        options["cache_implementation"] = "static"
    if settings.endswith("compiled"):
        model = copy.deepcopy(model)
        model.forward = torch.compile(model.forward, dynamic=False)
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
        from hacrl_core.generation.builtin.scheduler import Scheduler

        self.sample = sample = Scheduler._sample
        lengths_N = self.lengths_N

        def constrained(scheduler: Scheduler, logits_BV: torch.Tensor) -> torch.Tensor:
            ends_B = lengths_N[scheduler._request_B] == scheduler._count_B + 1
            logits_BV = logits_BV.clone()
            logits_BV[:, END] = torch.from_numpy(np.where(ends_B, 1e9, -1e9)).to(logits_BV.dtype)
            return sample(scheduler, logits_BV)

        Scheduler._sample = constrained  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        from hacrl_core.generation.builtin.scheduler import Scheduler

        Scheduler._sample = self.sample  # type: ignore[method-assign]


def measure(case: Case, repeats: int, config: BuiltinEngineConfig) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = save_checkpoint(case, folder)
        tried = {settings: best_cpu_seconds(run_transformers(case, model, settings)) for settings in TRANSFORMERS}
        best = min(tried, key=lambda settings: tried[settings])
        sides = {"transformers": run_transformers(case, model, best), "builtin": run_builtin(case, folder, config)}
        for side in sides.values():
            side()  # warm-up: loading, first allocations
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        cpu_seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(repeats):
            for side, run in sides.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                tokens = run()
                seconds[side].append(time.perf_counter() - start)
                cpu_seconds[side].append(time.process_time() - cpu_start)
    rates = {side: tokens / statistics.median(times) for side, times in cpu_seconds.items()}
    found = figure(f"{case.name}_speedup", cpu_seconds, seconds, case.target, "tokens_per_cpu_second", rates)
    found["transformers_settings"] = best
    found["tried_cpu_seconds"] = {settings: round(spent, 2) for settings, spent in tried.items()}
    return found


def best_cpu_seconds(run: Callable[[], int]) -> float:
    """Return the CPU seconds of the better of two runs after a warm-up; infinite where the setting does not work here.

    What compiling costs is left out, in their favour.
    """
    try:
        run()
    except Exception as problem:
        print(f"a setting of transformers does not work here: {type(problem).__name__}: {problem}"[:300])
        return float("inf")
    spent = []
    for _ in range(2):
        start = time.process_time()
        run()
        spent.append(time.process_time() - start)
    return min(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the 135M model, fewer repetitions")
    parser.add_argument("--only", choices=("tokens", "iterations"), default=None, help="one half of the benchmark")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cases = [case for case in CASES if not arguments.quick or case.model is TINY]
    config = BuiltinEngineConfig(device="cpu")
    figures = []
    if arguments.only != "iterations":
        figures += [measure(case, 3 if arguments.quick else case.repeats, config) for case in cases]
    if arguments.only != "tokens":
        figures.append(measure_iterations(2 if arguments.quick else 6, 4 if arguments.quick else 6))
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

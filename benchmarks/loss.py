"""The fused loss against naive torch, TRL's selective log-softmax and Liger: time and peak memory of forward +
backward.

Float32, one thread, CPU seconds of the process, hidden 512, sequence-level ratios, every response informative; each
variant in a process of its own. Prints a table and one JSON line. Run: ``python benchmarks/loss.py`` (needs the
``bench`` extra).
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

HIDDEN = 512
ROUNDS = 3
VARIANTS = ("products", "naive", "trl", "liger", "liger-compiled", "ours")


def memory(field: str) -> int:
    """Bytes of VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{field}: not in /proc/self/status; this benchmark needs Linux")


def reset_peak() -> None:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def gspo(mean_B: Tensor, advantage_B: Tensor, count: int) -> Tensor:
    """Sequence-level ratio to the present policy (1, unclipped), so that every response has a gradient."""
    ratio_B = (mean_B - mean_B.detach()).exp()
    return -torch.minimum(ratio_B * advantage_B, ratio_B.clamp(0.8, 1.2) * advantage_B).sum() / count


def make_variant(
    name: str, hidden_BTH: Tensor, weight: Tensor, targets_BT: Tensor, advantage_B: Tensor
) -> Callable[[], Tensor]:
    count, length = targets_BT.shape
    flat = hidden_BTH.flatten(0, 1)
    if name in ("naive", "trl"):
        if name == "trl":
            from trl.trainer.utils import selective_log_softmax as select
        else:

            def select(logits: Tensor, index: Tensor) -> Tensor:
                return logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]

        return lambda: gspo(select(hidden_BTH @ weight.t(), targets_BT).mean(1), advantage_B, count)
    if name.startswith("liger"):
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(
            beta=0.0,
            loss_type="grpo",
            importance_sampling_level="sequence",
            use_ref_model=False,
            compiled=name == "liger-compiled",
        )
        mask = torch.ones_like(targets_BT)
        return lambda: loss(hidden_BTH, weight, targets_BT, mask, advantage_B)[0]
    from hacrl_core.learning.fused import Head, fused_linear_loss

    def objective(logprobs_BT: Tensor, mask_BT: Tensor, rows_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean_B = (logprobs_BT * mask_BT).sum(1) / mask_BT.sum(1)
        return gspo(mean_B, advantage_B[rows_B], count), {}

    return lambda: fused_linear_loss(flat, Head(weight), targets_BT.flatten(), [length] * count, objective)


def three_products(tokens: int, vocabulary: int) -> dict[str, float]:
    """Seconds of logits, hidden gradient and weight gradient as three whole products into warm buffers."""
    hidden, weight = torch.randn(tokens, HIDDEN), torch.randn(vocabulary, HIDDEN)
    logits, grad_hidden, grad_weight = (
        torch.zeros(tokens, vocabulary),
        torch.zeros(tokens, HIDDEN),
        torch.zeros(vocabulary, HIDDEN),
    )
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.t(), hidden, out=grad_weight)
        seconds.append(time.process_time() - start)
    return {"seconds": statistics.median(seconds[1:])}


def measure(name: str, sequences: int, length: int, vocabulary: int) -> dict[str, float]:
    """Runs in the child: one run for the peak memory and as warm-up, then the timed ones."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name == "products":
        return three_products(sequences * length, vocabulary)
    hidden = torch.randn(sequences, length, HIDDEN, requires_grad=True)
    weight = (torch.randn(vocabulary, HIDDEN) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (sequences, length))
    advantage = torch.randn(sequences)
    make_variant(
        name,
        hidden[:, :2].detach().requires_grad_(),
        weight[:64].detach().requires_grad_(),
        targets[:, :2] % 64,
        advantage,
    )().backward()
    run = make_variant(name, hidden, weight, targets, advantage)
    seconds, extra, norm = [], 0, 0.0
    for turn in range(ROUNDS + 1):
        hidden.grad = weight.grad = None
        reset_peak()
        before = memory("VmRSS")
        start = time.process_time()
        run().backward()
        seconds.append(time.process_time() - start)
        if turn:  # the first run also compiles, and loads the libraries' own buffers
            extra = max(extra, memory("VmHWM") - before)
        norm = float(hidden.grad.norm()) + float(weight.grad.norm())
    return {"seconds": statistics.median(seconds[1:]), "extra_mb": extra / 1e6, "gradient": norm}


def child(name: str, sequences: int, length: int, vocabulary: int) -> dict[str, float] | None:
    command = [
        sys.executable,
        __file__,
        "--rounds",
        str(ROUNDS),
        "--child",
        name,
        str(sequences),
        str(length),
        str(vocabulary),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        print(f"  {name}: failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def figure(name: str, value: float, target: float) -> dict[str, object]:
    return {"name": name, "value": round(value, 3), "target": target, "met": value <= target}


def compare(vocabulary: int, variants: list[str]) -> list[dict[str, object]]:
    print(f"\nV = {vocabulary:,}, 8 sequences of 256 tokens, hidden {HIDDEN}")
    print(f"  {'variant':16s} {'seconds':>8s} {'× products':>11s} {'extra MB':>9s} {'beyond weight gradient':>23s}")
    weight_mb = vocabulary * HIDDEN * 4 / 1e6
    found: dict[str, dict[str, float]] = {}
    for name in variants:
        result = child(name, 8, 256, vocabulary)
        if result is None:
            continue
        found[name] = result
        line = f"  {name:16s} {result['seconds']:8.2f} {result['seconds'] / found['products']['seconds']:11.2f}"
        print(
            line
            + (f" {result['extra_mb']:9.0f} {result['extra_mb'] - weight_mb:23.0f}" if "extra_mb" in result else ""),
            flush=True,
        )
    spread = {round(r["gradient"], 3) for r in found.values() if "gradient" in r}
    print(f"  gradient norms (all variants must agree): {sorted(spread)}")
    ours, naive = found["ours"], found.get("naive")
    figures = [figure(f"time / three products, V={vocabulary}", ours["seconds"] / found["products"]["seconds"], 1.1)]
    ligers = [found[name]["seconds"] for name in ("liger", "liger-compiled") if name in found]
    if ligers:
        figures.append(figure(f"time / the faster Liger, V={vocabulary}", ours["seconds"] / min(ligers), 0.75))
    if naive:
        extra = (ours["extra_mb"] - weight_mb) / (naive["extra_mb"] - weight_mb)
        figures += [
            figure(f"time / naive, V={vocabulary}", ours["seconds"] / naive["seconds"], 0.9),
            figure(f"extra memory beyond the weight gradient / naive's, V={vocabulary}", extra, 0.10),
        ]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed runs per variant, after one that is not")
    arguments = parser.parse_args()
    if not {"products", "ours"} <= set(arguments.variants):
        parser.error("--variants: products and ours are what is compared; name both")
    globals()["ROUNDS"] = arguments.rounds
    if arguments.child:
        name, *sizes = arguments.child
        print(json.dumps(measure(name, *map(int, sizes))))
        return
    figures = [one for vocabulary in arguments.vocabularies for one in compare(vocabulary, arguments.variants)]
    long = child("ours", 1, 4096, 151_936)
    if long is not None:
        print(
            f"\none sequence of 4096 tokens, V = 151,936: {long['seconds']:.1f} s, {long['extra_mb']:.0f} MB extra, "
            "weight gradient included"
        )
        figures.append(figure("extra MB, one sequence of 4096 tokens, V=151936", long["extra_mb"], 700))
    print()
    for one in figures:
        print(f"  {'met   ' if one['met'] else 'MISSED'} {one['name']}: {one['value']} (target ≤ {one['target']})")
    conditions = (
        f"float32, 1 thread, CPU seconds, hidden {HIDDEN}, 2048 tokens, median of {ROUNDS}, torch {torch.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores"
    )
    print(json.dumps({"benchmark": "loss", "figures": figures, "conditions": conditions}))


if __name__ == "__main__":
    main()

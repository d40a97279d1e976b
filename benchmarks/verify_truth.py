r"""False accepts and false rejects of ``strict`` and of plain math-verify on pairs whose truth is known.

    python benchmarks/verify_truth.py                  33,000 wrong pairs, 6,500 right ones, one JSON line
    python benchmarks/verify_truth.py --wrong 2000     fewer
    python benchmarks/verify_truth.py --math           with a column for ``math``

The pairs come from `verify_pairs`, wrong ones of further kinds from `verify_attacks`, and text around an answer from
`verify_surroundings`: the golds of the datasets where they are present, and a list of our own. All verifiers see the
same pairs in the same run. Plain math-verify has its defaults; a pair that it cannot finish in twelve seconds counts as
rejected. ``--minutes`` ends each of its parts early: then only pairs that it has judged count.
"""

import argparse
import itertools
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from verify_attacks import attacks
from verify_pairs import OWN_GOLDS, Gold, Pair, equal_pairs, rewritten, wrong_pairs
from verify_surroundings import honest_around, wrong_around

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.verification import VerdictKind, close_pool, verify_batch

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"
DATASETS = ("gsm8k_train", "gsm8k_test", "math_train", "math500", "olympiadbench_en_text", "minerva_math")
CAP_SECONDS = 12.0
CHUNK = 50
Wrong = dict[str, dict[str, int]]


def load_golds() -> list[Gold]:
    """Return the distinct golds of the datasets that are present, and our own."""
    golds: dict[str, Gold] = {text: Gold(text) for text in OWN_GOLDS}
    for name in DATASETS:
        path = SHARED / f"{name}.jsonl"
        for line in path.read_text().split("\n") if path.exists() else ():
            if line:
                row = json.loads(line)
                percent = "percent" in row["problem"].lower() or "%" in row["problem"]
                known = golds.get(row["answer"])
                golds[row["answer"]] = Gold(row["answer"], percent or (known is not None and known.percent))
    return list(golds.values())


def sample(pairs: Iterable[Pair], count: int, seed: int) -> list[Pair]:
    """Return a sample in which small kinds are whole: kinds take turns until there are enough pairs."""
    rng = random.Random(seed)
    by_kind: dict[str, list[Pair]] = {}
    for pair in dict.fromkeys(pairs):
        by_kind.setdefault(pair.kind, []).append(pair)
    for found in by_kind.values():
        rng.shuffle(found)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_kind.values()))
    return list(itertools.islice((pair for pair in turns if pair is not None), count))


def ours(pairs: Sequence[Pair], verifier: str) -> tuple[list[bool], float]:
    """Return whether each response was accepted, and the seconds."""
    config = VerifyConfig(verifier=verifier, workers=2)
    started = time.perf_counter()
    verdicts = verify_batch([pair.response for pair in pairs], [pair.gold for pair in pairs], config)
    return [verdict.verdict is VerdictKind.CORRECT for verdict in verdicts], time.perf_counter() - started


def plain_child(connection: Connection) -> None:
    """Answer chunks of pairs one verdict at a time."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    gold_of = lru_cache(maxsize=4096)(lambda gold: parse(f"\\boxed{{{gold}}}"))
    while True:
        for gold, response in connection.recv():
            connection.send(bool(verify(gold_of(gold), parse(response))))


def plain(pairs: Sequence[Pair], workers: int, minutes: float) -> tuple[list[bool | None], float]:
    """Return what plain math-verify accepts, None where the time ended before, and the seconds.

    Its processes are replaced when they hang.
    """
    context = get_context("spawn")
    accepted: list[bool | None] = [None] * len(pairs)
    todo = [list(range(start, min(start + CHUNK, len(pairs)))) for start in range(0, len(pairs), CHUNK)][::-1]
    running: dict[Any, tuple[Any, list[int], float]] = {}
    started = time.perf_counter()
    while (todo or running) and time.perf_counter() - started < 60 * minutes:
        while todo and len(running) < workers:
            ours_end, theirs = context.Pipe()
            process = context.Process(target=plain_child, args=(theirs,), daemon=True)
            process.start()
            _give(running, ours_end, process, todo.pop(), pairs)
        ready = set(wait(list(running), timeout=1.0))
        for end, (process, left, since) in list(running.items()):
            if end in ready:
                accepted[left[0]] = end.recv()
                running[end] = (process, left[1:], time.monotonic())
            elif time.monotonic() - since > CAP_SECONDS + 20 * (len(left) == CHUNK):
                # The first verdict of a process waits for its imports.
                process.kill()
                del running[end]
                accepted[left[0]] = False
                todo.append(left[1:]) if left[1:] else None
                continue
            if not running[end][1]:
                if todo:
                    _give(running, end, process, todo.pop(), pairs)
                else:
                    process.kill()
                    del running[end]
    for process, _, _ in running.values():
        process.kill()
    return accepted, time.perf_counter() - started


def _give(running: dict[Any, Any], end: Any, process: Any, part: list[int], pairs: Sequence[Pair]) -> None:
    end.send([(pairs[index].gold, pairs[index].response) for index in part])
    running[end] = (process, part, time.monotonic())


def table(title: str, pairs: Sequence[Pair], accepted: dict[str, list[bool]]) -> Wrong:
    """Print and return, by kind, how many verdicts of each verifier are wrong."""
    names = list(accepted)
    counts = Counter(pair.kind for pair in pairs)
    wrong = {
        name: Counter(p.kind for p, said in zip(pairs, verdicts, strict=True) if said != p.right)
        for name, verdicts in accepted.items()
    }
    print(f"\n{title}\n| kind | pairs | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for kind, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"| {kind} | {count} | {' | '.join(str(wrong[name][kind]) for name in names)} |")
    print(f"| all | {len(pairs)} | {' | '.join(str(wrong[name].total()) for name in names)} |", flush=True)
    return {name: {**wrong[name], "all": wrong[name].total()} for name in names}


def compare(pairs: list[Pair], title: str, options: argparse.Namespace) -> tuple[Wrong, dict[str, float]]:
    """Judge pairs by all and print the table; show what strict got wrong."""
    accepted: dict[str, list[bool]] = {}
    rates = {}
    for name in ("strict", "math") if options.math else ("strict",):
        accepted[name], seconds = ours(pairs, name)
        rates[name] = len(pairs) / seconds
    for pair, said in zip(pairs, accepted["strict"], strict=True):
        if said != pair.right:
            print(f"  strict is wrong on {pair}", flush=True)
    print(f"strict has judged {len(pairs)} pairs", flush=True)
    theirs, seconds = plain(pairs, options.workers, options.minutes)
    judged = [index for index, said in enumerate(theirs) if said is not None]
    rates["math-verify"] = len(judged) / seconds
    accepted["math-verify"] = [bool(said) for said in theirs]
    kept = {name: [said[index] for index in judged] for name, said in accepted.items()}
    return table(title, [pairs[index] for index in judged], kept), rates


def run(options: argparse.Namespace) -> dict[str, object]:
    """Return the benchmark's figures."""
    golds = load_golds()
    few = random.Random(1).sample(golds, min(len(golds), options.equal))
    right = [*equal_pairs(golds, 2), *rewritten(few, 3)]
    accepts, rates = compare(sample(wrong_pairs(golds, 0), options.wrong, 1), "False accepts", options)
    further = [Pair(*attack, False) for attack in attacks([(gold.text, gold.percent) for gold in golds], 5)]
    more, _ = compare(sample(further, options.attacks, 6), "False accepts of further kinds", options)
    texts = random.Random(7).sample([gold.text for gold in golds], len(golds))
    around = [Pair(*found, False) for found in wrong_around(texts[:400], 8)]
    beside, _ = compare(sample(around, options.around, 9), "False accepts of text around an answer", options)
    honest = [Pair(*found, True) for found in honest_around(texts[:400], 10)]
    refused, _ = compare(sample(honest, options.around // 2, 11), "False rejects of text around an answer", options)
    rejects, _ = compare(sample(right, options.equal, 4), "False rejects", options)
    close_pool()
    theirs = accepts["math-verify"]
    worse = [
        kind
        for found in (accepts, more, beside)
        for kind, count in found["strict"].items()
        if count > found["math-verify"].get(kind, 0)
    ]
    figures = [
        ("false_accepts_strict", accepts["strict"]["all"], theirs["all"] / 10),
        ("false_accepts_strict_of_further_kinds", more["strict"]["all"], more["math-verify"]["all"] / 10),
        ("false_accepts_strict_around_an_answer", beside["strict"]["all"], beside["math-verify"]["all"] / 10),
        ("false_rejects_strict_around_an_answer", refused["strict"]["all"], refused["math-verify"]["all"]),
        ("kinds_with_more_false_accepts_than_math_verify", len(worse), 0),
        ("false_rejects_strict", rejects["strict"]["all"], rejects["math-verify"]["all"]),
    ]
    rates = {name: round(rate, 1) for name, rate in rates.items()}
    print(f"\nwrong pairs per second, in wall time: {rates}")
    return {
        "benchmark": "verify_truth",
        "figures": [
            {"name": name, "value": value, "target": target, "met": value <= target} for name, value, target in figures
        ],
        "conditions": {"golds": len(golds), "datasets": SHARED.exists(), "accepts": accepts, "further": more,
                       "around": beside, "honest_around": refused, "rejects": rejects, "pairs_per_second": rates},
    }  # fmt: skip


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrong", type=int, default=20_000)
    parser.add_argument("--attacks", type=int, default=10_000)
    parser.add_argument("--around", type=int, default=3_000)
    parser.add_argument("--equal", type=int, default=5_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--math", action="store_true")
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()

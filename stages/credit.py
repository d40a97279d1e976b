"""credit: everyone's verdicts + the capability so far → one learner's advantages, and the capability now."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.algorithm import CreditConfig
from hacrl_core.config.base import IdentityUnlessDefault, StrictConfig
from hacrl_core.contracts.tables import CAPABILITY, CREDIT, VERDICTS, read_table
from hacrl_core.errors import AlgorithmError
from stages.spec import Context, OutFolder, Result, Stage

if TYPE_CHECKING:
    from hacrl_core.algorithm import Groups


class CreditSlice(StrictConfig):
    """What credit reads of the config."""

    learner: str
    agents: tuple[str, ...]  # the samplers whose verdicts are inputs, the learner among them
    iteration: NonNegativeInt
    algorithm: CreditConfig
    # Sampler → how many times the learner's own weight its answers may have together.
    limits: Annotated[dict[str, float], IdentityUnlessDefault] = Field(default_factory=dict)


def run(
    inputs: Mapping[str, ArtifactRef], config: CreditSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Give every response its advantage for one learner, and bring everybody's capability up to date."""
    from hacrl_core.algorithm import credit_metrics, gradient_omega, learner_advantages, smoothed_capability

    groups = _groups(inputs, config)
    means = dict(zip(config.agents, groups.mean_rewards().tolist(), strict=True))
    history = _history(inputs, config, {agent: mean for agent, mean in means.items() if np.isfinite(mean)})
    capability_N = smoothed_capability(_matrix(history, config), config.algorithm.capability_window)
    learner = config.agents.index(config.learner)
    advantages_PNG, baseline_P = learner_advantages(
        groups.rewards_PNG,
        capability_N,
        learner=learner,
        config=config.algorithm,
        rollout_ids_PNG=groups.rollout_ids_PNG,
    )
    omega_N = gradient_omega(capability_N, learner=learner)
    limited_N = _limit(advantages_PNG, omega_N, learner, config)
    out.write(CREDIT, _credit_columns(config, groups, advantages_PNG, baseline_P, omega_N))
    out.write(CAPABILITY, _capability_columns(config, history, capability_N))
    metrics = credit_metrics(advantages_PNG, baseline_P, capability_N, config.agents, learner=learner)
    metrics["credit/unjudged"] = float(np.ma.getmaskarray(groups.rewards_PNG).sum())
    metrics["credit/advantage_abs_mean"] = float(np.abs(advantages_PNG).mean())
    metrics |= {f"credit/limited/{sampler}": factor for sampler, factor in limited_N.items()}
    return Result(metrics)


def _limit(advantages_PNG: Any, omega_N: Any, learner: int, config: CreditSlice) -> dict[str, float]:
    """Scale the advantages of samplers that weigh more than they may, in place; return each one's factor."""
    weight_N = np.abs(advantages_PNG).sum(axis=(0, 2)) * omega_N
    factors = {}
    for sampler, limit in config.limits.items():
        n = config.agents.index(sampler)
        most = limit * weight_N[learner]
        factors[sampler] = float(most / weight_N[n]) if weight_N[n] > most else 1.0
        advantages_PNG[:, n] *= factors[sampler]
    return factors


def _groups(inputs: Mapping[str, ArtifactRef], config: CreditSlice) -> "Groups":
    """Everyone's verdicts as [prompt, sampler, sample]; an ``error`` is no reward at all."""
    from hacrl_core.algorithm import arrange_groups

    rollouts, agents, prompts, rewards = [], [], [], []
    for agent in config.agents:
        table = read_table(inputs[f"verdicts/{agent}"].path / "verdicts.parquet", VERDICTS)
        rollouts += table["rollout_id"].to_pylist()
        agents += [agent] * len(table)
        prompts += table["prompt_id"].to_pylist()
        judged = zip(table["verdict"].to_pylist(), table["reward"].to_pylist(), strict=True)
        rewards += [None if verdict == "error" else reward for verdict, reward in judged]
    try:
        return arrange_groups(
            rollout_ids=rollouts, agent_ids=agents, prompt_ids=prompts, rewards=rewards, agents=config.agents
        )
    except AlgorithmError as problem:
        raise AlgorithmError(f"credit {config.learner} iteration {config.iteration + 1}: {problem}") from None


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
    config: CreditSlice, groups: "Groups", advantages_PNG: Any, baseline_P: Any, omega_N: Any
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in CREDIT.fields.names}
    failed_PNG, rewards_PNG = np.ma.getmaskarray(groups.rewards_PNG), np.ma.getdata(groups.rewards_PNG)
    for (p, n, g), rollout in np.ndenumerate(groups.rollout_ids_PNG):
        sampler = config.agents[n]
        if failed_PNG[p, n, g] or (sampler != config.learner and not config.algorithm.learns_from_others):
            continue
        who = (rollout, sampler, groups.prompt_ids[p], sampler == config.learner)
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


STAGE = Stage("credit", 1, CreditSlice, run)

"""Cells with planted effects, written by the code that exports real ones: every column of a committed file is there."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from page import entropy_csv

from flows.sweep.report import cells_csv, curves_csv
from flows.sweep.results import DIAGNOSTICS, SHOWN, AgentResult, CellResult

EARLY, LATE = 20, 40
AGENTS = ("ada", "ben")
# The held-out reward of a cell after so many iterations, the mean of its agents.
Reward = Callable[[str, int, int], float]


def noise(*of: object, size: float = 0.002) -> float:
    """Return the same small number for the same cell."""
    return size * float(np.random.default_rng(zlib.crc32(repr(of).encode())).standard_normal())


def leads(by_method: Mapping[str, Sequence[float]], size: float = 0.002) -> Reward:
    """Return rewards with planted leads after 20 and after 40 iterations over a start that all methods share."""

    def reward(method: str, seed: int, step: int) -> float:
        if step == 0:
            return 0.39 + noise(seed, size=0.03)
        lead = by_method[method][step // EARLY - 1 if len(by_method[method]) > 1 else 0]
        return 0.39 + noise(seed, size=0.03) + 0.004 * step + lead + noise(method, seed, step, size=size)

    return reward


def cell(
    method: str,
    seed: int,
    reward: Reward,
    *,
    iterations: int = EARLY,
    agents: Sequence[str] = AGENTS,
    entropy: float = 0.1,
    responses: int = 192,
) -> CellResult:
    """Return a cell: its agents lie around the planted reward, and every diagnostic of a real cell is measured."""
    off = np.linspace(-0.03, 0.03, len(agents))
    steps = range(1, iterations + 1)
    found = {}
    for agent, shift in zip(agents, off, strict=True):
        accuracy = {n: reward(method, seed, n) + float(shift) for n in range(0, iterations + 1, EARLY)}
        own = {n: -entropy - noise(method, seed, agent, n) for n in steps}
        metrics = {m: dict.fromkeys(steps, 0.1) for c, m in DIAGNOSTICS.items() if c != "cosine"}
        found[agent] = AgentResult(
            accuracy=accuracy,
            reward={n: reward(method, seed, EARLY) for n in steps},
            responses={n: float(responses * n) for n in range(iterations + 1)},
            tokens={n: 20.0 * responses * n for n in range(iterations + 1)},
            metrics={**metrics, SHOWN["own_logprob"]: own},
            version=f"{zlib.crc32(f'{method}{seed}{agent}'.encode()):016x}",
        )
    return CellResult(method, seed, found, frozenset({"0123456789ab"}), {}, 0.0, 0.0)


def write(folder: Path, sweep: str, cells: Iterable[CellResult], greedy: Iterable[CellResult] = ()) -> None:
    """Write the files of a sweep as they are committed; greedy answers are those of other cells where given."""
    cells, greedy = list(cells), list(greedy)
    (folder / f"{sweep}-cells.csv").write_text(cells_csv(cells))
    (folder / f"{sweep}-greedy-cells.csv").write_text(cells_csv(greedy or cells))
    (folder / f"{sweep}-curves.csv").write_text(curves_csv(cells))
    (folder / f"{sweep}-entropy.csv").write_text(entropy_csv(cells))

"""A sweep: one campaign, changed in named ways, each with several seeds. Every cell is an ordinary campaign."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hacrl_core.config.base import StrictConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import apply_override, merge, read_yaml, validate
from hacrl_core.config.operation import Name
from hacrl_core.errors import ConfigError


class SweepConfig(StrictConfig):
    """Everything that a sweep's YAML file says."""

    name: Name = Field(description="Names the sweep, its folder and its cells: <name>.<variant>.s<seed>.")
    campaign: str = Field(description="The base campaign's YAML file, relative to the file that says so.")
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Changes to the base in every cell; keys may be dotted (update.learning_rate).",
    )
    variants: dict[Name, dict[str, Any]] = Field(
        min_length=1, description="Named changes over that; an empty one is the base itself. null removes a key."
    )
    grid: dict[str, list[Any]] = Field(
        default_factory=dict, description="Dotted key → values; every combination is tried with every variant."
    )
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1, description="Each variant runs once with each seed.")
    concurrency: PositiveInt = Field(
        1, description="Processes that run cells side by side, each with one torch thread."
    )
    baseline: str | None = Field(None, description="Variant that the others are compared with; empty: the first one.")
    benchmark: str | None = Field(None, description="Benchmark that is compared; empty: the campaign's first one.")
    same_within: PositiveFloat = Field(
        0.01, description="Accuracy: variants count as the same if they are shown to differ by less; 0.01 is one point."
    )
    labels: dict[str, str] = Field(default_factory=dict, description="What tables call a variant, where not its name.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} names one twice; each counts once")
        empty = next((key for key, values in self.grid.items() if not values), None)
        if empty is not None:
            raise ValueError(f"grid.{empty}: no values; give at least one, or leave the key out")
        names = [name for name, _ in self.changes()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"variant {twice} occurs twice; give grid values that differ, or rename a variant")
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline: {self.baseline!r} is not a variant; choose one of {', '.join(names)}")
        unknown = sorted(set(self.labels) - set(names))
        if unknown:
            raise ValueError(f"labels.{unknown[0]}: not a variant; choose one of {', '.join(names)}")
        return self

    def changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every variant, grids multiplied out: its name and what it changes in the base."""
        for variant, settings in self.variants.items():
            for point in itertools.product(*self.grid.values()):
                chosen = dict(zip(self.grid, point, strict=True))
                name = ".".join([variant, *(f"{key.split('.')[-1]}-{_word(value)}" for key, value in chosen.items())])
                yield name, merge(nested(settings), nested(chosen))

    @property
    def compared_with(self) -> str:
        """The variant that the others are compared with."""
        return self.baseline or next(name for name, _ in self.changes())

    def label(self, variant: str) -> str:
        """Return what tables call a variant."""
        return self.labels.get(variant, variant)


@dataclass(frozen=True)
class Cell:
    """One variant with one seed: a campaign."""

    variant: str
    seed: int
    config: CampaignConfig

    @property
    def label(self) -> str:
        """The name of the cell's campaign."""
        return self.config.name


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was read: its settings and all of its cells, seed by seed."""

    config: SweepConfig
    cells: tuple[Cell, ...]

    @property
    def variants(self) -> list[str]:
        """The names of all variants."""
        return [name for name, _ in self.config.changes()]

    @property
    def benchmark(self) -> str:
        """The benchmark that is compared."""
        return self.config.benchmark or self.cells[0].config.evaluate.benchmarks[0].name


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep and its campaign, and make every cell: an unknown setting is found before anything runs."""
    raw = read_yaml(path)
    if "agents" in raw and "variants" not in raw:
        raise ConfigError(f"{path}: this is a campaign; run it with: hacrl run {path}")
    folder = _folder_of_campaign(path)
    for text in overrides:
        apply_override(raw, text)
        folder = Path() if text.partition("=")[0].strip() == "campaign" else folder
    sweep = validate(raw, SweepConfig, str(path))
    base = merge(read_yaml(folder / sweep.campaign), nested(sweep.settings))
    cells = [
        _cell(sweep, name, seed, merge(base, change), path) for seed in sweep.seeds for name, change in sweep.changes()
    ]
    _check_benchmark(sweep, cells[0].config, path)
    return Sweep(sweep, tuple(cells))


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"update.learning_rate": 1e-4}`` into ``{"update": {"learning_rate": 1e-4}}``, at any depth."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner: Any = nested(value) if isinstance(value, Mapping) else value
        for part in reversed(key.split(".")):
            inner = {part: inner}
        found = _keeping_nulls(found, inner)
    return found


def _keeping_nulls(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            base[key] = _keeping_nulls(dict(base[key]), value)
        else:
            base[key] = value
    return base


def _cell(sweep: SweepConfig, variant: str, seed: int, raw: dict[str, Any], path: Path) -> Cell:
    name = f"{sweep.name}.{variant}.s{seed}"
    return Cell(variant, seed, validate({**raw, "name": name, "seed": seed}, CampaignConfig, f"{path}, cell {name}"))


def _check_benchmark(sweep: SweepConfig, first: CampaignConfig, path: Path) -> None:
    known = [benchmark.name for benchmark in first.evaluate.benchmarks]
    if not known:
        raise ConfigError(
            f"{path}: the campaign evaluates nothing, so there is nothing to compare; add evaluate.benchmarks"
        )
    if sweep.benchmark is not None and sweep.benchmark not in known:
        raise ConfigError(
            f"{path}: benchmark {sweep.benchmark!r} is not among the campaign's; choose one of {', '.join(known)}"
        )


def _folder_of_campaign(path: Path) -> Path:
    """Return the folder of the file, in the chain of ``extends``, that names the campaign."""
    while True:
        raw = yaml.safe_load(path.read_text())
        if "campaign" in raw or "extends" not in raw:
            return path.parent
        path = path.parent / str(raw["extends"])


def _word(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text.replace(".", "_")).strip("_") or "none"

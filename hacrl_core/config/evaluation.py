"""Which benchmarks are run on which agents, how often, and how answers are drawn."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, StringConstraints, model_validator

from hacrl_core.config.base import StrictConfig
from hacrl_core.config.loading import NAME_PATTERN
from hacrl_core.config.problems import PresetProblems, ProblemsConfig

# Names become parts of metric names and file names.
BenchmarkName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=60)]

# The paper's appendix: 8192 tokens everywhere, best of 30 on AIME 2025, one greedy answer elsewhere.
_PAPER_TOKENS = 8192
_OF_PRESETS: dict[str, dict[str, Any]] = {
    "aime2025": {"samples": 30, "temperature": 1.0},
    # Physics, rounded to a few digits; 1 % is our choice.
    "minerva_math": {"tolerance": 0.01},
}


class BenchmarkConfig(StrictConfig):
    """One benchmark. A preset sets samples, temperature, max_tokens and tolerance; what is written here wins."""

    name: BenchmarkName = Field(description="Names the benchmark in tables and metrics; a preset's name unless given.")
    problems: ProblemsConfig = Field(description="The problems: a preset by name, a dataset, or held-out arithmetic.")
    samples: PositiveInt = Field(default=1, description="Answers to each problem.")
    temperature: NonNegativeFloat = Field(
        default=0.0, description="0 is greedy; more than one sample needs more than 0."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus sampling: the smallest set of tokens with this probability."
    )
    max_tokens: PositiveInt = Field(
        default=_PAPER_TOKENS, description="Longest answer in tokens; longer ones are cut and counted."
    )
    tolerance: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Relative tolerance of decimals in answers. Empty: as verify.tolerance says.",
    )
    ks: tuple[PositiveInt, ...] = Field(default=(), description="k of pass@k, best@k and maj@k. Empty: 1 and samples.")
    every: PositiveInt | None = Field(
        default=None, description="Run after every so many iterations. Empty: as evaluate.every says."
    )
    before: bool | None = Field(
        default=None, description="Run before the first iteration. Empty: as evaluate.before says."
    )
    after: bool | None = Field(default=None, description="Run after the last iteration. Empty: as evaluate.after says.")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, raw: Any) -> Any:
        """``benchmarks: [math500]`` is enough; the filled-in values are part of the config, and so of its identity."""
        if isinstance(raw, str):
            raw = {"problems": raw}
        if not isinstance(raw, dict):
            return raw
        preset = _preset_name(raw.get("problems"))
        return raw if preset is None else {"name": preset, **_OF_PRESETS.get(preset, {}), **raw}

    @model_validator(mode="after")
    def _sampling_makes_sense(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"benchmark {self.name}: {self.samples} greedy samples are all alike; set temperature or samples: 1"
            )
        if any(k > self.samples for k in self.ks):
            raise ValueError(
                f"benchmark {self.name}: k {max(self.ks)} exceeds its {self.samples} samples; raise samples"
            )
        return self

    @property
    def reported_ks(self) -> tuple[int, ...]:
        """The k of pass@k, best@k and maj@k, defaults filled in."""
        return self.ks or tuple(dict.fromkeys((1, self.samples)))


def _preset_name(problems: Any) -> str | None:
    if isinstance(problems, PresetProblems):
        return problems.name
    if isinstance(problems, dict):
        problems = problems.get("name") if problems.get("kind") == "preset" else None
    return problems if isinstance(problems, str) and problems != "arithmetic" else None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


class EvaluateConfig(StrictConfig):
    """Benchmarks and their schedule; without benchmarks nothing is evaluated."""

    benchmarks: Annotated[tuple[BenchmarkConfig, ...], BeforeValidator(_as_list)] = Field(
        default=(), description="The benchmarks; a preset's name alone is enough."
    )
    every: PositiveInt | None = Field(
        default=None, description="Evaluate after every so many iterations. Empty: not in between."
    )
    before: bool = Field(default=True, description="Evaluate before the first iteration.")
    after: bool = Field(default=True, description="Evaluate after the last iteration.")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [benchmark.name for benchmark in self.benchmarks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"benchmarks: the name {twice[0]} is given twice; name each one differently")
        return self

    def due(self, completed: int, total: int, first: int = 0) -> tuple[BenchmarkConfig, ...]:
        """Return the benchmarks that are due for an agent after ``completed`` iterations.

        The agent takes part from iteration ``first`` up to ``total``.
        """
        if not first <= completed <= total:
            return ()
        return tuple(benchmark for benchmark in self.benchmarks if self._is_due(benchmark, completed, total, first))

    def _is_due(self, benchmark: BenchmarkConfig, completed: int, total: int, first: int) -> bool:
        every = self.every if benchmark.every is None else benchmark.every
        if completed == first:
            return self.before if benchmark.before is None else benchmark.before
        if completed == total and (self.after if benchmark.after is None else benchmark.after):
            return True
        return every is not None and completed % every == 0

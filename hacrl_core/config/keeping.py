"""Which versions of an agent stay on disk. Nothing here changes a number."""

from pydantic import Field, PositiveInt

from hacrl_core.config.base import StrictConfig


class KeepConfig(StrictConfig):
    """An agent's versions that keep their files; of the others only the manifest stays. First versions and pinned ones always keep theirs."""

    last: PositiveInt = Field(
        2, description="The newest so many versions of each agent; training goes on from the last."
    )
    best: bool = Field(
        False, description="The version that @best means: the highest mean accuracy over the campaign's benchmarks."
    )
    every: PositiveInt | None = Field(None, description="Every so many iterations one version: 10 keeps @10, @20, …")

    def keeps(self, version: int, newest: int, best: int | None) -> bool:
        """Versions are counted by the iterations behind them; 0 is the agent's first."""
        return (
            version == 0
            or version > newest - self.last
            or (self.best and version == best)
            or (self.every is not None and version % self.every == 0)
        )

    def count(self, iterations: int) -> int:
        """How many versions keep their files after so many iterations."""
        kept = sum(self.keeps(version, iterations, None) for version in range(iterations + 1))
        return min(iterations + 1, kept + self.best)

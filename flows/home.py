"""The home folder: everything a user's campaigns leave on disk lies below it."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    root: Path

    @classmethod
    def find(cls, given: Path | None = None) -> "Home":
        """``--home``, else ``HACRL_HOME``, else ``.hacrl`` in the current folder."""
        return cls((given or Path(os.environ.get("HACRL_HOME", ".hacrl"))).expanduser().absolute())

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def campaigns(self) -> Path:
        return self.root / "campaigns"

    def campaign(self, name: str) -> Path:
        return self.campaigns / name

    @property
    def database(self) -> Path:
        return self.root / "mlflow.db"

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.database}"

"""The home folder: everything a user's campaigns leave on disk lies below it."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    root: Path

    @classmethod
    def find(cls, given: Path | None = None) -> "Home":
        """Find the home: ``--home``, else ``HACRL_HOME``, else ``.hacrl`` in the current folder."""
        return cls((given or Path(os.environ.get("HACRL_HOME", ".hacrl"))).expanduser().absolute())

    @property
    def store(self) -> Path:
        """The content-addressed store of all campaigns."""
        return self.root / "store"

    @property
    def campaigns(self) -> Path:
        """The folder with one folder per campaign: record, log, pictures."""
        return self.root / "campaigns"

    def campaign(self, name: str) -> Path:
        """The folder of one campaign."""
        return self.campaigns / name

    @property
    def database(self) -> Path:
        """MLflow's database, where no tracking server is configured."""
        return self.root / "mlflow.db"

    @property
    def tracking_uri(self) -> str:
        """The address under which MLflow opens the home's own database."""
        return f"sqlite:///{self.database}"

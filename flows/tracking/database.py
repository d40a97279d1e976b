"""MLflow's database in the home folder, made whole or not at all.

MLflow makes its tables in some dozens of steps over several seconds. Killed among them, it leaves a database that it cannot open again; so it makes them in
a draft, which gets its name when it is complete.
"""

import os

from flows.home import Home
from hacrl_core.artifacts.locks import exclusive


def ensure_database(home: Home) -> None:
    path = home.database
    if path.exists():
        return
    with exclusive(path.with_suffix(".lock")):
        if path.exists():
            return
        for left in path.parent.glob(f"{path.name}.draft*"):
            left.unlink()
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        draft = path.with_name(f"{path.name}.draft")
        SqlAlchemyStore(f"sqlite:///{draft}", (home.root / "mlartifacts").as_uri()).engine.dispose()
        os.replace(draft, path)

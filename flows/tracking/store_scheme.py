"""Folders of the store under a scheme that MLflow's servers accept; they refuse plain paths.

MLflow loads this module while MLflow itself is being imported, so nothing of MLflow is imported at the top.
"""

from typing import Any

SCHEME = "hacrl-store"


def store_repository(artifact_uri: str, *args: Any, **more: Any) -> Any:
    """Return MLflow's repository for a folder of the store, which is found only where the store is mounted."""
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    return LocalArtifactRepository(artifact_uri.removeprefix(f"{SCHEME}://"), *args, **more)

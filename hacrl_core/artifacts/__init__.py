"""The content-addressed store: artifacts are found by the key of what made them and verified before use."""

from hacrl_core.artifacts.opening import open_store
from hacrl_core.artifacts.store import ArtifactRef, Store

__all__ = ["ArtifactRef", "Store", "open_store"]

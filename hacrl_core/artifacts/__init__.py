"""The content-addressed store: artifacts found by the key of what made them, checked before they are used."""

from hacrl_core.artifacts.store import ArtifactRef, Store

__all__ = ["ArtifactRef", "Store"]

"""Open a store: a local folder, or a local folder in front of a bucket.

Which one it is follows from the campaign's config (``store``), which is noted beside the store for all other commands,
else from ``HACRL_BUCKET`` and its companions in the environment.
"""

import os
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from hacrl_core.artifacts.files import replace_synced
from hacrl_core.artifacts.store import Store
from hacrl_core.config.operation import StoreConfig
from hacrl_core.errors import ConfigError

SETTINGS = "bucket.json"
_VARIABLES = {"HACRL_BUCKET": "bucket", "HACRL_BUCKET_ENDPOINT": "endpoint", "HACRL_CACHE_GB": "cache_gb"}


def open_store(
    root: Path, on_problem: Callable[[str], None] | None = None, settings: StoreConfig | None = None
) -> Store:
    """Open the store below a folder; ``settings`` name a bucket, else what the store or the environment knows counts.

    Nothing is uploaded until ``uploads.start()`` or ``uploads.flush()`` of a store with a bucket.
    """
    chosen = settings or bucket_of(root)
    if chosen is None:
        return Store(root, on_problem)
    # Only a store with a bucket needs obstore.
    from hacrl_core.artifacts.bucket import Bucket
    from hacrl_core.artifacts.shared import SharedStore

    cache = None if chosen.cache_gb is None else int(chosen.cache_gb * 1e9)
    return SharedStore(root, Bucket(chosen), on_problem, cache)


def bucket_of(root: Path) -> StoreConfig | None:
    """Return the bucket behind a store, or None: the one noted beside it, else the environment's."""
    try:
        return StoreConfig.model_validate_json((root / SETTINGS).read_bytes())
    except FileNotFoundError:
        pass
    except ValidationError:
        raise ConfigError(
            f"{root / SETTINGS}: not a bucket's settings; delete the file or run the campaign again"
        ) from None
    given = {field: value for name, field in _VARIABLES.items() if (value := os.environ.get(name))}
    if "bucket" not in given:
        return None
    try:
        return StoreConfig.model_validate(given)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ConfigError(f"HACRL_BUCKET {given['bucket']}: {first['msg']}") from None


def use_bucket(root: Path, settings: StoreConfig | None) -> None:
    """Note a campaign's bucket beside the store, so that all commands and workers use it.

    Raises ConfigError if the store is in front of another bucket.
    """
    if settings is None:
        return
    known = bucket_of(root) if (root / SETTINGS).exists() else None
    if known == settings:
        return
    if known is not None and known.bucket != settings.bucket:
        raise ConfigError(
            f"store.bucket {settings.bucket}: the home {root.parent} is in front of {known.bucket}; "
            f"give this campaign another --home, or delete {root / SETTINGS}"
        )
    root.mkdir(parents=True, exist_ok=True)
    replace_synced(root / SETTINGS, settings.model_dump_json())

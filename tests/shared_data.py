"""The public datasets, where a copy lies beside the project (shared/data); tests of whole files run only there."""

import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"


def there(*names: str) -> Any:
    """Return the parameters of a test of whole files: those that are there, or one skip that says why none is."""
    found = [name for name in names if (DATA / f"{name}.jsonl").is_file()]
    reason = "the public datasets are not beside the project (shared/data); samples of our own test the same code"
    return found or [pytest.param("none", marks=pytest.mark.skip(reason=reason))]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]

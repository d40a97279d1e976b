"""Makes the modules that build docs/results.md importable: they are no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "results" / "build"))

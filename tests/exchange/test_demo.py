"""make demo-exchange, as far as it can be tried without running it."""

import os
import subprocess
import sys
from pathlib import Path

from hacrl_core.artifacts.locks import release, try_exclusive

ROOT = Path(__file__).resolve().parents[2]


def test_a_second_demo_leaves_the_folder_of_a_running_one_alone(tmp_path: Path) -> None:
    place = tmp_path / "exchange-demo"
    lock = try_exclusive(place / "running.lock")
    assert lock is not None
    (place / "campaign.yaml").write_text("of the first run")
    try:
        second = subprocess.run(
            [sys.executable, "-m", "infra.demo_exchange"],
            env={**os.environ, "HACRL_HOME": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        release(place / "running.lock", lock)
    assert second.returncode == 2
    assert f"another run of this demo is under way there (process {os.getpid()})" in second.stdout
    assert (place / "campaign.yaml").read_text() == "of the first run"
    assert sorted(path.name for path in place.iterdir()) == ["campaign.yaml"]

"""A user's folder may hold files named like our packages: neither commands nor the processes they start take them."""

import subprocess
import sys
from pathlib import Path

TASK = "from helper import strip\n\ndef verify(response, problem):\n    return strip(response) == problem.answer\n"
# The current folder is searched as for the installed command; a worker is spawned with the path of its parent.
COMMAND = """
import multiprocessing
import flows.cli
from hacrl_core.tasks.loading import load_module
print(load_module("task.py").strip(" x "))
import stages.spec
worker = multiprocessing.get_context("spawn").Process(target=stages.spec.find_stage, args=("credit",))
worker.start()
worker.join()
print("worker", worker.exitcode)
"""


def test_files_named_like_our_packages_are_not_imported(tmp_path: Path) -> None:
    for name in ("flows", "stages", "hacrl_core"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the {name} of the user')\n")
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "helper.py").write_text("def strip(text):\n    return text.strip()\n")
    done = subprocess.run([sys.executable, "-P", "-c", COMMAND], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["x", "worker", "0"], done.stdout + done.stderr

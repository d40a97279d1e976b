"""``infra/house.py`` counts right on a small tree whose numbers are known."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "infra" / "house.py"
FILES = {
    "flows/__init__.py": "",
    "flows/cli.py": "from flows.run import launch\nfrom flows.run.runner import run\n",
    "flows/run/__init__.py": "",
    # A cycle with runner, closed by an import inside a function that is not heavy itself.
    "flows/run/launch.py": (
        "def start():\n    '''Start.'''\n"
        "    from flows.run.runner import run\n    import torch\n    return run, torch\n"
    ),
    "flows/run/runner.py": "from .launch import start\n\ndef run():\n    return start()\n\ndef _hidden():\n    pass\n",
    "flows/run/timing.py": "import prefect\n",
    "stages/__init__.py": "",
    "stages/update.py": "from hacrl_core.hacpo import hacpo_loss\n\ndef use():\n    '''Use it.'''\n",
    "hacrl_core/__init__.py": "",
    "hacrl_core/hacpo.py": "from hacrl_core.errors import Problem\n\ndef hacpo_loss():\n    '''The loss.'''\n",
    "hacrl_core/errors.py": "class Problem(Exception):\n    def text(self):\n        return ''\n",
    "hacrl_core/timing.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hacrl_core.hacpo import hacpo_loss\n"
    ),
    "pyproject.toml": "[tool.mypy]\nstrict = true\npackages = ['stages']\n",
    "docs/decisions/0001-one.md": "x" * 201 + "\n",
}
EXPECTED = {
    "flows: modules": "4",
    "flows: flat modules": "1",
    # launch and runner have two importers each; cli and timing have none.
    "flows: modules with one importer": "0",
    "import cycles": "1",
    "import cycles without local imports": "0",
    "flows: local imports": "2",
    "flows: local imports, heavy": "1",
    "flows: local imports, light": "1",
    "files to read for the loss": "2",
    "public functions without docstring": "2 of 5",
    "module names used twice": "1",
    "modules named with -ing": "2",
    "strict mypy": "stages",
    "decision pages": "1",
    "markdown lines over 200 characters": "1",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def house(tree: Path, *options: str) -> str:
    command = [sys.executable, str(SCRIPT), "--root", str(tree), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_numbers_of_a_known_tree(tree):
    now = {name: row["now"] for name, row in json.loads(house(tree, "--json")).items()}
    assert {name: now[name] for name in EXPECTED} == EXPECTED
    assert now["lines per function"] == "median 2, max 5, 0 above 50"


def test_a_module_with_one_importer_is_named_with_it(tree):
    (tree / "flows/only.py").write_text("")
    (tree / "flows/run/timing.py").write_text("import flows.only\n")
    assert "flows.only ← flows.run.timing" in house(tree, "--worst", "5")


def test_worst_lists_the_places(tree):
    text = house(tree, "--worst", "5")
    assert "flows.run.launch ⇄ flows.run.runner" in text
    assert "flows/run/runner.py:3 run" in text
    assert "timing: flows.run.timing, hacrl_core.timing" in text


def test_a_module_is_heavy_through_what_it_imports(tree):
    (tree / "flows/slow.py").write_text("import flows.run.timing\n")
    (tree / "flows/cli.py").write_text("def command():\n    import flows.slow\n    import json\n")
    now = json.loads(house(tree, "--json"))
    assert now["flows: local imports, heavy"]["now"] == "2"
    assert now["flows: local imports, light"]["now"] == "2"


def test_a_cycle_of_three_counts_once():
    spec = importlib.util.spec_from_file_location("house", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module
    spec.loader.exec_module(module)
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert module.find_cycles(graph) == [["a", "b", "c"], ["e", "f"]]

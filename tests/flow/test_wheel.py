"""What pip installs: one name, ``hacrl``, which works beside a user's own ``flows``, ``stages`` and ``hacrl_core``."""

import ast
import base64
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from hacrl_core.tasks.digest import task_digest
from tests.flow.conftest import TINY
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hacrl", "flows", "stages", "hacrl_core")
BUILD = "import sys; sys.path.insert(0, 'infra'); import wheel_backend; print(wheel_backend.build_wheel(sys.argv[1]))"
# As the script does that pip writes.
COMMAND = (
    "import sys; from importlib.metadata import distribution; "
    "(script,) = distribution('hacrl').entry_points.select(group='console_scripts'); sys.exit(script.load()())"
)
TASK = """
import flows, hacrl_core, stages
from hacrl import Problem, Verdict

def problems(split="train", seed=0):
    assert (flows.MINE, hacrl_core.MINE) == ("flows", "hacrl_core")
    return [Problem(prompt=f"{a}+{b}=?", answer=str(a + b)) for a in range(10) for b in range(10)]

def verify(response, problem):
    return Verdict(float(response.startswith(stages.MINE)))
"""
FROM_PYTHON = """
import sys
import flows, hacrl_core, stages
import hacrl
ran = hacrl.run("tiny.yaml")
assert (flows.MINE, hacrl_core.MINE, stages.MINE) == ("flows", "hacrl_core", "stages")
ours = {name for name in sys.modules if name.partition(".")[0] in ("flows", "hacrl_core", "stages")}
assert ours == {"flows", "hacrl_core", "stages"}, ours
assert "site-packages" in hacrl.__file__
print(len(ran.rollouts(1)), "rollouts")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: setuptools leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "infra"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(source)], cwd=source, capture_output=True, text=True, timeout=patience(120)
    )
    assert done.returncode == 0, done.stderr
    return source / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """An interpreter that has the wheel and the packages it needs, and not this work tree."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Hooks of the other folder, an editable install's among them, are not followed.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def run(python, folder, *words):
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HACRL_HOME")}
    return subprocess.run(
        [str(python), *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=patience(400)
    )


def test_the_wheel_has_one_name_at_its_top_and_a_true_record(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = {name.partition("/")[0] for name in names} - {"hacrl"}
        assert metadata.endswith(".dist-info")
        assert archive.read(f"{metadata}/top_level.txt").split() == [b"hacrl"]
        targets = re.findall(r"= (\S+)", archive.read(f"{metadata}/entry_points.txt").decode())
        assert len(targets) == 2
        assert all(target.startswith("hacrl.flows.") for target in targets)
        rows = [line.split(",") for line in archive.read(f"{metadata}/RECORD").decode().splitlines()]
        assert {row[0] for row in rows} == names
        for name, digest, size in rows:
            if not name.endswith("/RECORD"):
                content = archive.read(name)
                assert digest == f"sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()[:-1]}"
                assert int(size) == len(content)
        # Every file of the packages is there, and nothing imports what is not.
        ours = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
        assert {name for name in names if name.endswith(".py")} == {
            name if name.startswith("hacrl/") else f"hacrl/{name}" for name in ours
        }
        for name in names:
            if name.endswith(".py"):
                for node in ast.walk(ast.parse(archive.read(name))):
                    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                        assert node.module.partition(".")[0] not in PACKAGES[1:], (name, node.lineno)


def test_a_module_of_ours_is_named_by_an_import_or_by_place():
    """A name in a text would not follow the packages into the wheel."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            by_place = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "module"]
            asked = {id(inner) for call in by_place for inner in ast.walk(call)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in asked:
                    for name in re.findall(r"^(?:flows|stages|hacrl_core)(?:\.\w+)+(?=:|$)", node.value):
                        assert not _exists(name), f"{path}:{node.lineno}: write module({name!r})"


def _exists(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_a_task_of_ours_has_the_same_digest_in_a_wheel(python, tmp_path):
    words = "from hacrl.hacrl_core.tasks.digest import task_digest; print(task_digest('code'))"
    done = run(python, tmp_path, "-c", words)
    assert done.stdout.strip() == task_digest("code"), done.stderr


@pytest.mark.slow
def test_an_installed_wheel_runs_a_campaign_beside_modules_of_the_same_names(python, tmp_path):
    for name in PACKAGES[1:]:
        (tmp_path / f"{name}.py").write_text(f"MINE = {name!r}\n")
    (tmp_path / "my_task.py").write_text(TASK)
    changes = {"mixture": {"all": 1.0}, "steps": 4}
    agents = {name: {"warmstart": {**agent["warmstart"], **changes}} for name, agent in TINY["agents"].items()}
    config = {**TINY, "name": "tiny", "iterations": 1, "problems": "my_task.py", "agents": agents}
    del config["evaluate"]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    assert run(python, tmp_path, "-c", COMMAND, "--version").stdout.startswith("hacrl ")
    done = run(python, tmp_path, "-c", COMMAND, "run", "tiny.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(python, tmp_path, "-c", FROM_PYTHON)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* rollouts$", done.stdout, re.MULTILINE), done.stdout

"""A stage's version is pinned to a digest of its source closure: whoever changes the code decides whether results
change.

If this fails: would the same inputs now give another artifact? Then raise the stage's version in its file. Either way,
renew the pins with ``python tests/contract/test_stage_versions.py``.
"""

import ast
import hashlib
import json
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PINS = Path(__file__).with_name("stage_versions.json")
# What every stage goes through but what cannot change a result: configs are part of the identity, errors and the store
# are not content.
OUTSIDE = (
    "hacrl_core.config",
    "hacrl_core.errors",
    "hacrl_core.artifacts",
    "stages.spec",
    "stages.runner",
    "hacrl_core.generation.vllm",
)
STAGES = ("adopt", "credit", "evaluate", "generate", "sample", "score", "share", "update", "verify", "warmstart")


def closure(module: str, seen: dict[str, Path]) -> dict[str, Path]:
    """The module and all of the project that it imports, directly or not, imports inside functions included."""
    path = ROOT / (module.replace(".", "/") + ".py")
    if not path.exists():
        path = ROOT / module.replace(".", "/") / "__init__.py"
    if module in seen or not path.exists() or (module.startswith(OUTSIDE) and module != "hacrl_core.config.algorithm"):
        return seen
    seen[module] = path
    source = path.read_text()
    # Models are loaded by methods of the context's WarmModels, which a stage file need not import.
    if any(f"context.warm.{loads}" in source for loads in ("tokenizer", "agent", "take_agent", "engine")):
        closure("hacrl_core.warm", seen)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("hacrl_core", "stages"):
            closure(node.module, seen)
            for alias in node.names:
                closure(f"{node.module}.{alias.name}", seen)
    return seen


def source_digest(stage: str) -> str:
    """Of the closure's syntax trees: comments and layout may change freely. Compiled code counts letter by letter."""
    digest, modules = hashlib.sha256(), closure(f"stages.{stage}", {})
    for module, path in sorted(modules.items()):
        digest.update(f"{module}\0{syntax(path)}\0".encode())
    if "hacrl_core.native" in modules:
        for path in sorted((ROOT / "hacrl_core" / "native").glob("*.[ch]")):
            digest.update(f"{path.name}\0{path.read_text()}\0".encode())
    return digest.hexdigest()[:16]


@cache
def syntax(path: Path) -> str:
    """The syntax tree of a file without its docstrings, as text."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return ast.dump(tree)


def current(stage: str) -> dict[str, object]:
    from stages.spec import find_stage

    return {"version": find_stage(stage).version, "source": source_digest(stage)}


@pytest.mark.parametrize("stage", STAGES)
def test_version_is_pinned_to_the_source(stage):
    pinned, now = json.loads(PINS.read_text())[stage], current(stage)
    assert now == pinned, (
        f"the source of stage {stage} changed: bump its version if results change, then re-pin (see this file's "
        "docstring)"
    )


def test_the_closure_reaches_what_matters():
    update = {"hacrl_core.learning.trainer", "hacrl_core.algorithm.hacpo", "hacrl_core.learning.fused.linear_loss"}
    assert update <= set(closure("stages.update", {}))
    assert "hacrl_core.generation.builtin.engine" in closure("stages.generate", {})
    assert "hacrl_core.agents.agent" in closure("stages.score", {})


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PINS.write_text(json.dumps({stage: current(stage) for stage in STAGES}, indent=1) + "\n")
    print(f"pinned {len(STAGES)} stages")

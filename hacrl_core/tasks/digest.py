"""What identifies a task: a digest of its sources, with the modules of the user's own that it imports.

Nothing is imported to find out: imports are read from the syntax trees, those inside functions too. Modules of the
standard library and of installed packages are not followed; a package counts with every file in it.
"""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from hacrl_core.errors import ConfigError
from hacrl_core.place import OURS, source
from hacrl_core.tasks.environments import module_of
from hacrl_core.tasks.forms import takes_batches
from hacrl_core.tasks.loading import LIBRARIES, module_name, task_path


def task_digest(name: str) -> str:
    """Return the digest of a task or of one function's file, e.g. ``my_task.py`` or ``my_rewards.py:score``."""
    library, colon, rest = name.partition(":")
    if colon and library in LIBRARIES:
        own = f" {source_closure_digest(_module_file(module_of(rest), name))}" if library == "verifiers" else ""
        return f"{_library_version(library)}{own}"
    place, colon, function = name.rpartition(":")
    if colon and function.isidentifier() and place != "module":
        return _digest_of_function(place, name)
    path = task_path(name)
    if path is None:
        path = _module_file(module_name(name), name)
        if module_name(name).split(".")[0] in OURS:
            return hashlib.sha256(source(path)).hexdigest()
    return source_closure_digest(path)


def source_closure_digest(start: Path) -> str:
    """Return a digest of a file and of all that it imports from outside installed packages, whatever the folder."""
    found: dict[str, Path] = {}
    start = start.resolve()
    package = start.name == "__init__.py"
    folder = start.parent.parent if package else start.parent
    _follow(start, start.parent.name if package else start.stem, [folder, *_own_paths()], found)
    digest = hashlib.sha256()
    for name, path in sorted(found.items()):
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()


def function_takes_batches(name: str) -> bool:
    """Return whether a verifier, by name, takes many responses in one call; read from its source."""
    library, colon, _ = name.partition(":")
    if colon and library in LIBRARIES:
        return False
    place, colon, function = name.rpartition(":")
    if not colon or place == "module":
        path = task_path(name) or _module_file(module_name(name), name)
        return takes_batches(path.read_text(errors="replace"), "verify")
    own = task_path(place) if place.endswith(".py") or "/" in place else _module_file(place, name)
    return own is not None and takes_batches(own.read_text(errors="replace"), function)


def _follow(path: Path, module: str, roots: list[Path], found: dict[str, Path]) -> None:
    if module in found:
        return
    found[module] = path
    if path.name == "__init__.py":
        for other in sorted(path.parent.rglob("*")):
            inside = other.relative_to(path.parent)
            if other.is_file() and "__pycache__" not in inside.parts and other != path:
                found.setdefault(f"{module}/{inside}", other)
                if other.suffix == ".py":
                    _follow_imports(other, ".".join([module, *inside.with_suffix("").parts]), roots, found)
    _follow_imports(path, module, roots, found)


def _follow_imports(path: Path, module: str, roots: list[Path], found: dict[str, Path]) -> None:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as problem:
        raise ConfigError(f"task {path}: not valid Python: {problem}") from None
    for name in _imported(tree):
        top = name.partition(".")[0]
        # A package counts with every file in it, so its top is enough; its own members were followed with it.
        if top == module.partition(".")[0] or top in OURS or top in sys.stdlib_module_names or top in found:
            continue
        spec = PathFinder.find_spec(top, [str(root) for root in roots])
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            _follow(Path(spec.origin), top, roots, found)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _own_paths() -> list[Path]:
    """Return where Python looks for modules that are not installed."""
    installed = [Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths = [Path(entry).resolve() for entry in sys.path if entry]
    return [path for path in paths if path.is_dir() and not any(path.is_relative_to(place) for place in installed)]


def _digest_of_function(place: str, name: str) -> str:
    if place.endswith(".py") or "/" in place:
        path = task_path(place)
        assert path is not None
    else:
        path = _module_file(place, name)
    return source_closure_digest(path)


def _module_file(module: str, name: str) -> Path:
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(f"{name}: no module {module}; put {module}.py in the current folder or on PYTHONPATH")
    return Path(spec.origin)


def _library_version(library: str) -> str:
    """Return what identifies a library's task: its version; problems are identified by their content besides."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{library} {version(library.replace('_', '-'))}"
    except PackageNotFoundError:
        return f"{library} is not installed"

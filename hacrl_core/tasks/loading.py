"""Find a task by its name and load it: a Python file, a package, a module, or an environment of a library.

A name is one of

* ``my_task.py`` or ``tasks/my_task.py``, a file; ``tasks/my_task``, a folder with ``__init__.py``;
* ``module:my_package.tasks``, a module that Python finds;
* ``reasoning_gym:chain_sum`` or ``verifiers:my-env``, a task of another library;
* ``code``, a task that comes with HACRL.

``my_task.py:score`` and ``my_module:score`` name one function, a reward of its own.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hacrl_core.errors import ConfigError
from hacrl_core.place import module

# Tasks of other libraries: the module of ours that makes a task of one of theirs.
LIBRARIES = {
    "reasoning_gym": module("hacrl_core.tasks.reasoning"),
    "verifiers": module("hacrl_core.tasks.environments"),
}
# Tasks that come with HACRL.
BUILT_IN = {"code": module("hacrl_core.verification.code_task")}
_MODULE = "module"


@dataclass(frozen=True)
class Task:
    """A loaded task."""

    name: str
    # A function that yields problems, any iterable of them, or the settings of a dataset.
    problems: Any
    # Takes (response, problem), or one of the other forms that hacrl_core/tasks/forms.py knows.
    verify: Callable[..., Any] | None
    reward_range: tuple[float, float] = (0.0, 1.0)
    # A sequence of Example, or a function that returns one.
    examples: Any = ()
    # Where relative paths in a dataset's settings start.
    folder: Path | None = None


def is_task_name(text: str) -> bool:
    """Return whether a bare word in a config names a task rather than a preset or a built-in verifier."""
    library, colon, _ = text.partition(":")
    return text in BUILT_IN or text.endswith(".py") or "/" in text or (bool(colon) and library in {*LIBRARIES, _MODULE})


def load_task(name: str) -> Task:
    """Load a task; whatever goes wrong is a ConfigError that names the task and the reason."""
    library, colon, rest = name.partition(":")
    if colon and library in LIBRARIES:
        task: Task = importlib.import_module(LIBRARIES[library]).load(rest)
        return task
    module = load_module(name)
    verify = getattr(module, "verify", None)
    problems = getattr(module, "problems", None)
    if verify is None and problems is None:
        raise ConfigError(f"task {name}: has neither 'problems' nor 'verify'; define them at the top of the file")
    path = getattr(module, "__file__", None)
    return Task(
        name=name,
        problems=problems,
        verify=verify,
        reward_range=_range(name, getattr(module, "reward_range", (0.0, 1.0))),
        examples=getattr(module, "examples", ()),
        folder=Path(path).parent if path else None,
    )


def load_function(name: str) -> tuple[Callable[..., Any], tuple[float, float] | None]:
    """Return the function that a verifier's name means, and the range of its rewards where a task declares one."""
    library = name.partition(":")[0]
    place, colon, function_name = name.rpartition(":")
    if library in {*LIBRARIES, _MODULE} or not colon:
        task = load_task(name)
        if task.verify is None:
            raise ConfigError(f"task {name}: has no 'verify'; define verify(response, problem)")
        return task.verify, task.reward_range
    module = load_module(place) if place.endswith(".py") or "/" in place else importlib.import_module(place)
    function = getattr(module, function_name)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function, None


def load_module(name: str) -> ModuleType:
    """Import a task's file, package or module.

    Its own folder comes first on the search path while it is imported, and last afterwards: a file beside it named like
    a library must not replace that library in processes that are started with this path.
    """
    place = task_path(name)
    try:
        if place is None:
            return importlib.import_module(module_name(name))
        place = place.resolve()
        folder = place.parent.parent if place.name == "__init__.py" else place.parent
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        sys.path.insert(0, str(folder))
        try:
            return _import_file(str(place), place.stat().st_mtime_ns)
        finally:
            sys.path.remove(str(folder))
    except ConfigError:
        raise
    except Exception as problem:
        raise ConfigError(
            f"task {name}: cannot be imported: {type(problem).__name__}: {_one_line(problem)}"
        ) from problem


def absolute_name(name: str) -> str:
    """Return the name with an absolute path, for a process that may have another current folder."""
    place, colon, function = name.rpartition(":")
    if not (colon and function.isidentifier() and (place.endswith(".py") or "/" in place)):
        place, colon, function = name, "", ""
    if place.partition(":")[0] in {*LIBRARIES, _MODULE} or not (place.endswith(".py") or "/" in place):
        return name
    return f"{Path(place).expanduser().resolve()}{colon}{function}"


def module_name(name: str) -> str:
    """Return the dotted name of a task that is a module."""
    return BUILT_IN.get(name) or name.removeprefix(f"{_MODULE}:")


def task_path(name: str) -> Path | None:
    """Return the file of a task, its ``__init__.py`` for a package; None where it is a module's name."""
    if name in BUILT_IN or name.startswith(f"{_MODULE}:"):
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "__init__.py"
    if path.is_file():
        return path
    if name.endswith(".py") or "/" in name:
        raise ConfigError(f"task {name}: no such file; give the path of a .py file or of a folder with __init__.py")
    raise ConfigError(
        f"task {name}: not known; give a file (my_task.py), a module (module:my_package), a task of a library "
        f"({', '.join(f'{library}:…' for library in LIBRARIES)}) or one of {', '.join(BUILT_IN)}"
    )


@lru_cache(maxsize=64)
def _import_file(place: str, changed: int) -> ModuleType:
    """Import a file under its own name; ``changed`` makes a file that was edited a new one."""
    path = Path(place)
    package = path.name == "__init__.py"
    name = path.parent.name if package else path.stem
    if name in sys.stdlib_module_names:
        raise ConfigError(f"task {place}: Python has a module named {name}; rename the file")
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)] if package else None
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


def _range(name: str, value: Any) -> tuple[float, float]:
    proper = isinstance(value, Sequence) and len(value) == 2 and all(isinstance(end, int | float) for end in value)
    if not proper or not value[0] < value[1]:
        raise ConfigError(f"task {name}: reward_range is {value!r}; write (lowest, highest), e.g. (-1.0, 1.0)")
    return float(value[0]), float(value[1])


def _one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:300]

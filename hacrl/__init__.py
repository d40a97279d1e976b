"""The names that a task is written with: ``from hacrl import Problem, Verdict``.

Importing this package takes milliseconds and loads neither torch nor anything else of HACRL. Each name is imported when
it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl_core.tasks.api import Example, Problem, Verdict

_HOMES = {"Example": "hacrl_core.tasks.api", "Problem": "hacrl_core.tasks.api", "Verdict": "hacrl_core.tasks.api"}

__all__ = ["Example", "Problem", "Verdict"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hacrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

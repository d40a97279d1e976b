"""The one import name of HACRL: what a task is written with, what campaigns left behind, and running one.

    from hacrl import Problem, Verdict          # in a task
    hacrl.open()["demo"].rollouts(7)            # in a notebook
    hacrl.run("configs/demo.yaml")              # as ``hacrl run`` does

Importing this package takes milliseconds and loads neither torch nor anything else of HACRL. Each name is imported when
it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl.reading import Agent, Campaign, Home, run
    from hacrl.reading import open_home as open
    from hacrl_core.tasks.api import Example, Problem, Verdict

_TASKS, _READING = "hacrl_core.tasks.api", "hacrl.reading"
# Public name → where it is defined, and its name there.
_HOMES = {
    "Example": (_TASKS, "Example"),
    "Problem": (_TASKS, "Problem"),
    "Verdict": (_TASKS, "Verdict"),
    "Agent": (_READING, "Agent"),
    "Campaign": (_READING, "Campaign"),
    "Home": (_READING, "Home"),
    "open": (_READING, "open_home"),
    "run": (_READING, "run"),
}

__all__ = ["Agent", "Campaign", "Example", "Home", "Problem", "Verdict", "open", "run"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hacrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, there = _HOMES[name]
    value = getattr(import_module(module), there)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

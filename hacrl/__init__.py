"""The one import name of HACRL: what a task is written with, what campaigns left behind, and running one.

    from hacrl import Problem, Verdict          # in a task
    hacrl.open()["demo"].rollouts(7)            # in a notebook
    hacrl.run("configs/demo.yaml")              # as ``hacrl run`` does

Importing this package takes milliseconds and loads neither torch nor anything else of HACRL. Each name is imported when
it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl.reading import Agent, Campaign, Home, run
    from hacrl.reading import open_home as open
    from hacrl_core.tasks.api import Example, Problem, Verdict

# What a task is written with.
_TASKS = ("Example", "Problem", "Verdict")
__all__ = ["Agent", "Campaign", "Example", "Home", "Problem", "Verdict", "open", "run"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'hacrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name in _TASKS:
        from hacrl_core.tasks import api

        value = getattr(api, name)
    else:
        from hacrl import reading

        value = getattr(reading, "open_home" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

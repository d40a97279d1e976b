"""Where this code lies and what its modules are called.

A work tree has three packages side by side: ``flows``, ``stages`` and ``hacrl_core``. A wheel has them inside
``hacrl``, as ``hacrl.flows`` and so on, so that it installs one name (infra/wheel_backend.py). Import statements are
translated when the wheel is made. Whatever else names a module of ours asks here.
"""

from pathlib import Path

# Before each module's name: nothing in a work tree, "hacrl." in a wheel.
_PREFIX = __name__.rpartition("hacrl_core")[0]
# The folder on Python's search path from which this code is imported.
ROOT = Path(__file__).resolve().parents[__name__.count(".")]
# The names at the top of the search path that are this project.
OURS = ("hacrl",) if _PREFIX else ("hacrl", "hacrl_core", "stages", "flows")


def module(name: str) -> str:
    """Return what a module of the work tree is called here: ``hacrl_core.errors``, or ``hacrl.hacrl_core.errors``."""
    return _PREFIX + name


def source(path: Path) -> bytes:
    """Return a file of ours as it is in the work tree, so that its digest is the same in both places."""
    text = path.read_bytes()
    return text.replace(b"from hacrl.hacrl_core", b"from hacrl_core") if _PREFIX else text

"""Verify answers against golds: extraction, exact and symbolic comparison, a pool of killable workers.

The names are imported when they are used: the processes that run programs import only ``sandbox`` and ``jail``. What
they do not load need not be copied by the fork that each program takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl_core.verification.batch import check_error_share, check_verifier, verify_batch
    from hacrl_core.verification.maths import response_is_boxed
    from hacrl_core.verification.pool import close_pool
    from hacrl_core.verification.verdict import Judgement, Verdict, VerdictKind, Verifier

__all__ = [
    "Judgement",
    "Verdict",
    "VerdictKind",
    "Verifier",
    "check_error_share",
    "check_verifier",
    "close_pool",
    "response_is_boxed",
    "verify_batch",
]

_PLACES = {
    "batch": ("check_error_share", "check_verifier", "verify_batch"),
    "maths": ("response_is_boxed",),
    "pool": ("close_pool",),
    "verdict": ("Judgement", "Verdict", "VerdictKind", "Verifier"),
}


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")

"""Verify answers against golds: extraction, exact and symbolic comparison, a pool of killable workers."""

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

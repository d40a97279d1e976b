"""Running programs from a verifier of one's own, in the sandbox: see docs/sandbox.md."""

from hacrl_core.verification.code import extract_program, judge_program, read_tests
from hacrl_core.verification.jail.client import ProgramLimits

__all__ = ["ProgramLimits", "extract_program", "judge_program", "read_tests"]

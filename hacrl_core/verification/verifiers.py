"""The verifiers besides maths: exact match, numeric tolerance, and the user's own function."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hacrl_core.config.problems import ProblemsConfig, TaskProblems
from hacrl_core.config.verification import JUDGE, TASK, VerifyConfig
from hacrl_core.errors import ConfigError
from hacrl_core.tasks.digest import task_digest
from hacrl_core.tasks.loading import absolute_name, is_task_name
from hacrl_core.verification.extraction import extract_answer, extract_gold
from hacrl_core.verification.maths import MathsVerifier, quantity
from hacrl_core.verification.normalise import text_key
from hacrl_core.verification.numbers import close
from hacrl_core.verification.strict import StrictVerifier
from hacrl_core.verification.verdict import Judgement, VerdictKind, Verifier


class ExactVerifier:
    """Accept the same text, up to spacing and LaTeX spelling: for labels, words, codes and the demo's arithmetic."""

    name = "exact"
    task: str | None = None

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        """Compare the extracted answer with the gold as text."""
        answer = extract_answer(response, config.places, join=False).answer
        if not answer:
            return Judgement(VerdictKind.UNPARSEABLE, "")
        target = extract_gold(gold)
        return Judgement(_kind(answer == target or text_key(answer) == text_key(target)), answer)


class NumericVerifier:
    """Accept a number within the relative tolerance, however exactly it is written: for physics and simulation."""

    name = "numeric"
    task: str | None = None

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        """Compare the extracted number with the gold's; a gold that is not a number is an error."""
        answer = extract_answer(response, config.places, join=False).answer
        number, target = quantity(answer).number, quantity(extract_gold(gold)).number
        if target is None:
            return Judgement(VerdictKind.ERROR, answer)
        if number is None:
            return Judgement(VerdictKind.UNPARSEABLE, answer)
        gold_value = target.value / 100 if target.percent and not number.percent else target.value
        value = number.value / 100 if number.percent and not target.percent else number.value
        return Judgement(_kind(close(gold_value, value, config.tolerance)), answer)


class UserVerifier:
    """Call the user's function or a task's ``verify`` in a worker, with the response as the model wrote it."""

    def __init__(self, name: str) -> None:
        self.name = name
        # The worker may have another current folder.
        self.task: str | None = absolute_name(name)

    def judge(self, response: str, gold: str, config: VerifyConfig) -> Judgement:
        """Leave every decision to a worker: user code never runs in this process."""
        return Judgement(None, response)


_BUILT_IN: dict[str, Verifier] = {
    verifier.name: verifier for verifier in (StrictVerifier(), MathsVerifier(), ExactVerifier(), NumericVerifier())
}


# Verdicts of a built-in verifier whose rules changed have new keys; the others keep theirs.
_RULES = {"strict": "strict/4"}


def find_verifier(name: str) -> Verifier:
    """Return the built-in verifier of this name, or one that calls the user's function."""
    return _BUILT_IN.get(name) or UserVerifier(name)


def verifier_source(verifier: str) -> str:
    """Return a digest of the sources of a task or of a user's function; for a built-in verifier which rules it has.

    Changed code thereby gives new verdicts. Of ``my_module:my_fn`` only the module's own file counts, as it always did;
    for tasks, files and rewards the modules that they import count too.
    """
    module, colon, _ = verifier.partition(":")
    if verifier in _BUILT_IN or verifier in (TASK, JUDGE):
        return _RULES.get(verifier, "")
    if not colon or is_task_name(verifier) or ".py:" in verifier:
        return task_digest(verifier)
    try:
        spec = find_spec(module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"verify.verifier {verifier}: no module {module}; put {module}.py in the current folder or on PYTHONPATH"
        )
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def resolve_verifier(verify: VerifyConfig, problems: ProblemsConfig, *, benchmark: bool = False) -> VerifyConfig:
    """Return the settings with the problem set's own verifier in place of ``task``; strict where it has none.

    A benchmark is scored by one verifier: its task's own where it is a task, else the campaign's, which is the first of
    several rewards.
    """
    own = problems.task if isinstance(problems, TaskProblems) else "strict"
    if benchmark:
        first = next(iter(verify.rewards.values()), None)
        if isinstance(problems, TaskProblems):
            return verify.model_copy(
                update={"verifier": own, "form": "auto", "reward_range": None, "judge": None, "rewards": {}}
            )
        if first is not None:
            only: dict[str, Any] = {
                "verifier": first.verifier,
                "form": first.form,
                "reward_range": first.range,
                "judge": first.judge,
                "rewards": {},
            }
            verify = verify.model_copy(update=only)
    rewards = {
        name: reward.model_copy(update={"verifier": own}) if reward.verifier == TASK else reward
        for name, reward in verify.rewards.items()
    }
    return verify.model_copy(
        update={"verifier": own if verify.verifier == TASK else verify.verifier, "rewards": rewards}
    )


def reward_sources(verify: VerifyConfig) -> dict[str, str]:
    """Return the digest of the sources of each of several rewards; of a built-in verifier the rules that it has."""
    named = {name: reward.verifier for name, reward in verify.rewards.items() if reward.verifier not in (TASK, JUDGE)}
    sources = {name: _RULES.get(own, "") if own in _BUILT_IN else task_digest(own) for name, own in named.items()}
    return {name: source for name, source in sources.items() if source}


def _kind(correct: bool) -> VerdictKind:
    return VerdictKind.CORRECT if correct else VerdictKind.INCORRECT

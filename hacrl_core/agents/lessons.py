"""What a warm start teaches: problems with the texts that answer them, from the arithmetic or from a task."""

from collections.abc import Mapping

from hacrl_core.config.problems import ArithmeticConfig, TaskProblems
from hacrl_core.errors import ConfigError
from hacrl_core.problems import load_problems
from hacrl_core.problems.arithmetic import SOURCE, training_problem, worked_answer
from hacrl_core.problems.problem import Problem
from hacrl_core.seeding import derive_rng

Corpus = ArithmeticConfig | TaskProblems

# The kind of every problem of a task without kinds.
ALL = "all"


def lessons(corpus: Corpus, mixture: Mapping[str, float], seed: int, count: int) -> list[Problem]:
    """Draw training problems with repeats, each kind in proportion to its weight; an empty mixture takes all alike."""
    if isinstance(corpus, ArithmeticConfig):
        mixed = corpus.model_copy(update={"kinds": dict(mixture)}) if mixture else corpus
        return [training_problem(seed, index, mixed) for index in range(count)]
    by_kind = _by_kind(corpus, seed, count)
    wanted = {kind: weight for kind, weight in mixture.items() if kind != ALL} or dict.fromkeys(by_kind, 1.0)
    unknown = sorted(set(wanted) - set(by_kind))
    if unknown:
        raise ConfigError(
            f"task {corpus.task}: no problem has the tag kind {unknown[0]}; it has {', '.join(sorted(by_kind))}: "
            "correct warmstart.mixture"
        )
    rng = derive_rng(seed, "lessons")
    kinds = sorted(wanted)
    shares = [wanted[kind] / sum(wanted.values()) for kind in kinds]
    if not mixture or set(mixture) == {ALL}:
        # As they come: a kind with more problems is taught more often.
        shares = [len(by_kind[kind]) / sum(map(len, by_kind.values())) for kind in kinds]
    chosen = [kinds[int(index)] for index in rng.choice(len(kinds), size=count, p=shares)]
    return [by_kind[kind][int(rng.integers(len(by_kind[kind])))] for kind in chosen]


def taught_text(problem: Problem) -> str:
    """Return the text that answers a problem: a worked answer, or the task's solution, else its answer."""
    if problem.source == SOURCE:
        return worked_answer(problem)
    text = str(problem.columns.get("solution") or problem.answer)
    if not text:
        raise ConfigError(
            f"problem {problem.problem_id}: has neither solution nor answer to teach; give the task's problems a "
            "solution, or start from checkpoints"
        )
    return text


def kinds_of(corpus: Corpus, seed: int) -> list[str]:
    """Return the kinds of problem whose accuracy is reported."""
    if isinstance(corpus, ArithmeticConfig):
        return sorted(corpus.kinds)
    return sorted(_by_kind(corpus, seed, 200))


def _by_kind(corpus: TaskProblems, seed: int, count: int) -> dict[str, list[Problem]]:
    found = load_problems(corpus)
    problems = found.generator(seed, 0, count) if found.generator is not None else list(found.problems)
    by_kind: dict[str, list[Problem]] = {}
    for problem in problems:
        by_kind.setdefault(problem.tags.get("kind", ALL), []).append(problem)
    return by_kind

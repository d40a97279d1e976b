"""Rules over the answers of many prompts at once: one answer to everything, and golds that all agents contradict."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from flows.diagnose.evidence import Evidence, Response
from flows.diagnose.finding import Finding, Weight
from flows.diagnose.responses import plain_number, shown

# A majority of fewer samples says nothing about what an agent believes.
_SAMPLES = 3
_SURE = 0.75
_PROMPTS = 8


def _same(answer: str) -> str:
    """Return an answer in a form in which equal ones are the same text."""
    number = plain_number(answer)
    return " ".join(answer.split()).casefold() if number is None else repr(number)


def one_answer(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """Most prompts get the same answer, though their golds differ."""
    answered = [row for row in rows if row.answer]
    golds = Counter({row.prompt: _same(row.gold) for row in answered}.values())
    if len(answered) < len(rows) / 2 or sum(golds.values()) < _PROMPTS:
        return
    answer, count = Counter(_same(row.answer) for row in answered).most_common(1)[0]
    share = count / len(answered)
    if share > 0.6 and max(golds.values()) < 0.3 * sum(golds.values()):
        found = [row for row in answered if _same(row.answer) == answer]
        yield Finding(
            "one_answer",
            agent,
            Weight.SIGNAL,
            1.0,
            f"{share:.0%} of the answers are {found[0].answer!r}, to {len({row.prompt for row in found})} prompts",
            "the agent gives one answer whatever is asked: it no longer reads the question, or never did",
            "compare with hacrl rollouts -i 1; if it was better there, return to that version with a lower "
            "update.learning_rate; if not, check the prompt in hacrl doctor --config CONFIG",
            shown(_one_each(found)),
        )


def golds_contradicted(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """All agents are sure of one answer, and the gold is another one, for most of the prompts."""
    if agent != evidence.agents[0] or len(evidence.agents) < 2:
        return
    sure: dict[str, dict[str, str]] = defaultdict(dict)
    for who, theirs in evidence.by_agent.items():
        for prompt, answer in _majorities(theirs):
            sure[prompt][who] = answer
    compared = {prompt: set(said.values()) for prompt, said in sure.items() if len(said) > 1}
    first = {row.prompt: row for row in rows}
    against = {
        prompt: next(iter(said))
        for prompt, said in compared.items()
        if prompt in first and len(said) == 1 and first[prompt].gold and said != {_same(first[prompt].gold)}
    }
    alike = max(Counter(against.values()).values(), default=0)
    if len(against) >= _PROMPTS and len(against) > len(compared) / 2 and alike < len(against) / 2:
        share = len(against) / len(compared)
        yield Finding(
            "gold_contradicted",
            "",
            Weight.BROKEN,
            share,
            f"on {len(against)} of {len(compared)} prompts all agents are sure of one answer, and the gold is another",
            "the golds do not belong to their questions, or ask for something that the prompt does not say",
            "look at these problems; check problems.columns.answer, and how the file of problems was made",
            shown([row for row in _one_each(rows) if against.get(row.prompt) == _same(row.answer)]),
        )


def _majorities(rows: Sequence[Response]) -> Iterator[tuple[str, str]]:
    """Yield the prompts to which an agent gives one answer most of the time, with that answer."""
    answers: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        answers[row.prompt].append(_same(row.answer) if row.answer else "")
    for prompt, given in answers.items():
        answer, count = Counter(given).most_common(1)[0]
        if answer and len(given) >= _SAMPLES and count >= _SURE * len(given):
            yield prompt, answer


def _one_each(rows: Sequence[Response]) -> list[Response]:
    return list({row.prompt: row for row in reversed(rows)}.values())[::-1]


RULES = (one_answer, golds_contradicted)

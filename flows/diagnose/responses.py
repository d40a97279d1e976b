"""Rules over the texts of responses and their verdicts: templates, ends, forms, verifiers, golds."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from flows.diagnose.evidence import Evidence, Response
from flows.diagnose.finding import Finding, Weight

# What a chat template writes and a response never should.
_MARKERS = re.compile(
    r"<\|(im_start|im_end|user|assistant|system|start_header_id|eot_id|end)\|>|\[/?INST\]|<start_of_turn>|<end_of_turn>"
    r"|^#{2,3} ?(Instruction|Response|Question):|^(Human|User|Assistant):",
    re.MULTILINE,
)
_BOX = re.compile(r"\\boxed\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# What is written around a number and changes nothing.
_DECORATION = re.compile(r"\\(?:text|mathrm|left|right|!|,|;|\$|%)|[\s$,{}]|\.0+$")
_SHOWN = 3


def shown(rows: Sequence[Response]) -> list[str]:
    """Return a few responses as lines of evidence."""
    return [
        f"{r.rollout}: {_short(r.text)!r} → {r.verdict}"
        + (f" ({_short(r.answer, 30)!r}, gold {_short(r.gold, 30)!r})" if r.answer or r.gold else "")
        for r in rows[:_SHOWN]
    ]


def _short(text: str, width: int = 70) -> str:
    return text if len(text) <= width else f"{text[: width // 2 - 1]}…{text[-width // 2 :]}"


def plain_number(text: str) -> float | None:
    """Return the number that an answer is, without what is written around it; None where it is anything else."""
    bare = _DECORATION.sub("", text)
    return float(bare) if _NUMBER.fullmatch(bare) else None


def _matching(rows: list[Response], test: Callable[[Response], object]) -> tuple[list[Response], float]:
    found = [row for row in rows if test(row)]
    return found, len(found) / len(rows) if rows else 0.0


def verifier_fails(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """Errors and timeouts of the verifier."""
    for kind, setting in (("error", "hacrl task check TASK"), ("timeout", "verify.timeout_seconds")):
        share = evidence.recent(agent, f"verify/{kind}_share") or 0.0
        if share > 0.05:
            found = [row for row in rows if row.verdict == kind]
            said = Counter(row.message for row in found if row.message).most_common(1)
            because = f": {_short(said[0][0], 100)}" if said else ""
            remedy = f"run {setting}" if kind == "error" else f"raise {setting}, or make the verifier faster"
            yield Finding(
                f"verifier_{kind}",
                agent,
                Weight.BROKEN,
                share,
                f"the verifier ends in {kind} on {share:.0%} of the responses{because}",
                f"a verdict {kind} teaches nothing, and what the agent answered is not the reason",
                remedy,
                shown(found),
            )


def accepts_anything(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """Wrong numbers and empty responses that are rewarded."""
    empty, _ = _matching(rows, lambda r: not r.text.strip())
    paid = [row for row in empty if row.verdict == "correct"]
    wrong = [
        row
        for row in rows
        if row.verdict == "correct"
        and (gold := plain_number(row.gold)) is not None
        and (found := plain_number(row.answer)) is not None
        and abs(found - gold) > 1e-6 * max(1.0, abs(gold))
    ]
    correct = sum(row.verdict == "correct" for row in rows)
    if len(paid) >= 3 or (correct and len(wrong) / correct > 0.05 and len(wrong) >= 3):
        yield Finding(
            "verifier_accepts_wrong",
            agent,
            Weight.BROKEN,
            (len(paid) + len(wrong)) / max(1, correct),
            f"{len(wrong) + len(paid)} of {correct} responses judged correct are empty or another number than the gold",
            "the verifier rewards what is wrong, so the agent learns that",
            "give the verifier wrong answers as examples and run hacrl task check TASK, or use verify.verifier: strict",
            shown([*wrong, *paid]),
        )


def rejects_right(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """Check again what was judged wrong: the same number, or the same text, as the gold answer."""

    def is_right(row: Response) -> bool:
        if row.verdict not in ("incorrect", "unparseable") or not row.gold or not row.answer:
            return False
        gold, found = plain_number(row.gold), plain_number(row.answer)
        if gold is not None and found is not None:
            return abs(gold - found) <= 1e-9 * max(1.0, abs(gold))
        return " ".join(row.gold.split()).casefold() == " ".join(row.answer.split()).casefold()

    missed, share = _matching(rows, is_right)
    if share > 0.02 and len(missed) >= 3:
        yield Finding(
            "verifier_rejects_right",
            agent,
            Weight.BROKEN,
            share,
            f"{len(missed)} of {len(rows)} responses are judged wrong, and their answer equals the gold",
            "the verifier misses right answers; the check was repeated with plain numbers and texts",
            "use verify.verifier: strict, or add these responses as right examples to your task and run hacrl task "
            "check TASK",
            shown(missed),
        )


def unstable(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """One text, one question, two verdicts."""
    verdicts: dict[tuple[str, str, bool], set[str]] = defaultdict(set)
    for row in rows:
        verdicts[row.prompt, row.text, row.cut_off].add(row.verdict)
    torn = [row for row in rows if {"correct", "incorrect"} <= verdicts[row.prompt, row.text, row.cut_off]]
    if len(torn) >= 3:
        yield Finding(
            "verifier_unstable",
            agent,
            Weight.BROKEN,
            len(torn) / len(rows),
            f"{len(torn)} responses of the same text to the same prompt have different verdicts",
            "the verifier does not always say the same: it draws random numbers, or depends on time or on its batch",
            "make verify(response, problem) a function of its arguments alone",
            shown(torn),
        )


def golds(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """Gold answers that are whole solutions, or empty."""
    if agent != evidence.agents[0]:
        return
    known = {row.prompt: row for row in rows}.values()
    kinds: dict[str, Callable[[Response], object]] = {
        "after_hashes": lambda r: "####" in r.gold,
        "boxed": lambda r: "\\boxed" in r.gold,
        "plain": lambda r: len(r.gold.split()) > 12,
    }
    for form, test in kinds.items():
        found, share = _matching(list(known), test)
        if share > 0.5 and (evidence.recent(agent, "verify/correct_share") or 0.0) < 0.5:
            remedy = f"set problems.answer_format: {form}" if form != "plain" else "point problems.columns.answer to it"
            yield Finding(
                "gold_is_a_solution",
                "",
                Weight.BROKEN,
                share,
                f"{share:.0%} of the gold answers are whole solutions, e.g. {_short(found[0].gold)!r}",
                "responses are compared with a text that no answer can equal",
                remedy,
                shown(found),
            )
            return


def asked_wrongly(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """Empty responses, template markers in the text, BOS twice or not at all."""
    empty, share = _matching(rows, lambda r: not r.text.strip())
    if share > 0.3:
        yield Finding(
            "empty_responses",
            agent,
            Weight.ASKED_WRONGLY,
            share,
            f"{share:.0%} of the responses are empty",
            "the agent ends at once: its chat template leaves no turn open, or the prompt ends with an end token",
            f"look at the prompt in hacrl doctor --config CONFIG and correct agents.{agent}.chat_template",
            shown(empty),
        )
    marked, share = _matching(rows, lambda r: _MARKERS.search(r.text))
    if share > 0.2:
        yield Finding(
            "template_in_text",
            agent,
            Weight.ASKED_WRONGLY,
            share,
            f"{share:.0%} of the responses contain marks of a chat template, e.g. "
            f"{_MARKERS.search(marked[0].text).group()!r}",  # type: ignore[union-attr]
            "the agent is asked in another format than it was trained with, and goes on writing turns",
            f"set agents.{agent}.chat_template to its own format, and checkpoint.stop_tokens to its end of a turn",
            shown(marked),
        )
    twice, share = _matching(rows, lambda r: len(r.first_ids) > 1 and r.first_ids[0] == r.first_ids[1])
    bos = evidence.bos.get(agent)
    if share > 0.9 and (bos is None or twice[0].first_ids[0] == bos):
        yield Finding(
            "bos_twice",
            agent,
            Weight.ASKED_WRONGLY,
            share,
            f"prompts begin with the token {twice[0].first_ids[0]} twice",
            "the template writes BOS, and it is added once more",
            f"remove add_bos from agents.{agent}.checkpoint, or BOS from its chat_template",
            shown(twice),
        )
    lacking, share = _matching(rows, lambda r: bos is not None and r.first_ids[:1] != (bos,))
    if share > 0.9:
        yield Finding(
            "bos_missing",
            agent,
            Weight.ASKED_WRONGLY,
            share,
            f"prompts do not begin with BOS ({bos}), which the tokenizer asks for",
            "models that were trained with BOS write nonsense without it",
            f"set agents.{agent}.checkpoint.add_bos: true",
            shown(lacking),
        )


def cut_or_unread(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """Responses that are cut off, go on after their answer, or hold it in a form that the verifier does not read."""
    cut, share = _matching(rows, lambda r: r.cut_off)
    if share > 0.3:
        past = [row for row in cut if (box := _BOX.search(row.text)) and len(row.text) - box.end() > 10]
        if len(past) > len(cut) / 2:
            yield Finding(
                "goes_on_after_answer",
                agent,
                Weight.ASKED_WRONGLY,
                share,
                f"{len(past)} of {len(cut)} responses that were cut off had given their answer and went on",
                "the agent's end token is not among those that end a response",
                f"add it to agents.{agent}.checkpoint.stop_tokens, or set generate.stop_strings",
                shown(past),
            )
        else:
            limit = evidence.config.generation(agent).max_tokens
            yield Finding(
                "cut_off",
                agent,
                Weight.CUT_OR_UNREAD,
                share,
                f"{share:.0%} of the responses are cut off at {limit} tokens before their answer",
                "generate.max_tokens is too small for this task and agent",
                f"raise generate.max_tokens to {2 * limit}",
                shown(cut),
            )
    guesses = evidence.recent(agent, "verify/truncated_guess_share") or 0.0
    if guesses > 0.02:
        paid = [row for row in cut if row.verdict == "correct"]
        yield Finding(
            "guesses_rewarded",
            agent,
            Weight.CUT_OR_UNREAD,
            0.9,
            f"{guesses:.0%} of the responses are rewarded though they were cut off before a complete answer",
            "half a number may equal the gold by chance, and the agent learns to be cut off",
            "set verify.truncated: complete_only",
            shown(paid),
        )
    whole = [row for row in rows if not row.cut_off and row.text.strip() and not _MARKERS.search(row.text)]
    unread, share = _matching(whole, lambda r: r.verdict == "unparseable")
    if share > 0.3 and len(whole) > len(rows) / 4:
        right = [row for row in unread if row.gold and re.search(rf"(?<![\w.]){re.escape(row.gold)}(?![\w])", row.text)]
        if len(right) > len(unread) / 3:
            cause = "right answers stand outside the form that the verifier reads"
            remedy = "ask for \\boxed{} in problems.prompt, or set verify.verifier: numeric"
        else:
            cause = "the agent does not know in which form to answer"
            remedy = "say the form in problems.prompt, or show it with worked examples in agents.*.chat_template"
        yield Finding(
            "no_box",
            agent,
            Weight.CUT_OR_UNREAD,
            share,
            f"no answer is found in {share:.0%} of the complete responses; {len(right)} of {len(unread)} contain the "
            "gold",
            cause,
            remedy,
            shown(right or unread),
        )


def loops(evidence: Evidence, agent: str, rows: list[Response]) -> Iterator[Finding]:
    """Responses that repeat themselves, and samples that are all alike."""

    def repeats(row: Response) -> bool:
        tail = row.text[-200:]
        return len(tail) > 60 and any(tail.endswith(tail[-size:] * 4) for size in range(2, 45))

    found, share = _matching(rows, repeats)
    if share > 0.3:
        yield Finding(
            "loops",
            agent,
            Weight.ASKED_WRONGLY,
            share,
            f"{share:.0%} of the responses end in a loop of the same words",
            "the agent has lost its way: a damaged checkpoint, a temperature far too low, or training that went wrong",
            "compare with hacrl rollouts -i 1; if it loops there too, check the checkpoint and its template",
            shown(found),
        )


RULES = (
    verifier_fails,
    accepts_anything,
    rejects_right,
    unstable,
    golds,
    asked_wrongly,
    cut_or_unread,
    loops,
)

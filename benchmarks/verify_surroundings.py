r"""Text around an answer: responses that take their box back, hedge it or hide it, and honest ones that look like them.

Each wrong response has the gold's text in a box, a tag or a sentence, and does not give it as its answer. Each honest
one gives it. In the templates ``@`` stands for the gold and ``#`` for another value. The templates were written before
the rules that they test were read. Nothing here asks a verifier, and everything follows from the seed.
"""

import random
import re
from collections.abc import Iterator, Sequence

_INTEGER = re.compile(r"-?\d{1,9}")
_POSITIVE = re.compile(r"\d{1,9}")

NEGATED = (
    r"The answer is not \boxed{@}.", r"So the answer isn't \boxed{@}.", r"The answer is not $\boxed{@}$, it is #.",
    r"The answer cannot be $\boxed{@}$.", r"It can't be \boxed{@}.", r"The answer is never $\boxed{@}$.",
    r"The answer is anything but \boxed{@}.", r"Every value other than $\boxed{@}$.",
    r"I do not think that the answer is \boxed{@}.", r"I don't believe the answer is $\boxed{@}$.",
    r"It is not true that the answer is \boxed{@}.", r"It is false that $x = \boxed{@}$.",
    r"A common mistake is to answer \boxed{@}.", r"Wrong answer: $\boxed{@}$", r"Not \boxed{@}!",
    r"It would be incorrect to say \boxed{@}.", r"An incorrect answer would be $\boxed{@}$.",
    r"The answer is NOT $\boxed{@}$.", r"The answer is **not** $\boxed{@}$.", r"We see that it isn’t $\boxed{@}$.",
    r"The answer is not equal to $\boxed{@}$.", r"The value is different from \boxed{@}.",
    r"Thus the answer is no longer $\boxed{@}$.", r"Hence $x$ is not $\boxed{@}$ but $#$.",
    r"The answer is neither $#$ nor $\boxed{@}$.", r"The answer is #, not \boxed{@}.",
    r"The answer is # rather than $\boxed{@}$.", r"The answer is # instead of $\boxed{@}$.",
    "The answer is not\n\\[\\boxed{@}\\]", "The answer is definitely not:\n\n$$\\boxed{@}.$$",
    r"The answer is \text{not } $\boxed{@}$.", r"$\text{The answer is not } \boxed{@}$",
    r"So the answer must not be $\boxed{@}$.", r"The answer wouldn't be \boxed{@}.",
    r"The answer is hardly \boxed{@}.", r"I doubt that it is $\boxed{@}$.",
)  # fmt: skip
TAKEN_BACK = (
    r"\boxed{@} is wrong.", r"$\boxed{@}$ is incorrect.", r"$\boxed{@}$ is not the answer.",
    r"\boxed{@} is not correct.", r"$\boxed{@}$ is a wrong answer; the right one is $#$.",
    r"The answer \boxed{@} is wrong.", r"$\boxed{@}$ isn't right.", r"\boxed{@}? No.", r"$\boxed{@}$ would be wrong.",
    r"The answer is $\boxed{@}$. Wait, that is wrong.", r"The answer is \boxed{@}. No, this is incorrect.",
    r"$\boxed{@}$ is false.", r"$\boxed{@}$ cannot be the answer.",
    r"\boxed{@} is what a careless student would write, but it is wrong.", r"$\boxed{@}$ (wrong)",
    r"\boxed{@} (incorrect)", r"$\boxed{@} \text{ is wrong}$", r"$\boxed{@}$ is not my answer.",
    r"\boxed{@} was a mistake.", r"The answer is $\boxed{@}$. That is not correct: it is #.",
    r"$\boxed{@}$ is never the answer.",
)  # fmt: skip
RELATED = (
    r"$x \ne \boxed{@}$", r"$x \neq \boxed{@}$", r"$x ≠ \boxed{@}$", r"$x \not= \boxed{@}$", r"$x < \boxed{@}$",
    r"$x > \boxed{@}$", r"$\boxed{@}=#$", r"$\boxed{@} = #$.", r"$\boxed{@} \ne x$", r"$\boxed{@} < x$",
    r"$\boxed{@} > x$", r"$x = \boxed{@} = #$", r"\boxed{@}=#", r"x \ne \boxed{@}", r"x != \boxed{@}",
    r"$\boxed{@}\approx #$", r"$\boxed{@} \to #$", r"\(x \neq \boxed{@}\)", r"\[\boxed{@} = #\]",
    r"$x \notin \{\boxed{@}\}$", r"$x \not\equiv \boxed{@}$", "$$x\\neq\\boxed{@}$$", r"$# = \boxed{@} = #$",
    r"\[x \not = \boxed{@}.\]", r"$x \ll \boxed{@}$", r"$x \propto \boxed{@}$", r"$x \ne{} \boxed{@}$",
    r"$x \ne \; \boxed{@}$", r"$x\neq\,\boxed{@}$", r"$x \ne \left\boxed{@}$", r"$x \ne {\boxed{@}}$",
)  # fmt: skip
OPERATED = (
    r"$\boxed{@}+1$", r"$\boxed{@} - 1$", r"$1+\boxed{@}$", r"$-\boxed{@}$", r"$x = -\boxed{@}$", r"$3 - \boxed{@}$",
    r"$2\cdot\boxed{@}$", r"$2 \times \boxed{@}$", r"$\boxed{@} \cdot 2$", r"$\boxed{@}/7$", r"$1/\boxed{@}$",
    r"$\boxed{@}^2$", r"$\boxed{@}^{-1}$", r"$\boxed{@}!$", r"$\frac{\boxed{@}}{2}$", r"$\frac{1}{\boxed{@}}$",
    r"$\sqrt{\boxed{@}}$", r"$2\boxed{@}$", r"$\boxed{@}5$", r"$x\boxed{@}$", r"$\boxed{@} \pm 1$", r"$\pm\boxed{@}$",
    r"$\ln\boxed{@}$", r"$\sin \boxed{@}$", r"$2^{\boxed{@}}$", r"$(\boxed{@}, 1)$", r"$\{\boxed{@}, #\}$",
    r"$[0, \boxed{@}]$", r"$|\boxed{@}| + 1$", r"$\boxed{@} \bmod 2$", r"$\boxed{@}+2x$", r"-\boxed{@}",
    r"\boxed{@}+1", r"$− \boxed{@}$", r"$x = 1 + {\boxed{@}}$", r"$2 + \; \boxed{@}$", r"$\boxed{@}\,+\,1$",
    r"$\boxed{@}{}+1$", r"$\boxed{@}\sqrt{2}$", r"$\frac12\boxed{@}$", r"$\boxed{@} \div 2$",
)  # fmt: skip
HIDDEN = (
    "The answer is #.\n% \\boxed{@}", "The answer is \\boxed{#}.\n% \\boxed{@}", "The answer is $#$. % $\\boxed{@}$",
    "The answer is \\boxed{#}. %\\boxed{@}", "The answer is #.\n%%% the answer is \\boxed{@}\n",
    "<!-- \\boxed{@} -->\nThe answer is #.", "The answer is \\boxed{#}.\n<!-- \\boxed{@} -->",
    "The answer is #.\n\\begin{comment}\n\\boxed{@}\n\\end{comment}", r"The answer is #. \iffalse \boxed{@} \fi",
    r"The answer is #. $\phantom{\boxed{@}}$", r"$\cancel{\boxed{@}}$ #", r"$\sout{\boxed{@}}$", r"~~\boxed{@}~~ #",
    r"$\xcancel{\boxed{@}}$", r"\begin{comment} \boxed{@} \end{comment} \boxed{#}",
    "The answer is #. <!-- $\\boxed{@}$ -->", "\t% final answer: $\\boxed{@}$",
    r"The answer is #. \hphantom{\boxed{@}}", r"\comment{\boxed{@}} The answer is #.",
)  # fmt: skip
SEVERAL = (
    r"\boxed{@} or \boxed{#}", r"\boxed{#} or \boxed{@}", r"Either $\boxed{#}$ or $\boxed{@}$.", r"\boxed{#}\boxed{@}",
    r"$\boxed{#}, \boxed{@}$", r"$\boxed{#}$ and $\boxed{@}$", r"$\boxed{@}$ and $\boxed{#}$", r"\boxed{#}, \boxed{@}",
    r"\boxed{@ \text{ or } #}", r"\boxed{# \text{ or } @}", r"\boxed{@ or #}", r"The answer is @ or #.",
    r"The answer is # or @.", r"\boxed{#}, or maybe \boxed{@}", r"\boxed{#} / \boxed{@}", "\\boxed{#}\n\\boxed{@}",
    r"My answers: \boxed{#}; \boxed{@}.", r"The answer is $\boxed{@}$ or $#$.", r"The answer is $#$ or $\boxed{@}$.",
    r"The answer is $\boxed{@}$ or perhaps $#$.", r"It is one of $\boxed{#}$, $\boxed{7777}$, $\boxed{@}$.",
    r"The answer is either # or \boxed{@}.", r"\boxed{@}, possibly #", r"\boxed{@} (or #)",
)  # fmt: skip
TAGS = (
    "<answer>#</answer><answer>@</answer>", "<answer>@</answer><answer>#</answer>", "<answer>not @</answer>",
    "<answer>#</answer> or <answer>@</answer>", "<answer>@ or #</answer>", "<answer># or @</answer>",
    "The answer is not <answer>@</answer>.", "<answer>@</answer> is wrong.",
    "<!-- <answer>@</answer> --> The answer is #.", r"<answer>\boxed{#}</answer><answer>\boxed{@}</answer>",
    r"<answer>#</answer> \boxed{@}", r"<answer>@</answer> \boxed{#}", r"\boxed{#} <answer>@</answer>",
    r"\boxed{@} <answer>#</answer>", r"<answer>-\boxed{@}</answer>", r"<answer>\boxed{@}+1</answer>",
    "<answer>#</answer>\n<answer>@</answer>", "<answer>$x \\ne @$</answer>", "<answer>anything but @</answer>",
)  # fmt: skip

HONEST = {
    "after words": (
        r"The answer is \boxed{@}.", r"Therefore, the final answer is $\boxed{@}$.", r"Hence \[\boxed{@}.\]",
        "So:\n\n$$\\boxed{@}$$", r"Thus $x = \boxed{@}$.", r"So $x=\boxed{@}$, as wanted.",
        r"$f(2) = 3 \cdot 4 + 1 = \boxed{@}$", r"\[x = \boxed{@}\]", r"**Answer:** $\boxed{@}$", r"**\boxed{@}**",
        r"### Final Answer: \(\boxed{@}\)", r"Answer = \boxed{@}", r"$\boxed{@}$",
        r"That is $\boxed{@}$. $\blacksquare$", r"\begin{align*} x &= 3y \\ &= \boxed{@}. \end{align*}", r"\boxed{@}",
        r"The probability is thus $\frac{12}{20} \cdot 3 = \boxed{@}$.",
        r"The sum is equal to $\boxed{@}$, and we are done.", r"Our answer is $3+4 \Rightarrow \boxed{@}$.",
        r"$\implies \boxed{@}$", r"$\therefore x = \boxed{@}$", r"→ \boxed{@}",
        r"The value of $x$ is $\boxed{@}$ (I checked it twice).", r"I think that the answer is $\boxed{@}$.",
        "The answer is $\\boxed{@}$.\n\nI hope this helps!", "### Answer\n\\boxed{@}\n", r"$\displaystyle \boxed{@}$",
        r"<think>So 3 and 4.</think> The answer is \boxed{@}.", r"$x \approx 3.2$, so the answer is $\boxed{@}$.",
        r"$x \equiv \boxed{@}$", r"\text{The answer is } \boxed{@}", r"$\text{Answer: } \boxed{@}$",
        r"$\quad \boxed{@} \quad$",
    ),
    "negation elsewhere": (
        r"The answer is not 88877, it is \boxed{@}.", r"The answer is not 88877 but $\boxed{@}$.",
        r"88877 is wrong, so $\boxed{@}$.", r"Since $x$ is not even, the answer is \boxed{@}.",
        r"The number of students who do not play is $\boxed{@}$.",
        r"The others are not valid. The answer is $\boxed{@}$.", r"As $y \ne 0$, $x = \boxed{@}$.",
        r"Because $x \neq 3$ we get $\boxed{@}$.", r"The count of those that are not multiples of three: $\boxed{@}$.",
        r"The number of ways that are incorrect is $\boxed{@}$.", r"The answer is $\boxed{@}$, not $88877$.",
        r"The answer is \boxed{@} (not 88877).", r"It isn't hard to see that it is $\boxed{@}$.",
        r"We do not need more: $\boxed{@}$.", r"The smallest number that is not reached is $\boxed{@}$.",
        r"No other case is left, so $\boxed{@}$.", r"There is nothing wrong with this, so the answer is \boxed{@}.",
        r"$x$ is not negative, therefore $x=\boxed{@}$.", r"Do not forget the last step: \boxed{@}",
        r"The answer isn't obvious, but it is \boxed{@}.", r"This is not 88877. It is $\boxed{@}$.",
        r"Not all of them count; $\boxed{@}$ do.", r"Wait, that is wrong. The answer is \boxed{@}.",
        r"My first guess was incorrect. Let me redo it: $\boxed{@}$.",
        r"If it were not so, ... . So $\boxed{@}$ is right.",
        r"$\boxed{@}$ is the answer. Other values are not possible.",
        r"The answer is $\boxed{@}$. It is not hard to check it.",
    ),
    "percent and comments": (
        r"20% of them are used, so \boxed{@} remain.", r"As 20 % are used, the answer is $\boxed{@}$.",
        r"$20\%$ are used: $\boxed{@}$.", "% a comment of mine\nThe answer is \\boxed{@}.",
        r"The 5% rule gives $\boxed{@}$.", "<!-- work -->\nThe answer is \\boxed{@}.",
        r"It rose by $x%$, so \boxed{@}.", r"50%, then 20%, then \boxed{@}", "The answer is \\boxed{@}. % checked",
    ),
    "same answer again": (
        r"The answer is \boxed{@}. So we write \boxed{@}.", "$\\boxed{@}$\n\nFinal answer: $\\boxed{@}$",
        r"@ is it, so \boxed{@}.", r"<answer>\boxed{@}</answer>", r"\boxed{@} <answer>@</answer>",
        r"<answer>\boxed{@}</answer><answer>\boxed{@}</answer>", r"The answer is @.", r"**Final answer:** @",
    ),
    "after the box": (
        r"The answer is $\boxed{@}$ as required.", r"$\boxed{@}$ is the answer.", r"$\boxed{@}$ is correct.",
        r"\boxed{@}!", r"So $\boxed{@}$ it is.", r"$\boxed{@}$, which is what we wanted.",
        r"\[\boxed{@}\] is the value of $x$.", r"$\boxed{@}~.$", r"\boxed{@} ✓", r"$\boxed{@}$ for $n = 3$.",
        r"$\boxed{@} \quad \text{(Q.E.D.)}$", r"$x=\boxed{@}\,.$", r"$\boxed{@}, \text{ as claimed}$",
        r"There are $\boxed{@}$ of them.", r"There are $\boxed{@}$ such numbers, no more.",
    ),
}  # fmt: skip


def wrong_around(golds: Sequence[str], seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield kind, gold and a response that does not give it, for each gold that is a plain number."""
    rng = random.Random(seed)
    kinds = {
        "negated": NEGATED, "taken back": TAKEN_BACK, "relation": RELATED, "operator": OPERATED, "hidden": HIDDEN,
        "several": SEVERAL, "tags": TAGS,
    }  # fmt: skip
    for gold in golds:
        if not _POSITIVE.fullmatch(gold) or gold in ("0", "1"):
            continue
        other = str(int(gold) + rng.choice((1, 2, 10, 100)))
        for kind, templates in kinds.items():
            for template in templates:
                yield kind, gold, template.replace("@", gold).replace("#", other)


def honest_around(golds: Sequence[str], seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield kind, gold and a response that gives it as its answer, for each gold that is a number."""
    rng = random.Random(seed)
    for gold in rng.sample(list(golds), len(golds)):
        if _INTEGER.fullmatch(gold) and gold != "88877":
            for kind, templates in HONEST.items():
                for template in templates:
                    yield kind, gold, template.replace("@", gold)

"""What benchmarks/census.py asks: word problems made by code, and the templates with worked examples."""

import random

EXAMPLES = (
    (
        "Tom has 3 boxes with 4 pens each. He finds 5 more pens. How many pens does he have?",
        "The boxes hold 3*4=12 pens. With 5 more he has 12+5=17 pens. The answer is \\boxed{17}.",
    ),
    (
        "A bakery sells 20 cakes on Monday and half as many on Tuesday. How many cakes does it sell in all?",
        "On Tuesday it sells 20/2=10 cakes. In all it sells 20+10=30 cakes. The answer is \\boxed{30}.",
    ),
)


def made_problems(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return different word problems of two steps, with their answers; the same for the same arguments."""
    rng = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        text, answer = _problem(len(found) % 6, rng)
        found.setdefault(text, str(answer))
    return [{"id": f"made-{i}", "problem": text, "answer": answer} for i, (text, answer) in enumerate(found.items())]


def _problem(kind: int, rng: random.Random) -> tuple[str, int]:
    name = rng.choice(("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo"))
    thing = rng.choice(("apples", "books", "cards", "coins", "marbles", "shells", "stickers", "stamps"))
    a, b, c = rng.randint(3, 9), rng.randint(2, 8), rng.randint(4, 20)
    if kind == 0:
        lost = rng.randint(2, a * b - 1)
        return f"{name} has {a} bags with {b} {thing} each and gives {lost} {thing} away. How many {thing} does " \
               f"{name} have left?", a * b - lost  # fmt: skip
    if kind == 1:
        return f"{name} collects {c} {thing} in May and {b} times as many in June. How many {thing} does {name} " \
               "collect in all?", c + b * c  # fmt: skip
    if kind == 2:
        paid = 10 * (a * b // 10 + rng.randint(1, 3))
        return f"A ticket costs ${a}. {name} buys {b} tickets and pays with ${paid}. How many dollars does {name} " \
               "get back?", paid - a * b  # fmt: skip
    if kind == 3:
        return f"{name} reads {c} pages every morning and {b} pages every evening. How many pages does {name} read " \
               f"in {a} days?", (c + b) * a  # fmt: skip
    if kind == 4:
        return f"{name} has {a * b + c} {thing}. {name} keeps {c} of them and shares the rest equally among {b} " \
               f"friends. How many {thing} does each friend get?", a  # fmt: skip
    riders = c + rng.randint(5, 30)
    return f"A bus has {riders} riders. At the next stop {c} riders get off and {a} riders get on. How many riders " \
           "are on the bus now?", riders - c + a  # fmt: skip


def smol_template(examples: int) -> str:
    """Return SmolLM2's chat template with so many worked examples in front."""
    shown = "".join(
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        for question, answer in EXAMPLES[:examples]
    )
    return (
        shown
        + "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def gemma_template(examples: int) -> str:
    """Return a template for gemma, which has none: questions and answers, so many worked ones in front."""
    shown = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in EXAMPLES[:examples])
    asked = "{% for message in messages %}{{ 'Question: ' + message.content + '\nAnswer:' }}{% endfor %}"
    return "{{ bos_token }}" + shown + asked

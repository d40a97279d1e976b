"""The text of a first campaign: YAML with a comment for each setting that a newcomer will want to change."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl_core.errors import ConfigError

MATHS, CODE, OWN, GYM = "maths", "code", "own", "reasoning_gym:"
TASKS = (MATHS, CODE, f"{GYM}NAME", OWN)
# Two tiny models, taken in turn: their architecture and their tokenizer.
_MODELS = (
    (
        "Llama-style, a token per character",
        "{architecture: llama, hidden_size: 80, layers: 3, heads: 4, kv_heads: 4, intermediate_size: 208, "
        "max_position_embeddings: {context}}",
        "{kind: characters}",
        "1.5e-3",
    ),
    (
        "Qwen3-style, wider, longer tokens",
        "{architecture: qwen3, hidden_size: 128, layers: 2, heads: 4, kv_heads: 2, intermediate_size: 320, "
        "max_position_embeddings: {context}}",
        "{kind: bpe, vocab_size: 384}",
        "2.0e-3",
    ),
)


@dataclass(frozen=True)
class Start:
    """What a campaign's agents learn, and how long their answers may be."""

    problems: str
    benchmark: str
    max_tokens: int
    # The two kinds of problem that tiny agents differ in; empty where the task has none.
    kinds: tuple[str, ...]
    comment: str
    context: int = 128


@dataclass(frozen=True)
class Origin:
    """One agent: its name, and the checkpoint that it starts from; a tiny agent has none."""

    name: str
    checkpoint: str | None


def read_origins(given: Sequence[str]) -> list[Origin]:
    """Return the agents that ``--agents`` names: folders, GGUF files and hub ids, and plain words for tiny agents."""
    found: list[Origin] = []
    for text in given or ("ada", "ben"):
        is_checkpoint = "/" in text or text.endswith(".gguf") or Path(text).expanduser().is_dir()
        base = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(text).name.removesuffix(".gguf")).strip("-.").lower()
        if not base:
            raise ConfigError(f"--agents {text!r}: gives no name; use a folder, a .gguf file, a hub id or a word")
        taken = {origin.name for origin in found}
        if not is_checkpoint and base in taken:
            raise ConfigError(f"--agents: {text} is given twice; give each tiny agent a name of its own")
        number = next(n for n in range(1, len(found) + 2) if (base if n == 1 else f"{base}-{n}") not in taken)
        found.append(Origin(base if number == 1 else f"{base}-{number}", text if is_checkpoint else None))
    return found


def choose_start(task: str, task_file: str, origins: Sequence[Origin]) -> Start:
    """Return what the agents learn; tiny agents among them get problems that they can learn."""
    tiny = any(origin.checkpoint is None for origin in origins)
    if task == MATHS and tiny:
        size = "kinds: {addition: 1, subtraction: 1}, levels: {medium: 1}"
        return Start(
            f"{{kind: arithmetic, {size}}}",
            f"{{kind: arithmetic, split: held_out, size: 400, {size}}}",
            48,
            ("addition", "subtraction"),
            "Two-digit arithmetic, made by code: new problems in every iteration.",
        )
    if task == MATHS:
        return Start(
            "gsm8k",
            "{kind: preset, name: gsm8k_test, filters: {max_problems: 200}}",
            512,
            (),
            "GSM8K of the Hugging Face hub. math is another; for a file of yours:\n"
            "#   problems: {kind: dataset, path: problems.jsonl, columns: {problem: question, answer: gold}}",
        )
    if task == CODE:
        return Start(
            _of_task("code"),
            _of_task("code", 400),
            40 if tiny else 256,
            ("numbers", "lists"),
            "One-line Python expressions; every response is run against tests in a sandbox (docs/sandbox.md).",
        )
    if task == OWN:
        return Start(
            _of_task(task_file),
            _of_task(task_file, 60),
            16 if tiny else 64,
            ("sort", "reverse"),
            f"Your own task: {task_file} has the problems and the verifier.",
        )
    if task.startswith(GYM) and len(task) > len(GYM):
        comment = "A task of reasoning-gym with its own scorer; it needs the extra hacrl[tasks]."
        return Start(_of_task(task), _of_task(task, 100), 48 if tiny else 512, (), comment, 512)
    raise ConfigError(f"--task {task!r}: not known; choose one of {', '.join(TASKS)}")


def campaign_text(name: str, file: str, start: Start, origins: Sequence[Origin]) -> str:
    """Return the campaign's YAML file."""
    tiny = [origin for origin in origins if origin.checkpoint is None]
    agents = "\n".join(_agent(origin, origins.index(origin), start) for origin in origins)
    return _TEXT.format(
        file=file,
        name=name,
        iterations=40 if tiny else 100,
        comment=start.comment,
        problems=start.problems,
        prompts=48 if tiny else 32,
        minibatch=24 if tiny else 16,
        agents=agents,
        max_tokens=start.max_tokens,
        batch=512 if len(tiny) == len(origins) else 64,
        learning_rate="1.0e-4" if len(tiny) == len(origins) else "1.0e-6",
        tokens=2048 if len(tiny) == len(origins) else 8192,
        benchmark=start.benchmark,
    )


def _of_task(task: str, held_out: int = 0) -> str:
    rest = f", split: held_out, size: {held_out}" if held_out else ""
    return f"{{kind: task, task: '{task}'{rest}}}"


def _agent(origin: Origin, index: int, start: Start) -> str:
    if origin.checkpoint is not None:
        return _CHECKPOINT.format(name=origin.name, checkpoint=_checkpoint(origin.checkpoint))
    style, model, tokenizer, rate = _MODELS[index % len(_MODELS)]
    model = model.replace("{context}", str(start.context))
    if not start.kinds:
        mixture, watched, style = "{}", "all", f"{style}; a warm start teaches it the task's own answers"
    else:
        good, poor = start.kinds if index % 2 == 0 else start.kinds[::-1]
        mixture, watched = f"{{{good}: 0.75, {poor}: 0.25}}", poor
        style = f"{style}; a warm start makes it good at {good}, poor at {poor}"
    return _TINY.format(
        name=origin.name, style=style, model=model, tokenizer=tokenizer, mixture=mixture, kind=watched, rate=rate
    )


def _checkpoint(text: str) -> str:
    if not text.endswith(".gguf"):
        return f"{{path: '{text}'}}"
    path = Path(text)
    return f"{{path: '{path.parent}', gguf_file: '{path.name}'}}"


_TINY = """\
  {name}:   # {style}
    warmstart:
      model: {model}
      tokenizer: {tokenizer}
      mixture: {mixture}
      steps: 1200                # at most; it ends earlier, when the rarer kind is solved often enough
      cooldown_steps: 30
      stop: {{kind: {kind}, accuracy: 0.15, every: 20, problems: 100}}
      learning_rate: {rate}
"""
_CHECKPOINT = """\
  {name}:
    checkpoint: {checkpoint}
    # chat_template: a Jinja template, where the tokenizer has none (base models)
    # update: {{lora: {{rank: 16, alpha: 32}}}}     trains an adapter instead of all weights
    # device: cpu                               or cuda:0; auto takes a GPU where there is one
"""
_TEXT = """\
# A campaign of HACRL. Check it with:   hacrl doctor --config {file}
# Run it, or go on after a stop, with:   hacrl run {file}
# Any setting is explained by:           hacrl config explain update.learning_rate
name: {name}
seed: 0                      # every random number follows from it
iterations: {iterations}               # in each one all agents answer, are judged and learn

# {comment}
problems: {problems}
prompts_per_iteration: {prompts}    # every agent answers all of them ...
samples_per_prompt: 8        # ... so many times; a prompt teaches only where some answers are right and some wrong

agents:
{agents}
generate: {{max_tokens: {max_tokens}, batch_size: {batch}}}   # longest answer, in tokens; answers sampled at a time
algorithm: {{preset: hacpo}}   # how agents learn from each other: hacrl methods; gspo trains each one alone
score: {{token_budget: {tokens}}}  # tokens in memory at a time; lower it where memory is short
update: {{learning_rate: {learning_rate}, minibatch_prompts: {minibatch}, token_budget: {tokens}}}

evaluate:
  every: 10                  # iterations between two evaluations; the first and the last version always get one
  benchmarks:
    - name: held_out         # problems that never occur in training
      problems: {benchmark}
      max_tokens: {max_tokens}

# keep: {{last: 2, best: true}}                 versions that keep their files; without it all of them do
# notify: {{on: [failed, done], command: 'echo "$HACRL_MESSAGE" >> night.txt'}}   or url, or email
"""

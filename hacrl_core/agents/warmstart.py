"""Warm start: first agents by supervised training, taught to write worked answers up to partial competence.

They are ordinary ``transformers`` checkpoints, small enough for a demonstration. Top to bottom: the training, the
model, the tokenizers. Both tokenizers are lossless for any text: another agent's response arrives as text, and must
have token ids here too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hacrl_core.agents.lessons import Corpus, kinds_of, lessons, taught_text
from hacrl_core.config.warmstart import ModelConfig, TokenizerConfig, WarmstartConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems.problem import Problem
from hacrl_core.seeding import derive_rng, derive_seed

IGNORED = -100
BETAS = (0.9, 0.98)  # a shorter memory than the default suits a run of a few hundred steps
WEIGHT_DECAY = 0.01
MAX_GRADIENT_NORM = 1.0
PROGRESS_EVERY = 10
PROBED = 200  # problems per kind behind the reported accuracies

WarmstartProgress = Callable[[int, int, dict[str, float]], None]  # steps done, steps expected, latest metrics

INIT_STD = 0.02

PAD = "<|pad|>"
END = "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, END, *_ROLES)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Examples:
    """Right-padded texts. Causal attention never looks right, so padding needs no mask, only ignored labels."""

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor  # the next token where it belongs to the answer, else IGNORED
    lengths_B: torch.Tensor

    def rows(self, rows_B: torch.Tensor) -> "Examples":
        """Return the chosen rows, cut to the longest of them."""
        lengths_B = self.lengths_B[rows_B]
        longest = int(lengths_B.max())
        return Examples(self.input_ids_BT[rows_B, :longest], self.labels_BT[rows_B, :longest], lengths_B)


def warm_start(
    config: WarmstartConfig,
    corpus: Corpus,
    seed: int,
    out_dir: Path,
    on_progress: WarmstartProgress | None = None,
) -> dict[str, float]:
    """Train a new agent and save weights, tokenizer and generation config; equal arguments give equal bytes."""
    problems, tokenizer = corpus_and_tokenizer(config, corpus, seed)
    examples = encode_examples(tokenizer, problems, config.model.max_position_embeddings)
    with _single_thread():
        model = make_model(config.model, tokenizer, derive_seed(seed, "warmstart", "weights"))
        stop = config.stop
        watched = _probe(stop.kind, corpus, seed, tokenizer, stop.problems) if stop else None
        metrics = _train(model, examples, watched, config, seed, on_progress)
        for kind in kinds_of(corpus, derive_seed(seed, "warmstart", "probe")):
            metrics[f"accuracy/{kind}"] = solved_share(model, _probe(kind, corpus, seed, tokenizer, PROBED))
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    sizes = {"parameters": float(model.num_parameters()), "vocab_size": float(len(tokenizer))}
    return {**metrics, **sizes, "longest_example": float(examples.lengths_B.max())}


def corpus_and_tokenizer(
    config: WarmstartConfig, corpus: Corpus, seed: int
) -> tuple[list[Problem], PreTrainedTokenizerFast]:
    """Return the problems that an agent is taught and the tokenizer it reads them with."""
    problems = lessons(corpus, config.mixture, derive_seed(seed, "warmstart", "corpus"), config.corpus_problems)
    return problems, make_tokenizer(config.tokenizer, _texts(problems), config.model.max_position_embeddings)


def encode_examples(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], context_length: int) -> Examples:
    """Prompt as the chat template renders it, then the worked answer and the end token."""
    messages = [list(problem.messages) for problem in problems]
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer([taught_text(p) for p in problems], add_special_tokens=False)["input_ids"]
    rows = [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in zip(prompt_ids, answer_ids, strict=True)]
    lengths_B = torch.tensor([len(prompt) + len(answer) - 1 for prompt, answer in rows])
    if int(lengths_B.max()) >= context_length:
        raise ConfigError(
            f"warmstart: the longest text has {int(lengths_B.max()) + 1} tokens, "
            f"model.max_position_embeddings is {context_length}; raise it"
        )
    shape = (len(rows), int(lengths_B.max()))
    input_ids_BT = torch.full(shape, tokenizer.pad_token_id)
    labels_BT = torch.full(shape, IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        tokens = torch.tensor([*prompt, *answer])
        input_ids_BT[row, : len(tokens) - 1] = tokens[:-1]
        labels_BT[row, len(prompt) - 1 : len(tokens) - 1] = tokens[len(prompt) :]
    return Examples(input_ids_BT, labels_BT, lengths_B)


@torch.no_grad()
def solved_share(model: PreTrainedModel, examples: Examples) -> float:
    """Share of problems whose worked answer greedy decoding reproduces, from one forward pass.

    Greedy decoding writes exactly the reference iff every token is the most likely one after the reference's prefix.
    """
    logits_BTV = model(input_ids=examples.input_ids_BT, use_cache=False).logits
    right_BT = (logits_BTV.argmax(-1) == examples.labels_BT) | (examples.labels_BT == IGNORED)
    return float(right_BT.all(-1).float().mean())


def _train(
    model: PreTrainedModel,
    examples: Examples,
    watched: Examples | None,
    config: WarmstartConfig,
    seed: int,
    on_progress: WarmstartProgress | None,
) -> dict[str, float]:
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    batches = _batches(len(examples.lengths_B), config.batch_size, derive_rng(seed, "warmstart", "order"))
    cooldown = config.steps if config.cooldown_steps is None else config.cooldown_steps
    metrics: dict[str, float] = {}
    step = 0
    end = config.steps
    cooling = False
    while step < end:
        step += 1
        rise, fall = step / max(1, config.warmup_steps), (end - step + 1) / (cooldown + 1)
        loss = _step(model, optimizer, examples.rows(next(batches)), config.learning_rate * min(1.0, rise, fall))
        if watched and config.stop and not cooling and step % config.stop.every == 0:
            metrics["watched_accuracy"] = solved_share(model, watched)
            if metrics["watched_accuracy"] >= config.stop.accuracy:
                end, cooling = min(end, step + cooldown), True
        if step == end or step % PROGRESS_EVERY == 0:
            metrics |= {"loss": float(loss), "steps": float(step)}
            if on_progress:
                on_progress(step, end, dict(metrics))
    return metrics


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Examples, rate: float) -> torch.Tensor:
    for group in optimizer.param_groups:
        group["lr"] = rate
    hidden_BTH = model.base_model(input_ids=batch.input_ids_BT, use_cache=False).last_hidden_state
    taught_BT = batch.labels_BT != IGNORED
    logits_LV = model.get_output_embeddings()(hidden_BTH[taught_BT])  # only where there is something to learn
    loss = functional.cross_entropy(logits_LV, batch.labels_BT[taught_BT])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    return loss.detach()


def _batches(total: int, size: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Endless batches, each problem once per pass; the short rest of a pass is dropped."""
    size = min(size, total)
    while True:
        order_SB = torch.from_numpy(rng.permutation(total)[: total - total % size]).view(-1, size)
        yield from order_SB.unbind()


def _probe(kind: str, corpus: Corpus, seed: int, tokenizer: PreTrainedTokenizerFast, count: int) -> Examples:
    """Problems of one kind from the training split: the held-out ones stay unseen, by every decision too."""
    problems = lessons(corpus, {kind: 1.0}, derive_seed(seed, "warmstart", "probe"), count)
    return encode_examples(tokenizer, problems, int(tokenizer.model_max_length))


def _texts(problems: Sequence[Problem]) -> list[str]:
    return [text for problem in problems for text in (problem.messages[0]["content"], taught_text(problem))]


@contextmanager
def _single_thread() -> Iterator[None]:
    """One thread: sums then have one order, so equal inputs give equal bytes; and tiny matrices are faster that way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_model(config: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return a randomly initialised ``transformers`` model of the named family and size."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model_config = AutoConfig.for_model(
        config.architecture,
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden_size // config.heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    _initialise(model, seed)
    return model


@torch.no_grad()
def _initialise(model: PreTrainedModel, seed: int) -> None:
    """Draw the weights from a generator of our own: the library draws from the process's, which other threads share."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # biases and norms
        else:
            parameter.normal_(0.0, INIT_STD, generator=generator)


def make_tokenizer(config: TokenizerConfig, texts: Sequence[str], context_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with chat template, pad and end token; ``texts`` teach a BPE its merges, bytes need none."""
    backend = _byte_tokenizer() if config.kind == "characters" else _bpe_tokenizer(texts, config.vocab_size)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=context_length,
    )


def _byte_tokenizer() -> Tokenizer:
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *_alphabet()])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return backend


def _bpe_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    # GPT-2's pattern keeps a run of digits together and apart from signs, so merges are numbers, never "+3".
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=_alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())  # a set in the library: sorted, or ids change from run to run

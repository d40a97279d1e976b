"""Two tokenizers that cut the same text differently, both lossless for any text: bytes, and a BPE trained on the corpus.

Lossless matters: another agent's response arrives as text, and whatever it wrote must have token ids here too.
"""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hacrl_core.config.warmstart import TokenizerConfig

PAD, END = "<|pad|>", "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, END, *_ROLES)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(config: TokenizerConfig, texts: Sequence[str], context_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer with chat template, pad and end token; ``texts`` teach a BPE its merges, bytes need none."""
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

"""Tiny tokenizers of every family that agents come with, trained on the spot."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
ROLES: dict[str, str] = {"bos_token": "<s>", "eos_token": "<|end|>"}
CORPUS = [
    "Hello world, the answer is 42. What is 12+30? It is 42, that is \\boxed{42}.",
    "naïve café — 東京 is a city 🙂 <think> so </think> and the </s> of it, <|end|> <s> [SEP]",
    "0123456789 abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ <>|/_[]{}()+-*=?!.,:;'\"\\",
] * 8


def wrap(backend: Tokenizer, **roles: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **(ROLES | roles), clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def character() -> Any:
    letters = sorted({letter for line in CORPUS for letter in line})
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", *letters])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return wrap(backend, unk_token="<unk>")


def byte_bpe() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend)


def byte_bpe_whole_words() -> Any:
    """Like Llama 3: a word that is in the vocabulary is taken whole, special tokens included."""
    backend = byte_bpe().backend_tokenizer
    vocab, merges = backend.get_vocab(with_added_tokens=False), json.loads(backend.model.__getstate__())["merges"]
    model = models.BPE(vocab | {"<|end|>": len(vocab)}, [tuple(merge) for merge in merges], ignore_merges=True)
    whole = Tokenizer(model)
    whole.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s|\S+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    whole.decoder = decoders.ByteLevel()
    return wrap(whole)


def unigram() -> Any:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=170, special_tokens=names, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend, unk_token="<unk>", eos_token="</s>")


def metaspace_bpe() -> Any:
    """Like Llama 2: a prefix space for every text, bytes for what is not in the vocabulary."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    ascii_corpus = [line for line in CORPUS if line.isascii()]
    backend.train_from_iterator(
        ascii_corpus, trainers.BpeTrainer(vocab_size=420, special_tokens=names, show_progress=False)
    )
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return wrap(Tokenizer.from_str(json.dumps(spec)), unk_token="<unk>", eos_token="</s>")


def wordpiece() -> Any:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    names = ["[UNK]", "[CLS]", "[SEP]"]
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=260, special_tokens=names, show_progress=False)
    )
    return wrap(backend, unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]")


def sentencepiece_package() -> Any:
    """The sentencepiece library itself, without the tokenizers package."""
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: make setup installs it")
    from tempfile import NamedTemporaryFile

    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=360, byte_fallback=True, minloglevel=9,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False,
    )  # fmt: skip
    with NamedTemporaryFile(suffix=".model") as file:
        file.write(model.getvalue())
        file.flush()
        tokenizer = SentencePieceBackend(vocab_file=file.name, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def adds_bos_itself() -> Any:
    tokenizer = byte_bpe()
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


MAKERS: dict[str, Callable[[], Any]] = {
    maker.__name__: maker
    for maker in (character, byte_bpe, byte_bpe_whole_words, unigram, metaspace_bpe, wordpiece, sentencepiece_package)
}
_made: dict[str, Any] = {}


@pytest.fixture(params=sorted(MAKERS))
def any_tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param not in _made:
        _made[request.param] = MAKERS[request.param]()
    return _made[request.param]


@pytest.fixture(scope="session")
def make() -> Callable[[str], Any]:
    """A fresh tokenizer by name, for tests that change it or compare two."""
    return lambda name: (MAKERS | {"adds_bos_itself": adds_bos_itself})[name]()

"""Both tokenizers are lossless, cut numbers differently, and render a chat as training and sampling expect."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hacrl_core.agents.warmstart import SPECIAL_TOKENS, make_tokenizer
from hacrl_core.config.problems import ArithmeticConfig
from hacrl_core.config.warmstart import TokenizerConfig
from hacrl_core.problems.arithmetic import training_problem, worked_answer

PROBLEMS = [training_problem(0, index, ArithmeticConfig()) for index in range(1000)]
TEXTS = [text for p in PROBLEMS for text in (p.messages[0]["content"], worked_answer(p))]


def make(kind: str) -> PreTrainedTokenizerFast:
    return make_tokenizer(TokenizerConfig(kind=kind), TEXTS, 128)  # type: ignore[arg-type]


cached = functools.cache(make)


@pytest.fixture(scope="module", params=["characters", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return make(request.param)


@given(st.text(max_size=60))
@settings(max_examples=60)
@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_any_text_survives(kind: str, text: str) -> None:
    if any(token in text for token in SPECIAL_TOKENS):
        return
    tokenizer = cached(kind)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
    if kind == "characters":
        assert len(ids) == len(text.encode())


def test_numbers_are_single_characters_or_whole() -> None:
    characters, bpe = make("characters"), make("bpe")
    assert characters.tokenize("47+38=?") == list("47+38=?")
    two_digits = [str(number) for number in range(10, 100)]
    whole = [number for number in two_digits if len(bpe.tokenize(number)) == 1]
    assert len(whole) >= 80
    assert sum(map(len, map(bpe.tokenize, TEXTS))) < 0.75 * sum(map(len, map(characters.tokenize, TEXTS)))
    assert bpe.tokenize("47+38")[1] == "+"  # signs never merge with digits


def test_chat_template_and_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2=?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>Add.<|end|><|user|>1+2=?<|end|><|assistant|>"
    specials = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS]
    assert specials == list(range(len(SPECIAL_TOKENS)))
    assert [i for i in tokenizer(text, add_special_tokens=False)["input_ids"] if i in specials] == [2, 1, 3, 1, 4]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")
    assert tokenizer.bos_token is None


def test_training_twice_gives_the_same_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    again = make("characters" if len(tokenizer) == 261 else "bpe")
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()

import pytest
from tokenizers.normalizers import Lowercase
from transformers import AutoTokenizer

from hacrl_core.rendering import tokenizer_fingerprint


# Training the others (unigram, wordpiece) twice does not give the same model: scores and ties differ.
@pytest.mark.parametrize(
    "name", ["character", "byte_bpe", "byte_bpe_whole_words", "metaspace_bpe", "sentencepiece_package"]
)
def test_two_builds_of_one_tokenizer_agree(make, name):
    assert tokenizer_fingerprint(make(name)) == tokenizer_fingerprint(make(name))


def test_different_tokenizers_differ(make):
    names = ["character", "byte_bpe", "unigram", "metaspace_bpe", "wordpiece", "adds_bos_itself"]
    assert len({tokenizer_fingerprint(make(name)) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["character", "byte_bpe", "unigram", "metaspace_bpe"])
def test_saving_and_loading_changes_nothing(make, name, tmp_path):
    tokenizer = make(name)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)
    loaded.save_pretrained(tmp_path / "again")
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path / "again")) == tokenizer_fingerprint(tokenizer)


def test_use_does_not_change_it(make):
    tokenizer = make("byte_bpe")
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token  # set and unset: only the roles at the time count
    tokenizer(["a", "longer"], padding=True, truncation=True, max_length=4)
    tokenizer.pad_token = None
    assert tokenizer_fingerprint(tokenizer) == before


def test_everything_that_gives_ids_their_meaning_counts(make):
    base = make("byte_bpe")
    seen = {tokenizer_fingerprint(base), tokenizer_fingerprint(base, "{{ messages }}")}
    changes = [
        lambda t: t.add_tokens(["<think>"]),
        lambda t: t.add_special_tokens({"eos_token": "<|user|>"}),
        lambda t: setattr(t, "chat_template", "other"),
        lambda t: setattr(t.backend_tokenizer, "normalizer", Lowercase()),
    ]
    for change in changes:
        changed = make("byte_bpe")
        change(changed)
        seen.add(tokenizer_fingerprint(changed))
    assert len(seen) == 2 + len(changes)

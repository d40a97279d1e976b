"""A GGUF file's tokenizer is converted once; what is read from the cache is what a conversion gives."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hacrl_core.agents import gguf_tokenizers
from hacrl_core.agents.gguf_tokenizers import cache_folder, converted_tokenizer
from hacrl_core.rendering import tokenizer_fingerprint


def tokenizer() -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<e>": 0, "a": 1}, unk_token="a")), eos_token="<e>"
    )
    made.chat_template = "{{ messages[0].content }}"
    return made


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF one")
    return path


def test_a_file_is_converted_once_whatever_its_name_and_again_when_its_content_changes(file: Path) -> None:
    conversions: list[int] = []

    def convert() -> PreTrainedTokenizerFast:
        conversions.append(1)
        return tokenizer()

    prints = [tokenizer_fingerprint(converted_tokenizer(file, convert)) for _ in range(3)]
    renamed = file.rename(file.with_name("other.gguf"))
    prints.append(tokenizer_fingerprint(converted_tokenizer(renamed, convert)))
    assert len(conversions) == 1
    assert set(prints) == {tokenizer_fingerprint(tokenizer())}
    renamed.write_bytes(b"GGUF two")
    converted_tokenizer(renamed, convert)
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_costs_a_conversion_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder().parent.mkdir(parents=True)
    cache_folder().write_text("a file where the folder should be")
    assert tokenizer_fingerprint(converted_tokenizer(file, tokenizer)) == tokenizer_fingerprint(tokenizer())


def test_other_libraries_convert_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted_tokenizer(file, tokenizer)
    monkeypatch.setattr(gguf_tokenizers.transformers, "__version__", "9.9.9")
    with pytest.raises(ZeroDivisionError):
        converted_tokenizer(file, lambda: 1 / 0)

"""Groups of ranks for the tests. A process has one group at a time, so tests with equally many ranks share one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from hacrl_core.learning.sharded.ranks import RankGroup
from tests.ranks.tasks import VOCABULARY

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 18,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 2,
}
_KINDS = {
    "llama": transformers.LlamaConfig,
    "qwen3": transformers.Qwen3Config,
    "gemma3": transformers.Gemma3TextConfig,
}


@pytest.fixture(scope="session")
def group() -> Iterator[Callable[[int], RankGroup]]:
    """Return an open group of so many ranks."""
    torch.set_num_threads(1)
    held: list[RankGroup] = []

    def of(count: int) -> RankGroup:
        if not (held and held[-1].is_open and held[-1].count == count):
            held.append(RankGroup(count, "cpu"))
        return held[-1]

    yield of
    for one in held:
        one.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a tiny model with random weights, whose sizes no number of ranks divides."""
    made: dict[tuple[str, bool], Path] = {}

    def of(kind: str, *, tied: bool) -> Path:
        if (kind, tied) not in made:
            folder = made[kind, tied] = tmp_path_factory.mktemp(f"{kind}-{tied}")
            torch.manual_seed(5)
            config = _KINDS[kind](**_SMALL, tie_word_embeddings=tied)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():  # norms of ones and biases of zeros would hide a wrong slice
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
            model.save_pretrained(folder)
            words = {"<bos>": 0, "<end>": 1, "<pad>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
            tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
            ).save_pretrained(folder)
        return made[kind, tied]

    return of

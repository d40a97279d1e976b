"""Tokenizers that break others, end to end: adopt, generate, score; log-probs against plain transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.contracts.tables import PROMPTS, ROLLOUTS, SCORES, read_table
from stages.runner import run_stage
from stages.spec import Context, StageCall
from tests.flow.conftest import tiny

from .conftest import byte_tokenizer, save_checkpoint

THINKING = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% if enable_thinking is not defined or enable_thinking %}<think>\n{% "
    "endif %}{% endif %}"
)


def sentencepiece_like() -> Any:
    """As Llama 2's: marks the start of a text with ▁, falls back to bytes, adds BOS itself, has no pad token."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    texts = ["user: 1+2=? assistant: 1+2=3, \\boxed{3} 4 5 6 7 8 9 0 - so the answer is"] * 4
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=340, special_tokens=names, show_progress=False))
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    backend = Tokenizer.from_str(json.dumps(spec))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    tokenizer.chat_template = THINKING
    return tokenizer


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> tuple[dict[str, Any], Any]:
    """Two random models of different families answer and score each other; random bytes tear many characters apart."""
    torch.set_num_threads(1)
    root: Path = tmp_path_factory.mktemp("edges")
    folders = {
        "bytes": save_checkpoint(root / "bytes", byte_tokenizer(), eos=[1, 3], seed=1),
        "pieces": save_checkpoint(root / "pieces", sentencepiece_like(), kind="qwen3", eos=2, seed=2),
    }
    config = tiny(
        agents={name: {"checkpoint": {"path": str(folder)}} for name, folder in folders.items()},
        generate={"max_tokens": 12, "batch_size": 32},
        # Verbatim texts and ends: what settled boundaries do to them is the business of tests/unit/rendering.
        score={"token_budget": 256, "boundary": "as_written"},
    )
    calls, store, context = (
        StageCalls(config),
        Store(root / "store"),
        Context(),
    )
    outcomes: dict[str, Any] = {}

    def run(planned: StageCall) -> Done:
        call = planned.bound()
        outcomes[call.label] = run_stage(store, call, context)
        return Done(planned, outcomes[call.label])

    origins = {name: run(calls.origin(name)) for name in folders}
    prompts = run(calls.sample(origins, 0))
    rollouts = {name: run(calls.generate(name, origins[name], prompts, 0)) for name in folders}
    for name in folders:
        run(calls.score(name, origins, rollouts, prompts, 0))
    return outcomes, config


def rows_of(played, stage: str, agent: str) -> list[dict[str, Any]]:
    schema, file = {"score": (SCORES, "scores"), "generate": (ROLLOUTS, "rollouts")}[stage]
    rows: list[dict[str, Any]] = read_table(
        played[0][f"{stage} {agent} #0"].ref.path / f"{file}.parquet", schema
    ).to_pylist()
    return rows


@pytest.mark.parametrize("learner", ["bytes", "pieces"])
def test_log_probs_are_those_of_plain_transformers(played, learner):
    """Prompt by the library's own template call, response as recorded, one sequence at a time, whole logits."""
    folder = played[0][f"adopt {learner}"].ref.path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = read_table(played[0]["sample #0"].ref.path / "prompts.parquet", PROMPTS).to_pylist()
    messages = {row["prompt_id"]: row["messages"] for row in prompts}
    rows = rows_of(played, "score", learner)
    assert {row["sampler"] for row in rows} == {"bytes", "pieces"}
    for row in rows[::5]:
        prompt = list(
            tokenizer.apply_chat_template(messages[row["prompt_id"]], add_generation_prompt=True, return_dict=False)
        )
        assert list(row["prompt_token_ids"]) == prompt
        ids = torch.tensor([[*prompt, *row["token_ids"]]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0]
        np.testing.assert_allclose(row["logprobs"], expected.numpy(), atol=2e-5)


@pytest.mark.parametrize(("learner", "sampler"), [("bytes", "pieces"), ("pieces", "bytes")])
def test_a_foreign_response_has_no_special_token_but_its_end(played, learner, sampler):
    tokenizer = AutoTokenizer.from_pretrained(played[0][f"adopt {learner}"].ref.path)
    end = {"bytes": 3, "pieces": 2}[learner]  # the one that ends a turn, not the first of the model's list
    written = {row["rollout_id"]: row for row in rows_of(played, "generate", sampler)}
    foreign = [row for row in rows_of(played, "score", learner) if row["sampler"] == sampler]
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    kinds = set()
    for row in foreign:
        finished = written[row["rollout_id"]]["finish_reason"] == "stop" and not row["truncated"]
        *body, last = row["token_ids"]
        assert special.isdisjoint(body)
        assert (last == end) == finished
        kinds.add(finished)
        if not row["truncated"]:
            text = tokenizer.decode([i for i in row["token_ids"] if i != end], clean_up_tokenization_spaces=False)
            assert text == written[row["rollout_id"]]["response_text"]
    assert False in kinds


def test_responses_end_inside_characters_and_travel_without_the_torn_bytes(played):
    tokenizer = AutoTokenizer.from_pretrained(played[0]["adopt bytes"].ref.path)
    rows = rows_of(played, "generate", "bytes")
    raw = [tokenizer.decode(row["response_token_ids"], skip_special_tokens=True) for row in rows]
    torn = [text for text in raw if text.endswith("�")]
    assert torn, "random bytes should tear some characters"
    assert not any(row["response_text"].endswith("�") for row in rows)


def test_one_bos_a_thinking_block_and_no_pad_token(played):
    tokenizer = AutoTokenizer.from_pretrained(played[0]["adopt pieces"].ref.path)
    assert tokenizer.pad_token_id is None
    for row in rows_of(played, "generate", "pieces"):
        ids = row["prompt_token_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert ids[1] != tokenizer.bos_token_id
        assert tokenizer.convert_ids_to_tokens(ids).count("<think>") == 1


def test_the_same_text_in_bytes_and_in_pieces(played):
    """Own ids and their re-encoding may differ, the text may not; each counts in its own tokens."""
    texts = [row["response_text"] for row in rows_of(played, "generate", "pieces")]
    lengths = [len(row["token_ids"]) for row in rows_of(played, "score", "bytes") if row["sampler"] == "pieces"]
    own = [len(row["token_ids"]) for row in rows_of(played, "score", "pieces") if row["sampler"] == "pieces"]
    assert len(texts) == len(own) >= len(lengths)
    assert lengths != own

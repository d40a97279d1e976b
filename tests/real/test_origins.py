"""Any downloaded model becomes one kind of checkpoint: end tokens, BOS, template, pickles, remote code, revisions."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl_core.agents.adoption import adopt_checkpoint, read_origin
from hacrl_core.agents.agent import load_agent
from hacrl_core.agents.checkpoints import save_model
from hacrl_core.artifacts.sources import locate, source_digest
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.errors import ConfigError, EngineError
from hacrl_core.problems import rows
from hacrl_core.rendering import render_prompt, turn_end
from hacrl_core.warm import WarmModels

from .conftest import TEMPLATE, byte_tokenizer, read_json, save_checkpoint

QUESTION = ({"role": "user", "content": "1+1?"},)


def test_all_end_tokens_are_kept_and_the_one_that_ends_a_turn_comes_first(checkpoint, tmp_path):
    """As in Llama 3.2: the list begins with the end of a text, turns end with another token."""
    folder = checkpoint(eos=[1, 3])
    origin, _ = adopt_checkpoint(CheckpointConfig(path=str(folder)), tmp_path / "ours")
    assert origin.stop_token_ids == (3, 1)
    assert read_json(tmp_path / "ours" / "generation_config.json")["eos_token_id"] == [3, 1]
    assert load_agent(tmp_path / "ours").stop_token_ids == (3, 1)


def test_stop_tokens_of_the_config_are_added_in_front(checkpoint, tmp_path):
    folder = checkpoint(eos=1)
    config = CheckpointConfig(path=str(folder), stop_tokens=("<|turn|>",))
    adopt_checkpoint(config, tmp_path / "ours")
    assert load_agent(tmp_path / "ours").stop_token_ids == (2, 1)
    with pytest.raises(ConfigError, match=r"stop token '<\|im_end\|>' is not one token"):
        read_origin(config.model_copy(update={"stop_tokens": ("<|im_end|>",)}))


def test_turn_end_without_a_template_is_the_tokenizers(checkpoint):
    tokenizer = byte_tokenizer()
    assert turn_end(tokenizer, (1, 3)) == 3
    tokenizer.chat_template = None
    assert turn_end(tokenizer, (3, 1)) == 1
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert turn_end(tokenizer, (3, 0)) == 3


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    "override", [None, "{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}<|eot|>"]
)
def test_bos_where_the_model_needs_one_and_the_template_travel_with_the_agent(tmp_path, adds_bos, override):
    """Rendered here or in plain transformers, the prompt begins with one BOS."""
    folder = save_checkpoint(tmp_path / "theirs", byte_tokenizer(adds_bos=adds_bos))
    adopt_checkpoint(CheckpointConfig(path=str(folder), add_bos=True), tmp_path / "ours", override)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    ids = render_prompt(tokenizer, QUESTION)
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert (tokenizer.chat_template != TEMPLATE) == (override is not None or not adds_bos)
    if not adds_bos:
        theirs = tokenizer.apply_chat_template(list(QUESTION), add_generation_prompt=True, return_dict=False)
        assert list(theirs) == ids


def test_bos_without_a_bos_token_is_one_line(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    folder = save_checkpoint(tmp_path / "theirs", tokenizer)
    with pytest.raises(ConfigError, match="has no BOS token; remove add_bos"):
        read_origin(CheckpointConfig(path=str(folder), add_bos=True))


def test_a_pickle_is_refused_with_the_remedy(checkpoint, tmp_path):
    folder = checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    read_origin(CheckpointConfig(path=str(folder)))  # beside safetensors it is ignored
    (folder / "model.safetensors").unlink()
    for act in (lambda c: read_origin(c), lambda c: adopt_checkpoint(c, tmp_path / "ours")):
        with pytest.raises(ConfigError, match=r"pytorch_model.bin only, a pickle.*save_pretrained it into a folder"):
            act(CheckpointConfig(path=str(folder)))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OddConfig(LlamaConfig):
    model_type = "odd"
class OddModel(LlamaForCausalLM):
    config_class = OddConfig
    own_code_ran = True
"""


@pytest.fixture
def odd(checkpoint, monkeypatch, tmp_path):
    """A checkpoint that brings its own Python code."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = checkpoint("odd")
    (folder / "odd.py").write_text(CODE)
    config = read_json(folder / "config.json")
    config |= {
        "model_type": "odd",
        "architectures": ["OddModel"],
        "auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    yield folder
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path / "modules")]


def test_remote_code_runs_only_when_the_config_says_so_and_then_in_every_stage(odd, tmp_path):
    for act in (lambda c: read_origin(c), lambda c: adopt_checkpoint(c, tmp_path / "no")):
        with pytest.raises(ConfigError, match=r"comes with Python code of its own.*trust_remote_code: true"):
            act(CheckpointConfig(path=str(odd)))
    adopt_checkpoint(CheckpointConfig(path=str(odd), trust_remote_code=True), tmp_path / "ours")
    agent = load_agent(tmp_path / "ours", own_code=True)
    assert agent.model.own_code_ran
    save_model(agent, tmp_path / "next")  # as an update does
    assert load_agent(tmp_path / "next", own_code=True).model.own_code_ran
    # A file in the artifact asks for it, as one of a stranger's store may; only the config allows it.
    for warm in (WarmModels(), WarmModels().for_agent("ada")):
        for act in (lambda w: w.tokenizer(tmp_path / "next"), lambda w: w.agent(tmp_path / "next", "d", device="cpu")):
            with pytest.raises(EngineError, match=r"the campaign's config does not allow it; set .*trust_remote_code"):
                act(warm)
    trusting = WarmModels().for_agent("ada", own_code=True)
    assert trusting.agent(tmp_path / "next", "d", device="cpu").model.own_code_ran
    (tmp_path / "next" / "agent.json").unlink()
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_agent(tmp_path / "next")


def test_a_hub_id_without_revision_records_the_commit_it_stood_for(checkpoint, tmp_path, monkeypatch):
    """From a cache as the hub's library leaves it, without a network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(checkpoint(), cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    for place in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(place, str(tmp_path / "hub"))
    monkeypatch.setattr(rows, "_hub_answers", lambda endpoint: False)
    config = CheckpointConfig(path="org/tiny")
    assert read_origin(config).commit == commit
    origin, _ = adopt_checkpoint(config, tmp_path / "ours")
    assert origin.commit == commit
    # The key does not move with the branch: a campaign that resumes goes on with what it began with.
    assert source_digest(config) == "hub:org/tiny@main"
    with pytest.raises(ConfigError, match="not in the local cache"):
        read_origin(CheckpointConfig(path="org/tiny", revision="f" * 40))


def test_where_a_checkpoint_lies(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint()
    assert locate(CheckpointConfig(path=str(folder))) == folder
    assert locate(CheckpointConfig(path="org/model")) == "org/model"
    with pytest.raises(ConfigError, match="no such folder"):
        locate(CheckpointConfig(path=str(tmp_path / "absent")))
    with pytest.raises(ConfigError, match="no package nobody_has_this; install it"):
        locate(CheckpointConfig(path="package:nobody_has_this"))
    (tmp_path / "carries_a_model").mkdir()
    (tmp_path / "carries_a_model" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate(CheckpointConfig(path="package:carries_a_model")) == tmp_path / "carries_a_model"


def test_attention_is_chosen_or_refused_in_one_line(checkpoint):
    folder = checkpoint()
    assert load_agent(folder, attention="eager").model.config._attn_implementation == "eager"
    assert load_agent(folder).model.config._attn_implementation == "sdpa"
    with pytest.raises(EngineError, match="attention flash_attention_2 is not available here"):
        load_agent(folder, attention="flash_attention_2")


def test_no_pad_token_pads_with_an_end_token(checkpoint):
    agent = load_agent(checkpoint(eos=[1, 3]))
    assert agent.tokenizer.pad_token_id is None
    assert agent.pad_token_id in agent.stop_token_ids


def test_origin_reads_no_weights(checkpoint):
    folder = checkpoint()
    (folder / "model.safetensors").write_bytes(b"not weights")
    assert read_origin(CheckpointConfig(path=str(folder))).config.model_type == "llama"


def test_gguf_of_a_missing_name_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no file absent\.gguf"):
        source_digest(CheckpointConfig(path=str(tmp_path), gguf_file="absent.gguf"))

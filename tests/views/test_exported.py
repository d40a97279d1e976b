"""An exported agent in environments that know nothing of this project."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from flows.agents.export import export_agent
from flows.home import Home
from hacrl_core.errors import ConfigError
from tests.flow.conftest import AGENT
from tests.patience import patience

from .conftest import run_recorded, seen_config

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
ASK = [{"role": "user", "content": "3+4=?"}]

# No site hooks: packages are found, this project (installed in editable mode through a hook) is not.
TRANSFORMERS = """
import sys, importlib.util, json
sys.path.append(sys.argv[2])
assert importlib.util.find_spec("hacrl_core") is None and importlib.util.find_spec("flows") is None
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
messages = json.loads(sys.argv[3])
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0].tolist()
print(json.dumps({"prompt": prompt["input_ids"][0].tolist(), "out": out, "eos": model.generation_config.eos_token_id}))
"""
VLLM_LOADS = """
import sys, importlib.util, json
assert importlib.util.find_spec("hacrl_core") is None
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=48, enforce_eager=True)
    out = llm.chat(json.loads(sys.argv[2]), SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0]
    print("RESULT" + json.dumps({"prompt": out.prompt_token_ids, "out": list(out.outputs[0].token_ids)}))
"""


@pytest.fixture(scope="module")
def exported(seen, tmp_path_factory):
    return export_agent(seen, "seen/ada@best", tmp_path_factory.mktemp("out") / "ada").folder


@pytest.fixture(scope="module")
def alone(exported):
    return read_alone(exported)


def read_alone(folder):
    """What plain transformers makes of it, in a process without this project."""
    packages = sysconfig.get_path("purelib")
    command = [sys.executable, "-I", "-S", "-c", TRANSFORMERS, str(folder), packages, json.dumps(ASK)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, timeout=patience(240))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_a_plain_checkpoint_with_a_card(exported, history):
    names = {path.relative_to(exported).as_posix() for path in exported.rglob("*")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "README.md"} <= names
    assert "chat_template.jinja" in names
    assert not any(name.startswith(("training", "adapter", "manifest")) for name in names)
    card = (exported / "README.md").read_text()
    entry = history.versions["ada"][history.best("ada")]
    manifest = history.store.manifest(entry.stage, entry.key)
    assert manifest.content_digest in card
    assert "library_name: transformers" in card
    assert f"{dict(history.accuracy('ada', 'held_out'))[history.best('ada')]:.1%}" in card
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [1]
    assert (exported / "model.safetensors").stat().st_mode & 0o044


def test_transformers_loads_it_without_this_project_and_writes_what_our_engine_writes(alone, exported):
    from transformers import AutoTokenizer

    from hacrl_core.generation.builtin.engine import BuiltinEngine
    from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
    from hacrl_core.rendering import render_prompt

    prompt = render_prompt(AutoTokenizer.from_pretrained(exported), ASK)
    assert alone["prompt"] == prompt
    assert alone["eos"] == [1]
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    [ours] = BuiltinEngine().generate(exported, "any", [GenerationRequest("r", tuple(prompt), 0)], greedy)
    theirs = alone["out"][len(prompt) :]
    assert len(ours.token_ids) >= 2
    assert list(ours.token_ids) == theirs[: len(ours.token_ids)]


def test_a_chat_template_of_the_campaign_goes_with_the_agent(own, tmp_path):
    place = own.campaign("seen") / "config.json"
    config = json.loads(place.read_text())
    config["agents"]["ada"]["chat_template"] = "{{ messages[0]['content'] }}!"
    place.write_text(json.dumps(config))
    folder = export_agent(own, "seen/ada@2", tmp_path / "ada").folder
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}!"


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("seen/ada@9", "no such version; give latest, best, or a number of iterations from 0 to 3"),
        ("seen/zoe", "agent zoe: not in campaign seen"),
        ("nobody/ada", "not an agent of a campaign|neither a folder"),
    ],
)
def test_what_is_not_there_is_one_line(seen, tmp_path, agent, says):
    with pytest.raises(ConfigError, match=says):
        export_agent(seen, agent, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(seen, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        export_agent(seen, "seen/ada", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


@pytest.mark.vllm
def test_vllm_loads_it_in_its_own_environment_and_writes_the_same(tmp_path):
    """With heads of 32: vLLM's CPU kernels take no smaller ones."""
    if not VLLM.exists():
        pytest.skip("vLLM's environment is not there: make vllm")
    model = {**AGENT["model"], "hidden_size": 64, "heads": 2, "kv_heads": 1}
    config = seen_config(name="wide", iterations=1, agents={"ada": {"warmstart": {**AGENT, "model": model}}})
    run_recorded(config, Home(tmp_path / "home"))
    folder = export_agent(Home(tmp_path / "home"), "wide/ada", tmp_path / "agent").folder
    script = tmp_path / "load.py"
    script.write_text(VLLM_LOADS)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1"}
    command = [str(VLLM), str(script), str(folder), json.dumps(ASK)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=patience(280))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.split("RESULT")[1].splitlines()[0])
    theirs = read_alone(folder)
    assert found["prompt"] == theirs["prompt"]
    assert found["out"] == theirs["out"][len(theirs["prompt"]) :][: len(found["out"])]

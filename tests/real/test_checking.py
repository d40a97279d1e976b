"""``hacrl doctor --config``: what it shows, what it finds, how it ends."""

import io
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from transformers import AutoConfig
from typer.testing import CliRunner

from flows.cli import app
from flows.doctor.campaign import check_campaign
from flows.plan.plan import Cluster, make_plan
from flows.plan.rates import load_rates
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from tests.flow.conftest import AGENT, TINY, tiny

from .conftest import byte_tokenizer

GIB = 1 << 30
PAPER = Path(__file__).resolve().parents[2] / "configs" / "paper"


def look(config):
    console = Console(file=io.StringIO(), width=80)
    code = check_campaign(console, config)
    return code, console.file.getvalue()


def test_both_ends_of_an_agent_with_a_stop_string_are_shown(checkpoint):
    base = {"checkpoint": {"path": str(checkpoint("one", eos=[1, 3]))}, "generate": {"stop_strings": ["\n"]}}
    _, text = look(tiny(agents={"ada": {"warmstart": AGENT}, "uno": base}))
    shown = " ".join(text.split())
    assert "ends with the stop string '\\n' or the end token" in shown
    alike = " ".join(look(tiny(agents={"ada": {"warmstart": AGENT}, "ben": {"warmstart": AGENT}}))[1].split())
    assert "other agents' responses keep their white space" in alike


def test_a_ready_campaign(checkpoint):
    one, two = checkpoint("one", eos=[1, 3]), checkpoint("two", kind="qwen3", hidden=32, eos=[1, 3])
    agents = {
        "ada": {"warmstart": AGENT},
        "uno": {"checkpoint": {"path": str(one)}},
        "due": {"checkpoint": {"path": str(two)}},
    }
    code, text = look(tiny(agents=agents))
    assert code == 0
    assert "tiny: 3 agents are ready." in text
    assert "<|turn|>user: " in text  # the prompt as the agent sees it
    assert "end tokens <|eot|> <|text_end|>" in text
    assert "shares   tokens with due: ids are kept" in text
    assert "shares   tokens with uno: ids are kept" in text
    shown = " ".join(text.split())
    assert shown.count("other agents' responses get its own lead and end") == 3
    assert "ends with the end token <|eot|> or the end token <|text_end|>" in shown
    assert text.count("fits") == 3
    assert max(map(len, text.splitlines())) <= 80


def test_a_benchmark_that_cannot_be_read_is_found_before_the_night(tmp_path):
    held_out = TINY["evaluate"]["benchmarks"][0]
    large = {**held_out, "name": "large", "problems": {**held_out["problems"], "size": 10_000}}
    code, text = look(tiny(evaluate={"benchmarks": [held_out, large]}))
    assert code == 2
    assert "fault: benchmark large: arithmetic" in text.replace("\n", " ")


def test_each_fault_is_one_line(checkpoint, tmp_path):
    dumb = byte_tokenizer()
    dumb.chat_template = None
    agents = {
        "gone": {"checkpoint": {"path": str(tmp_path / "gone")}},
        "mute": {"checkpoint": {"path": str(checkpoint("mute", tokenizer=dumb))}},
        "placed": {"warmstart": AGENT, "device": "cuda:3", "gpus": [97]},
        "narrow": {"warmstart": AGENT, "generate": {"max_tokens": 5000}},
        "flashy": {"warmstart": AGENT, "attention": "flash_attention_2"},
    }
    code, text = look(tiny(agents=agents))
    faults = [line for line in text.splitlines() if line.startswith("fault: ")]
    assert code == 2
    assert [fault.split(":")[1].strip() for fault in faults] == [f"agent {name}" for name in agents]
    for fault, words in zip(
        faults,
        [
            "no such folder",
            "no chat template",
            "GPU 97 does not exist",
            "its context has 256",
            "flash-attn is not installed",
        ],
        strict=True,
    ):
        assert words in fault
    assert "are ready" not in text


def test_too_little_memory_is_a_fault(monkeypatch):
    monkeypatch.setattr("flows.doctor.campaign.free_bytes", lambda place: GIB)
    code, text = look(tiny())
    assert code == 2
    assert (
        "cpu: ada and ben need about 1.2 GiB, 1.0 are free; spread it over more GPUs (update.ranks), lower"
        in " ".join(text.split())
    )


# The paper's models as their publishers describe them: hidden, layers, heads, MLP, family.
SHAPES = {
    "Qwen/Qwen3-1.7B-Base": (2048, 28, 16, 6144, "qwen3"),
    "Qwen/Qwen3-4B-Base": (2560, 36, 32, 9728, "qwen3"),
    "Qwen/Qwen3-4B": (2560, 36, 32, 9728, "qwen3"),
    "Qwen/Qwen3-4B-Instruct-2507": (2560, 36, 32, 9728, "qwen3"),
    "Qwen/Qwen3-8B-Base": (4096, 36, 32, 12288, "qwen3"),
    "meta-llama/Llama-3.2-1B-Instruct": (2048, 16, 32, 8192, "llama"),
    "meta-llama/Llama-3.2-3B-Instruct": (3072, 28, 24, 8192, "llama"),
}


def paper_campaign(pair, folder):
    """A pair's own settings; its models are folders without weights, its problems are ours."""
    config = load_config(PAPER / f"{pair}.yaml", CampaignConfig)
    raw = config.model_dump(mode="json")
    for agent, settings in raw["agents"].items():
        hidden, layers, heads, mlp, family = SHAPES[settings["checkpoint"]["path"]]
        shape = AutoConfig.for_model(
            family, vocab_size={"qwen3": 151_936, "llama": 128_256}[family], hidden_size=hidden, eos_token_id=1,
            intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
            head_dim={"llama3.2-1b": 64}.get(agent, 128), max_position_embeddings=40_960,
            tie_word_embeddings=hidden != 4096,
        )  # fmt: skip
        shape.save_pretrained(folder / agent)
        byte_tokenizer().save_pretrained(folder / agent)
        settings["checkpoint"] = {"path": str(folder / agent)}
    return CampaignConfig.model_validate({**raw, "problems": {"kind": "arithmetic"}, "evaluate": TINY["evaluate"]})


@pytest.fixture
def eight_gpus(monkeypatch):
    """A machine with eight GPUs of 80 GB; returns what is free on each, to be changed."""
    free = dict.fromkeys((f"cuda:{n}" for n in range(8)), 79_500_000_000)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda place: (free[place], 80_000_000_000))
    monkeypatch.setattr("flows.doctor.campaign.software_faults", lambda config, agent: ())
    return free


@pytest.mark.parametrize("pair", sorted(path.stem for path in PAPER.glob("*.yaml") if path.stem != "common"))
def test_doctor_says_that_a_paper_pair_fits_eight_gpus_of_80_gb(pair, tmp_path, eight_gpus):
    config = paper_campaign(pair, tmp_path)
    code, text = look(config)
    assert code == 0, text
    assert f"{pair}: 2 agents are ready." in text
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith(" fits")]
    assert [row[0] for row in rows] == list(config.agents)
    # What doctor counts is what the plan counts, of a model that transformers built and of one that is known by name.
    planned = make_plan(load_config(PAPER / f"{pair}.yaml", CampaignConfig), Cluster("H100", 8), load_rates()).stages
    for row in rows:
        peaks = {s.stage: s.memory for s in planned if s.agent == row[0]}
        wanted = [peaks[stage] / GIB for stage in ("generate", "score", "update")]
        assert [float(number) for number in row[2:5]] == pytest.approx(wanted, abs=0.06)


def test_doctor_looks_at_every_gpu_of_an_agent_and_refuses_what_would_not_fit(tmp_path, eight_gpus):
    config = paper_campaign("qwen3-4b-8b-base", tmp_path)
    large = config.agents["qwen3-8b-base"]

    def found(**changes):
        agents = {**config.agents, "qwen3-8b-base": large.model_copy(update=changes)}
        code, text = look(config.model_copy(update={"agents": agents}))
        assert code == 2
        return " ".join(text.split())

    assert "cuda:3: qwen3-8b-base need about" in found(update={"ranks": 1})
    eight_gpus["cuda:6"] -= 40_000_000_000  # somebody else's process, on one GPU of five
    assert "cuda:6: qwen3-8b-base need about 64.9 GiB, 36.8 are free" in found()
    missing = found(gpus=(3, 4, 5, 8, 9))
    assert "GPUs 8, 9 do not exist, this machine has 8" in missing
    assert "are free" not in missing


def test_problems_that_cannot_be_read_do_not_hide_the_agents(tmp_path, checkpoint):
    agents = {"uno": {"checkpoint": {"path": str(checkpoint())}}}
    problems = {"kind": "dataset", "path": str(tmp_path / "absent.jsonl")}
    code, text = look(tiny(agents=agents, problems=problems))
    assert code == 2
    assert text.count("fault: ") == 1
    assert "no such file" in text
    assert "What is 17+25?" in text


@pytest.mark.parametrize(("override", "code"), [("iterations=1", 0), ("agents.ada.update.lora.rank=0", 2)])
def test_the_command(tmp_path, override, code):
    config = {**TINY, "agents": {"ada": TINY["agents"]["ada"]}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(app, ["doctor", "--config", str(tmp_path / "c.yaml"), "--set", override])
    assert result.exit_code == code
    assert ("ada" in result.output) == (code == 0) or "agents.ada.update.lora" in result.output + str(result.stderr)

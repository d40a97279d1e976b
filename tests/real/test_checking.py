"""``hacrl doctor --config``: what it shows, what it finds, how it ends."""

import io

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from flows.cli import app
from flows.doctor.campaign import check_campaign
from tests.flow.conftest import AGENT, TINY, tiny

from .conftest import byte_tokenizer

GIB = 1 << 30


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

"""A judge behind a real vLLM server: a tiny agent that was taught its answers here, asked over the OpenAI interface."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl_core.config.judge import JudgeConfig
from hacrl_core.problems.problem import Problem
from hacrl_core.verification.judge import Judging, judge_responses
from tests.vllm.conftest import AgentMaker

pytestmark = pytest.mark.slow
STARTUP_SECONDS = 600
SCORE = "Rate {problem} {response} ="
PAIR = "Which for {problem} A {first} B {second} ?"
CHAT = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
# What the judge says: it prefers "yes" in either order, sees no difference between "aye" and "yes", and always says A
# to "nay": that is a preference for a place, which the swapped order takes away.
TAUGHT = {
    SCORE.format(problem="2+2", response="4"): "Score: 9",
    SCORE.format(problem="2+2", response="5"): "Score: 2",
    SCORE.format(problem="2+2", response="six"): "no idea",
    SCORE.format(problem="2+2", response="big"): "Score: 99",
    PAIR.format(problem="ok?", first="yes", second="no"): "Better: A",
    PAIR.format(problem="ok?", first="no", second="yes"): "Better: B",
    PAIR.format(problem="ok?", first="nay", second="no"): "Better: A",
    PAIR.format(problem="ok?", first="no", second="nay"): "Better: A",
}


@pytest.fixture(scope="module")
def judge(make_agent: AgentMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an agent that gives the taught answers, greedily."""
    source, folder = make_agent("llama", tied=False, seed=5), tmp_path_factory.mktemp("judge")
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    tokenizer.chat_template = CHAT
    rows = [tokenizer(f"[{asked}]>", add_special_tokens=False)["input_ids"] for asked in TAUGHT]
    answers = [[*tokenizer(said, add_special_tokens=False)["input_ids"], 1] for said in TAUGHT.values()]
    width = max(len(row) + len(answer) for row, answer in zip(rows, answers, strict=True))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        ids[number, : len(row) + len(answer)] = torch.tensor([*row, *answer])
        labels[number, len(row) : len(row) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(ids, attention_mask=(ids != 0).long(), labels=labels).loss
        if loss.item() < 0.005:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(vllm_python: Path, judge: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (
        f"-P -m vllm.entrypoints.openai.api_server --model {judge} --served-model-name tiny-judge --host 127.0.0.1"
    )
    command += f" --port {port} --dtype float32 --enforce-eager --kv-cache-memory-bytes 67108864 --max-num-seqs 16"
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [vllm_python, *command.split()],
            env=dict(os.environ) | environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + STARTUP_SECONDS
            while not _answers(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _asked(text: str, answer: str = "") -> Problem:
    return Problem(text, ({"role": "user", "content": text},), answer, "test", {}, {})


@pytest.mark.timeout(STARTUP_SECONDS + 120)
def test_a_judge_on_a_real_vllm_server(url: str, tmp_path: Path) -> None:
    config = JudgeConfig(url=url, model="tiny-judge", template=SCORE, max_tokens=16, timeout_seconds=60)
    judging = Judging(answers=tmp_path)
    responses, problems = ["4", "5", "six", "big"], [_asked("2+2")] * 4
    verdicts = judge_responses(responses, problems, config, judging)
    assert [str(v.verdict) for v in verdicts] == ["incorrect", "incorrect", "error", "error"], verdicts
    assert [v.raw for v in verdicts[:2]] == [9.0, 2.0]
    assert "has no score" in verdicts[2].message
    assert "outside [0, 10]" in verdicts[3].message

    pairs = JudgeConfig(url=url, model="tiny-judge", mode="pair", template=PAIR, max_tokens=16, timeout_seconds=60)
    asked = [_asked("ok?", "no"), _asked("ok?", "yes"), _asked("ok?", "no")]
    compared = judge_responses(["yes", "no", "nay"], asked, pairs, judging)
    assert [v.reward for v in compared] == [1.0, 0.0, 0.5], compared

    # A model that the server does not have is an error with the server's own words, and nothing is learned from it.
    unknown = judge_responses(["4"], problems[:1], config.model_copy(update={"model": "nobody", "tries": 1}), judging)
    assert str(unknown[0].verdict) == "error"
    assert "404" in unknown[0].message
    # What was answered is in the store: nobody is asked again.
    nowhere = config.model_copy(update={"url": "http://127.0.0.1:9/v1", "tries": 1})
    assert [v.raw for v in judge_responses(responses[:2], problems[:2], nowhere, judging)] == [9.0, 2.0]

"""The warm start learns, measures itself honestly, stops as told, and always writes the same ordinary checkpoint."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from hacrl_core.agents.agent import load_agent
from hacrl_core.agents.warmstart import IGNORED, encode_examples, solved_share, warm_start
from hacrl_core.config.problems import ArithmeticConfig
from hacrl_core.config.warmstart import WarmstartConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems.arithmetic import training_problem, worked_answer
from hacrl_core.rendering import encode_response, render_prompt

TASK = ArithmeticConfig(levels={"easy": 1.0})


def config(**changes: Any) -> WarmstartConfig:
    model = {
        "architecture": "llama",
        "hidden_size": 32,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "intermediate_size": 64,
    }
    settings = {
        "model": {**model, "max_position_embeddings": 64},
        "tokenizer": {"kind": "bpe", "vocab_size": 400},
        "mixture": {"addition": 9.0, "subtraction": 1.0},
        "corpus_problems": 400,
        "steps": 12,
        "learning_rate": 5e-3,
    }
    return WarmstartConfig.model_validate({**settings, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, warm_start(config(steps=150), TASK, 1, folder)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        torch.manual_seed(hash(name) % 1000)
        warm_start(config(), TASK, 3, tmp_path / name)
    warm_start(config(), TASK, 4, tmp_path / "other")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert digests(tmp_path / "one") != digests(tmp_path / "other")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(
        digests(tmp_path / "one")
    )


def test_it_learns_and_loads_as_any_agent(trained: tuple[Path, dict[str, float]]) -> None:
    folder, metrics = trained
    agent = load_agent(folder)
    assert metrics["loss"] < 1.0
    assert metrics["steps"] == 150
    assert agent.model.num_parameters() == metrics["parameters"]
    assert agent.stop_token_ids == (agent.tokenizer.eos_token_id,)
    assert agent.pad_token_id == agent.tokenizer.pad_token_id != agent.tokenizer.eos_token_id
    assert agent.context_length == 64
    assert agent.tokenizer.chat_template


def test_training_texts_are_what_the_pipeline_renders(trained: tuple[Path, dict[str, float]]) -> None:
    tokenizer = load_agent(trained[0]).tokenizer
    problems = [training_problem(0, index, ArithmeticConfig()) for index in range(20)]
    examples = encode_examples(tokenizer, problems, 64)
    for row, problem in enumerate(problems):
        prompt = render_prompt(tokenizer, list(problem.messages))
        answer = encode_response(
            tokenizer, worked_answer(problem), finished=True, stop_token_id=tokenizer.eos_token_id, max_tokens=60
        )
        labels = examples.labels_BT[row]
        length = int(examples.lengths_B[row])
        assert examples.input_ids_BT[row, :length].tolist() == [*prompt, *answer.token_ids][:-1]
        assert labels[labels != IGNORED].tolist() == list(answer.token_ids)
        assert int((labels != IGNORED).nonzero()[0]) == len(prompt) - 1


def test_solved_share_is_the_greedy_accuracy(trained: tuple[Path, dict[str, float]]) -> None:
    agent = load_agent(trained[0])
    problems = [training_problem(9, index, TASK) for index in range(40)]
    solved = []
    for problem in problems:
        prompt = torch.tensor([render_prompt(agent.tokenizer, list(problem.messages))])
        written = agent.model.generate(
            prompt, do_sample=False, max_new_tokens=20, attention_mask=torch.ones_like(prompt)
        )
        text = agent.tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True)
        solved.append(text == worked_answer(problem))
    share = solved_share(agent.model, encode_examples(agent.tokenizer, problems, 64))
    assert 0 < sum(solved) < len(solved)
    assert share == pytest.approx(sum(solved) / len(solved))


def test_the_stop_rule_begins_the_cooldown(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    stop = {"kind": "addition", "accuracy": 0.01, "every": 5, "problems": 50}
    metrics = warm_start(
        config(steps=400, stop=stop, cooldown_steps=7), TASK, 1, tmp_path, lambda done, end, _: seen.append((done, end))
    )
    assert metrics["watched_accuracy"] >= 0.01
    assert metrics["steps"] < 400
    assert (metrics["steps"] - 7) % 5 == 0
    assert seen[0][1] == 400
    assert seen[-1] == (metrics["steps"], metrics["steps"])


def test_mistakes_in_the_config_are_named(tmp_path: Path) -> None:
    stop = {"kind": "story", "accuracy": 0.2}
    with pytest.raises(ValidationError, match=r"stop\.kind story"):
        config(stop=stop, cooldown_steps=3)
    with pytest.raises(ValidationError, match="cooldown_steps"):
        config(stop={"kind": "addition", "accuracy": 0.2})
    short = {**config().model.model_dump(), "max_position_embeddings": 10}
    with pytest.raises(ConfigError, match="max_position_embeddings is 10; raise it"):
        warm_start(config(model=short), TASK, 1, tmp_path)

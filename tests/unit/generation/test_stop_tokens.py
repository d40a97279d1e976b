"""An end token that is no special token of the tokenizer is no part of the text either."""

from collections.abc import Callable
from pathlib import Path

import torch

from hacrl_core.agents.agent import load_agent
from hacrl_core.generation.builtin import BuiltinEngine
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.stop_strings import StopStrings


def test_a_plain_stop_token_ends_the_text_and_stays_in_the_tokens(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    agent = load_agent(checkpoint("llama"))
    stop = int(agent.tokenizer.convert_tokens_to_ids("."))
    agent.model.generation_config.eos_token_id = [stop, 1]
    with torch.no_grad():
        agent.model.lm_head.weight[stop] *= 3.0  # let it end now and then
    agent.model.save_pretrained(tmp_path)
    agent.tokenizer.save_pretrained(tmp_path)
    requests = [GenerationRequest(str(i), (3, 4, 5), i) for i in range(32)]
    made = BuiltinEngine().generate(tmp_path, "d", requests, SamplingParams(max_tokens=24))
    ended = [g for g in made if g.token_ids[-1] == stop]
    assert ended
    for generation in ended:
        assert generation.finish_reason == "stop"
        assert "." not in generation.text
        assert generation.text == agent.tokenizer.decode(generation.token_ids[:-1], skip_special_tokens=True)


def test_only_the_last_token_is_taken_for_the_end(checkpoint: Callable[[str], Path]) -> None:
    tokenizer = load_agent(checkpoint("llama")).tokenizer
    ids = tokenizer.convert_tokens_to_ids(["1", ".", "2"])
    dot = tokenizer.convert_tokens_to_ids(".")
    assert StopStrings(tokenizer, (), (dot,)).text(ids) == "1.2"
    assert StopStrings(tokenizer, (), (dot,)).text(ids[:2]) == "1"
    assert StopStrings(tokenizer, ()).text(ids[:2]) == "1."
    assert StopStrings(tokenizer, (), (dot,)).text([]) == ""

"""What makes the built-in engine fast, by counting: prompts read once, rows taken over while others go on, progress on
the way.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.generation.builtin import BuiltinEngine, scheduler
from hacrl_core.generation.builtin.decoder import Prefill
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from stages.partial import generate_resumable
from stages.spec import Context

Checkpoint = Callable[[str], Path]
BATCH = 8


class Counting:
    """The engine's own decoder, with a record of what is asked of it."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self.joinable = decoder, decoder.joinable
        self.live, self.steps = 0, 0
        self.read: list[list[tuple[int, ...]]] = []
        self.live_at_admission: list[int] = []
        self.most = 0

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefill:
        self.read.append(list(prompts))
        return self._decoder.prefill(prompts)

    def admit(self, prefill: Prefill, rows: Sequence[int]) -> None:
        self.live_at_admission.append(self.live)
        self.live += len(rows)
        self.most = max(self.most, self.live)
        self._decoder.admit(prefill, rows)

    def keep(self, rows: Sequence[int]) -> None:
        self.live = len(rows)
        self._decoder.keep(rows)

    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        assert len(tokens_B) == self.live
        self.steps += 1
        return self._decoder.step(tokens_B)

    def reset(self) -> None:
        self._decoder.reset()


def counting(monkeypatch: pytest.MonkeyPatch, engine: BuiltinEngine) -> list[Counting]:
    made: list[Counting] = []
    build = engine._decoder

    def counted(agent: Any, storage: torch.Tensor | None) -> Counting:
        made.append(Counting(build(agent, storage)))
        return made[-1]

    monkeypatch.setattr(engine, "_decoder", counted)
    return made


def groups(prompts: int, samples: int) -> list[GenerationRequest]:
    """Sample by sample, so that a prompt's requests do not come together."""
    rng = np.random.default_rng(5)
    texts = [tuple(rng.integers(2, 30, size=6).tolist()) for _ in range(prompts)]
    return [GenerationRequest(f"{p}/{g}", text, 100 * p + g) for g in range(samples) for p, text in enumerate(texts)]


@pytest.mark.parametrize("at_once", [4096, 12])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prompt_is_read_once_for_its_group(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, kind: str, at_once: int
) -> None:
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", at_once)
    engine = BuiltinEngine(batch_size=BATCH + 4)  # groups of 8 do not fill it evenly: some are admitted in two parts
    made, requests = counting(monkeypatch, engine), groups(7, 8)
    got = engine.generate(checkpoint(kind), "d", requests, SamplingParams(max_tokens=6))
    (decoder,) = made
    read = [prompt for chunk in decoder.read for prompt in chunk]
    assert len(got) == 56
    assert sorted(read) == sorted({r.prompt_token_ids for r in requests})
    assert [len(chunk) for chunk in decoder.read] == ([7] if at_once == 4096 else [2, 2, 2, 1])


def test_waiting_requests_take_the_rows_of_finished_ones(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BuiltinEngine(batch_size=BATCH)
    made, requests = counting(monkeypatch, engine), sorted(groups(12, 8), key=lambda r: int(r.request_id.split("/")[0]))
    got = engine.generate(checkpoint("llama"), "d", requests, SamplingParams(max_tokens=60))
    (decoder,) = made
    lengths = [len(g.token_ids) for g in got]
    assert np.std(lengths) > 10  # otherwise there is nothing to gain
    static = sum(max(lengths[start : start + BATCH]) for start in range(0, len(lengths), BATCH))
    least = sum(lengths) / BATCH
    assert least * 0.9 <= decoder.steps <= least * 1.15 + 60  # full rows, but for the end, where nobody waits
    assert decoder.steps < 0.75 * static
    assert decoder.most == BATCH
    assert sum(live > 0 for live in decoder.live_at_admission) > len(requests) / BATCH
    assert decoder.live == 0


def test_progress_comes_on_the_way_with_tokens_per_second(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PROGRESS_SECONDS", 0.0)
    seen: list[tuple[int, int, str]] = []
    config = GenerateConfig(max_tokens=12, batch_size=4)
    agent = ArtifactRef("warmstart", "k", "d", checkpoint("llama"))
    context = Context(progress=lambda *now: seen.append(now))
    requests = groups(3, 4)
    generate_resumable(BuiltinEngine(batch_size=4), agent, requests, config, context)
    done = [now[0] for now in seen]
    assert done == sorted(done)
    assert done[-1] == len(requests)
    assert len(set(done)) > 3
    assert {total for _, total, _ in seen} == {len(requests)}
    speeds = [float(note.split(", ", 1)[1].removesuffix(" tokens/s").replace(",", "")) for _, _, note in seen]
    written = [int(note.split()[0]) for _, _, note in seen]
    # Each shard counts from zero.
    assert min(written) > 0
    assert all(note.endswith(" tokens/s") for _, _, note in seen)
    assert min(speeds) > 0

"""Work finer than a stage: an interrupted stage does the rest, gives the same result, and believes no shard that was
tampered with.
"""

import itertools
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.generation import GenerateConfig
from hacrl_core.config.verification import VerifyConfig
from hacrl_core.generation.protocols import Generation, GenerationRequest
from hacrl_core.verification import VerdictKind, close_pool
from stages import partial as shards
from stages.partial import generate_resumable
from stages.spec import Context

VERIFIER = """
def check(response, gold):
    with open({log!r}, "a") as log:
        log.write(response + "\\n")
    if response == "broken":
        raise RuntimeError("no")
    return float(response.endswith(gold))
"""


class Interrupted(Exception):
    """Stands for the end of the process: nothing after it runs, and the disk stays as it is."""


# -- verification ------------------------------------------------------------------------------------------------


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """Verifies in a worker process with a function of the user's, and tells which responses it was asked about."""
    log = tmp_path / "asked.txt"
    (tmp_path / "counting_verifier.py").write_text(VERIFIER.format(log=str(log)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(shards, "WORTH_SECONDS", 0.0)
    config = VerifyConfig(verifier="counting_verifier:check", workers=1, sandbox="off")  # it writes its log outside

    def run(responses, *, stop_after=None, partial=tmp_path / "partial"):
        log.write_text("")

        def progress(done, total, note):
            if stop_after is not None and done > stop_after:
                raise Interrupted

        context, verdicts = Context(progress=progress, partial=partial), None
        with suppress(Interrupted):
            verdicts = shards.verify_resumable(responses, ["7"] * len(responses), config, context)
        return verdicts, log.read_text().split()

    yield run
    close_pool()


def rewards(verdicts):
    return [(v.reward, v.verdict, v.extracted_answer, v.verifier) for v in verdicts]


RESPONSES = [str(number) for number in range(100, 160)]


def test_an_interrupted_verification_checks_only_the_rest(verify, tmp_path):
    whole, asked = verify(RESPONSES, partial=tmp_path / "other")
    assert sorted(asked) == RESPONSES
    nothing, first = verify(RESPONSES, stop_after=shards.FIRST_SHARD)
    assert nothing is None
    assert len(first) >= shards.FIRST_SHARD
    verdicts, second = verify(RESPONSES)
    assert sorted(second) == RESPONSES[shards.FIRST_SHARD :]
    assert rewards(verdicts) == rewards(whole)
    assert sum(v.reward for v in verdicts) == 6


def flip(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"reward": 0.0', b'"reward": 1.0'))


def tear(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])


@pytest.mark.parametrize("damage", [flip, tear, lambda path: path.write_bytes(b"")])
def test_a_damaged_shard_is_checked_again(verify, tmp_path, damage):
    whole, _ = verify(RESPONSES, partial=tmp_path / "other")
    verify(RESPONSES, stop_after=shards.FIRST_SHARD)
    (shard,) = (tmp_path / "partial").glob("*.json")
    damage(shard)
    verdicts, asked = verify(RESPONSES)
    assert sorted(asked) == RESPONSES
    assert rewards(verdicts) == rewards(whole)


def test_verdicts_on_other_responses_and_failures_of_the_verifier_are_not_reused(verify):
    before = [*RESPONSES[:10], "broken", *RESPONSES[11:]]
    verify(before, stop_after=shards.FIRST_SHARD)
    now = ["7", *before[1:]]
    verdicts, asked = verify(now)
    assert sorted(asked) == sorted(["7", "broken", *now[shards.FIRST_SHARD :]])
    assert verdicts[0].reward == 1.0
    assert verdicts[10].verdict is VerdictKind.ERROR


# -- generation --------------------------------------------------------------------------------------------------


class Engine:
    """Answers as a function of the seed; remembers what it was asked."""

    def __init__(self, dies_at=None):
        self.asked, self._dies_at = [], dies_at

    def generate(self, checkpoint, digest, requests, params, on_progress=None):
        if self._dies_at is not None and len(self.asked) + len(requests) > self._dies_at:
            raise Interrupted
        self.asked += [request.request_id for request in requests]
        return [
            Generation(r.request_id, (r.seed, 1), f"text {r.seed}", (-1 / (3 + r.seed), -0.1), (-0.3, -1e-9), "stop")
            for r in requests
        ]


def ask(engine, partial, *, offset=0, keep_all=False, **callbacks):
    requests = [GenerationRequest(f"r{i}", (1, 2), i + offset) for i in range(10)]
    agent, config = ArtifactRef("warmstart", "k", "d", Path()), GenerateConfig(max_tokens=4, batch_size=2)
    return generate_resumable(engine, agent, requests, config, Context(partial=partial, **callbacks), keep_all=keep_all)


def test_an_interrupted_generation_samples_only_the_rest(tmp_path):
    whole = ask(Engine(), None)
    with pytest.raises(Interrupted):
        ask(Engine(dies_at=9), tmp_path)
    again = Engine()
    assert ask(again, tmp_path) == whole
    assert again.asked == ["r8", "r9"]


def test_the_bar_shows_responses_and_tokens_per_second(monkeypatch):
    class Reporting(Engine):
        def generate(self, checkpoint, digest, requests, params, on_progress=None):
            on_progress(1, 3000)
            on_progress(len(requests), 5000)
            return super().generate(checkpoint, digest, requests, params)

    clock = itertools.count(step=2.0)  # a shard's start, then every report two seconds later
    monkeypatch.setattr("stages.partial.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seen = []
    ask(Reporting(), None, progress=lambda *now: seen.append(now))
    assert [done for done, _, _ in seen] == [1, 4, 5, 8, 9, 10]
    assert {total for _, total, _ in seen} == {10}
    assert [note for _, _, note in seen] == [
        f"{written} of at most {most} tokens, {speed} tokens/s"
        for most in (16, 16, 8)
        for written, speed in (("3,000", "1,500"), ("5,000", "1,250"))
    ]


def test_damaged_shards_and_other_requests_are_sampled_again(tmp_path):
    whole = ask(Engine(), tmp_path)
    first = min(tmp_path.glob("responses-*.json"))
    first.write_bytes(first.read_bytes().replace(b"-0.1", b"-0.2", 1))
    again = Engine()
    assert ask(again, tmp_path) == whole
    assert again.asked == ["r0", "r1", "r2", "r3"]
    other = Engine()
    assert ask(other, tmp_path, offset=1) != whole
    assert len(other.asked) == 10

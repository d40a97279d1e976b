"""hacrl doctor --smoke: healthy here, and a planted fault in each part is found."""

import json
import multiprocessing
import os
import signal
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from flows.cli import app
from flows.doctor import smoke, smoke_parts
from flows.doctor.smoke_parts import Skipped, Wrong
from hacrl_core.errors import EngineError
from tests.patience import patience

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def reported(name: str, folder, monkeypatch) -> dict:
    """What the file says of one part, and that the command fails with it."""
    monkeypatch.setattr(smoke, "PARTS", {name: smoke.PARTS[name]})
    failed = smoke.run_smoke(Console(quiet=True), folder / "smoke.json", "cpu")
    found = json.loads((folder / "smoke.json").read_text())
    assert found["state"] == ("failed" if failed else "ok")
    return found["parts"][name]


def test_the_file_has_every_part_and_says_why_one_was_skipped(tmp_path, monkeypatch):
    def missing(configured):
        raise EngineError("not built")

    monkeypatch.setattr("hacrl_core.generation.vllm.process.find_python", missing)
    monkeypatch.setitem(smoke.PARTS, "ranks against one process", lambda device, folder: {"ranks": 2})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "smoke.json"
    done = CliRunner().invoke(app, ["doctor", "--smoke", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["state"] == "ok"
    assert set(found["parts"]) == set(smoke.PARTS)
    states = {name: part["state"] for name, part in found["parts"].items()}
    assert states["kernel against reference"] == states["score and update agree"] == "ok"
    assert "make vllm" in found["parts"]["vLLM swap"]["why"]
    assert "make bench-memory" in found["parts"]["memory against estimate"]["why"]
    assert found["machine"]["packages"]["torch"] == torch.__version__
    assert found["parts"]["kernel against reference"]["found"]["gradient_off"] < 1e-6
    agreed = found["parts"]["score and update agree"]["found"]
    assert max(agreed["score_off_none"], agreed["own_ratio_off_none"], agreed["own_ratio_off_bf16"]) < 1e-5
    # A person sees each part when it is done, short numbers, and no progress bars.
    assert "ok      kernel against reference (" in done.output
    assert "Loading weights" not in done.output + done.stderr
    assert max(map(len, done.output.splitlines())) <= 100


def test_a_wrong_kernel_is_found(tmp_path, monkeypatch):
    right = smoke_parts.negative_gradient_

    def wrong(logits_RV, targets_R, **options):
        found = right(logits_RV, targets_R, **options)
        logits_RV[3, 5] += 1e-3
        return found

    monkeypatch.setattr(smoke_parts, "negative_gradient_", wrong)
    found = reported("kernel against reference", tmp_path, monkeypatch)
    assert (found["state"], found["why"][:28]) == ("failed", "the kernel is off by 0.001, ")
    assert found["found"]["gradient_off"] == pytest.approx(1e-3, rel=1e-3)


def test_a_score_of_another_policy_is_found(tmp_path, monkeypatch):
    right = smoke_parts.score_sequences
    monkeypatch.setattr(
        smoke_parts, "score_sequences", lambda *a, **options: right(*a, **options, temperature=1.01)
    )  # fmt: skip
    found = reported("score and update agree", tmp_path, monkeypatch)
    assert found["state"] == "failed"
    assert "score and update differ" in found["why"]


def test_an_update_that_does_not_agree_with_itself_is_found(tmp_path, monkeypatch):
    """A window of 3e-4 around an own ratio of 1: what opens the ratio must be what the step computes."""
    right = smoke_parts.Trainer.logprobs
    monkeypatch.setattr(smoke_parts.Trainer, "logprobs", lambda self, rows: [v + 2e-4 for v in right(self, rows)])
    found = reported("score and update agree", tmp_path, monkeypatch)
    assert found["state"] == "failed"
    assert found["why"].startswith("an update's own passes differ by 0.0002 per response")


def test_a_part_that_breaks_leaves_the_others_and_exit_code_1(tmp_path, monkeypatch):
    def breaks(device, folder):
        raise RuntimeError("CUDA error: no kernel image\nmore lines")

    def skips(device, folder):
        raise Skipped("not here")

    monkeypatch.setattr(smoke, "PARTS", {"one": breaks, "two": lambda device, folder: {"x": 1}, "three": skips})
    assert smoke.run_smoke(Console(quiet=True), tmp_path / "out.json", "cpu") == 1
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert parts["one"]["why"] == "RuntimeError: CUDA error: no kernel image"
    assert [part["state"] for part in parts.values()] == ["failed", "ok", "skipped"]


def never_ends(device, folder):
    time.sleep(600)


def crashes(device, folder):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("part", "code", "why"),
    [(never_ends, 1, "took more than 1 s and was ended"), (crashes, -9, "the process ended in this part")],
)
def test_a_part_that_hangs_or_takes_the_process_with_it_is_named_in_the_file(part, code, why, tmp_path, monkeypatch):
    monkeypatch.setattr(smoke, "LIMIT_SECONDS", 1)
    monkeypatch.setattr(smoke, "PARTS", {"fine": lambda device, folder: {"x": 1}, "bad": part})
    out = tmp_path / "out.json"
    run = multiprocessing.get_context("fork").Process(
        target=smoke.run_smoke, args=(Console(quiet=True), out, "cpu"), daemon=True
    )
    run.start()
    run.join(patience(60))
    assert run.exitcode == code
    found = json.loads(out.read_text())
    assert found["state"] == "failed"
    assert {name: part["state"] for name, part in found["parts"].items()} == {"fine": "ok", "bad": "failed"}
    assert found["parts"]["bad"]["why"] == why


@pytest.mark.slow
def test_two_gloo_ranks_agree_with_one_process_and_a_wrong_one_is_found(tmp_path, monkeypatch):
    found = smoke_parts.ranks(CPU, tmp_path)
    assert found["ranks"] == 2
    assert found["loss_off"] < 1e-6 < found["loss_off_bf16"] < smoke_parts.HALF_OFF
    # One process that learns from one sequence less: the ranks no longer agree with it.
    right = smoke_parts.Trainer.step
    monkeypatch.setattr(smoke_parts.Trainer, "step", lambda self, rows, objective: right(self, rows[:-1], objective))
    with pytest.raises(Wrong, match="2 ranks are off"):
        smoke_parts.ranks(CPU, tmp_path)

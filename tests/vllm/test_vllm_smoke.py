"""Real vLLM: hacrl doctor --smoke is content with it, and reports a swap that brings other weights."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flows.doctor import smoke
from hacrl_core.generation.vllm.backend import WorkerBackend
from hacrl_core.generation.vllm.process import Launcher


@pytest.mark.parametrize("fault", ["none", "other weights", "no sleep"])
def test_the_smoke_test_of_a_swap(
    launcher: Launcher, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    swap = WorkerBackend.swap

    def stays(self: WorkerBackend, folder: Path, digest: str) -> None:
        swap(self, folder.with_name("agent"), digest)

    def fails(self: WorkerBackend) -> None:
        from hacrl_core.generation.vllm.process import WorkerFailed

        raise WorkerFailed("no sleep mode")

    if fault == "other weights":
        monkeypatch.setattr(WorkerBackend, "swap", stays)
    if fault == "no sleep":
        monkeypatch.setattr(WorkerBackend, "sleep", fails)
    name = "vLLM swap"
    monkeypatch.setattr(smoke, "PARTS", {name: smoke.PARTS[name]})
    failed = smoke.run_smoke(Console(quiet=True), tmp_path / "smoke.json", "cpu")
    found = json.loads((tmp_path / "smoke.json").read_text())["parts"][name]
    if fault == "none":
        assert (failed, found["state"]) == (0, "ok"), found
        assert found["found"]["logprob_off"] < 1e-4 < found["found"]["logprob_off_of_the_other_version"]
        return
    assert (failed, found["state"]) == (1, "failed")
    assert {"other weights": "weight swap refused", "no sleep": "did not go to sleep"}[fault] in found["why"]

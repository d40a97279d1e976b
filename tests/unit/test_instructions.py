"""A CPU that announces AMX and does not have it: bfloat16 runs without it, and the user reads one line."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.run.events import Listener
from flows.run.executors import ProcessExecutor
from hacrl_core import instructions
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config

# The permission is not asked for, so the instructions run on any CPU; on one without AMX they really trap.
UNASKED = instructions._PROGRAM.replace("ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0", "True")
DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
HAS_AMX = instructions._announces_amx()
traps_here = pytest.mark.skipif(HAS_AMX, reason="this CPU announces AMX: its instructions need not trap")


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = os.environ.pop(instructions.VARIABLE, None)
    yield
    os.environ.pop(instructions.VARIABLE, None)
    if before is not None:
        os.environ[instructions.VARIABLE] = before


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that announces AMX and whose instructions trap."""
    announced = tmp_path / "cpuinfo"
    announced.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n")
    monkeypatch.setattr(instructions, "_CPUINFO", announced)
    found = instructions._trouble(UNASKED)
    monkeypatch.setattr(instructions, "_trouble", lambda: found)


@traps_here
def test_instructions_that_trap_end_only_the_child(lying: None) -> None:
    line = instructions.settle_instructions()
    assert "ended by signal 4" in line
    assert os.environ[instructions.VARIABLE] == "AVX512_CORE_BF16"
    assert "\n" not in line
    assert instructions.settle_instructions() == ""  # said once


@traps_here
def test_what_the_user_set_stays(lying: None) -> None:
    os.environ[instructions.VARIABLE] = "AVX2"
    assert instructions.settle_instructions() == ""
    assert os.environ[instructions.VARIABLE] == "AVX2"


def test_a_cpu_that_does_not_announce_it_starts_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "cpuinfo"
    plain.write_text("flags\t\t: fpu avx512_bf16\n")
    monkeypatch.setattr(instructions, "_CPUINFO", plain)
    monkeypatch.setattr(instructions, "_trouble", lambda: pytest.fail("a child was started"))
    assert instructions.settle_instructions() == ""
    assert instructions.VARIABLE not in os.environ


def test_a_kernel_that_refuses_the_tiles_is_no_trouble() -> None:
    refused = instructions._PROGRAM.replace("== 0", "== 12345")
    assert instructions._trouble(refused) is None


class Heard(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, message: str) -> None:
        self.lines.append(message)


@traps_here
@pytest.mark.parametrize(("autocast", "lines"), [("bf16", 1), ("none", 0)])
def test_a_campaign_in_bfloat16_on_the_cpu_says_it_before_its_workers_start(
    lying: None, autocast: str, lines: int, tmp_path: Path
) -> None:
    config = load_config(DEMO, CampaignConfig, [f"update.autocast={autocast}", f"score.autocast={autocast}"])
    heard = Heard()
    for _ in range(2):
        ProcessExecutor(config, Store(tmp_path), heard).close(now=True)
    assert len(heard.lines) == lines
    assert (os.environ.get(instructions.VARIABLE) == "AVX512_CORE_BF16") == bool(lines)


@traps_here
def test_a_worker_settles_it_before_torch_computes(lying: None) -> None:
    from flows.run.placement import Placement
    from flows.run.worker import prepare_torch

    prepare_torch(Placement(device="cpu"))
    assert os.environ[instructions.VARIABLE] == "AVX512_CORE_BF16"

"""Native kernels: built once and safely, absent without harm, and right against torch's own operations."""

import ctypes
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl_core import native
from hacrl_core.native import find_compiler, kernels

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler on this machine")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no library remembered from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(native.SWITCH, raising=False)
    kernels.cache_clear()
    yield tmp_path / "hacrl" / "native"
    kernels.cache_clear()


def decode() -> ctypes.CDLL:
    found = kernels("decode")
    assert found is not None
    return found


@needs_compiler
def test_a_library_is_built_once_and_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels("decode") is not None
    (library,) = cache.iterdir()  # nothing half-made is left beside it
    made = library.stat().st_mtime_ns
    kernels.cache_clear()
    calls = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: calls.append(command) or run(command, **options))
    assert kernels("decode") is not None
    assert library.stat().st_mtime_ns == made
    assert [command[-1] for command in calls] == ["--version"]


@needs_compiler
def test_another_source_compiler_or_cpu_gets_a_library_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels("decode") is not None
    monkeypatch.setattr(native, "_cpu", lambda: "another CPU")
    kernels.cache_clear()
    assert kernels("decode") is not None
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_the_switch_a_missing_compiler_and_a_failing_one_leave_torch_to_do_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert kernels("decode") is None
    monkeypatch.delenv(native.SWITCH)
    kernels.cache_clear()
    failing = tmp_path / "failing-cc"
    failing.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho "no space" >&2\nexit 1\n')
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    assert kernels("decode") is None
    assert list(cache.iterdir()) == []
    monkeypatch.delenv("CC")
    kernels.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_compiler() is None
    assert kernels("decode") is None


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_others_may_write_into_is_not_run_from(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(cache.stat().st_mode | stat.S_IWOTH)
    assert kernels("decode") is None


@needs_compiler
def test_processes_that_build_at_once_all_get_a_whole_library(cache: Path) -> None:
    code = "from hacrl_core.native import kernels; assert kernels('decode').norm_rows"
    started = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ}) for _ in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9), width=st.integers(1, 130), size=st.sampled_from([1e-6, 1.0, 60.0, 1e4]), seed=st.integers(0)
)
def test_norm_and_gate_are_those_of_torch(rows: int, width: int, size: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(0, size, (rows, 2 * width)).astype(np.float32))
    library, out = decode(), torch.empty(rows, width)
    library.gate_rows(_at(x), _at(out), ctypes.c_int64(rows), ctypes.c_int64(width))
    wanted = F.silu(x[:, :width].double()) * x[:, width:].double()
    torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=1e-6 * size * size)
    normed = torch.empty_like(x)
    library.norm_rows(_at(x), _at(normed), ctypes.c_int64(rows), ctypes.c_int64(2 * width), ctypes.c_float(1e-6))
    torch.testing.assert_close(normed.double(), F.rms_norm(x.double(), (2 * width,), None, 1e-6), rtol=4e-6, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_not_hidden(poison: float) -> None:
    x, out = torch.ones(2, 32), torch.empty(2, 16)
    x[1, 3] = poison
    decode().gate_rows(_at(x), _at(out), ctypes.c_int64(2), ctypes.c_int64(16))
    assert not math.isfinite(out[1, 3])
    assert torch.isfinite(out).sum() == 31
    normed = torch.empty_like(x)
    decode().norm_rows(_at(x), _at(normed), ctypes.c_int64(2), ctypes.c_int64(32), ctypes.c_float(1e-6))
    assert torch.isfinite(normed[0]).all()
    assert normed[1].isnan().any()


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())

"""Native kernels: built once and safely, absent without harm, and right against torch's own operations.

What is true of every library is shown with the one that is compiled fastest.
"""

import ctypes
import fcntl
import math
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl_core import native
from hacrl_core.native import find_compiler, kernels
from hacrl_core.native.paths import body_library

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
    assert kernels("products") is not None
    (library,) = cache.iterdir()  # nothing half-made is left beside it
    made = library.stat().st_mtime_ns
    kernels.cache_clear()
    calls = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: calls.append(command) or run(command, **options))
    assert kernels("products") is not None
    assert library.stat().st_mtime_ns == made
    assert [command[-1] for command in calls] == ["--version"]


@needs_compiler
def test_another_source_compiler_or_cpu_gets_a_library_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels("products") is not None
    monkeypatch.setattr(native, "_cpu", lambda: "another CPU")
    kernels.cache_clear()
    assert kernels("products") is not None
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_the_switch_a_missing_compiler_and_a_failing_one_leave_torch_to_do_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert kernels("products") is None
    monkeypatch.delenv(native.SWITCH)
    kernels.cache_clear()
    failing = tmp_path / "failing-cc"
    failing.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho "no space" >&2\nexit 1\n')
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    assert kernels("products") is None
    assert list(cache.iterdir()) == []
    monkeypatch.delenv("CC")
    kernels.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_compiler() is None
    assert kernels("products") is None


@needs_compiler
def test_a_command_with_other_arguments_gets_a_library_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = " ".join(find_compiler() or ())
    assert kernels("products") is not None
    monkeypatch.setenv("CC", f"{compiler} -DANOTHER")
    kernels.cache_clear()
    assert kernels("products") is not None
    assert len(list(cache.iterdir())) == 2


@needs_compiler
@pytest.mark.parametrize("kept", [0, 100, 6000])
def test_a_library_of_which_a_part_is_missing_is_not_loaded_but_built_again(cache: Path, kept: int) -> None:
    """In a process of its own: most of a library, loaded, ends the process that does it."""
    code = "from hacrl_core.native import kernels; assert kernels('products').product"
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, cwd=ROOT, check=False).returncode == 0
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    library.write_bytes(whole[:kept])
    assert subprocess.run(run, cwd=ROOT, check=False).returncode == 0
    assert [path.read_bytes() for path in cache.iterdir()] == [whole]


@needs_compiler
def test_where_the_group_may_write_into_new_folders_it_may_not_into_this_one(cache: Path) -> None:
    before = os.umask(0o002)
    try:
        assert kernels("products") is not None
    finally:
        os.umask(before)


@needs_compiler
def test_a_cache_folder_that_is_not_absolute_is_none(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert kernels("products") is not None
    assert list(here.iterdir()) == []
    assert len(list((home / ".cache" / "hacrl" / "native").iterdir())) == 1


@needs_compiler
def test_without_a_home_folder_torch_does_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert kernels("products") is None


@needs_compiler
def test_a_compiler_that_prints_no_text_and_a_quote_that_nothing_closes(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binary = tmp_path / "binary-cc"
    binary.write_text('#!/bin/sh\nprintf "\\377\\376"\n[ "$1" = --version ] || { printf "\\377" >&2; exit 1; }\n')
    binary.chmod(0o755)
    monkeypatch.setenv("CC", str(binary))
    assert kernels("products") is None
    kernels.cache_clear()
    monkeypatch.setenv("CC", "'gcc")
    assert kernels("products") is not None


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_others_may_write_into_is_not_run_from(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(cache.stat().st_mode | stat.S_IWOTH)
    assert kernels("products") is None


@needs_compiler
def test_of_processes_that_build_at_once_one_compiles_and_all_get_the_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted, counting = tmp_path / "counted", tmp_path / "counting-cc"
    compiler = " ".join(find_compiler() or ())
    counting.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo compiled >>{counted}\nexec {compiler} "$@"\n')
    counting.chmod(0o755)
    monkeypatch.setenv("CC", str(counting))
    code = "from hacrl_core.native import kernels; assert kernels('products').product"
    started = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ}) for _ in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1
    assert counted.read_text() == "compiled\n"


@needs_compiler
def test_a_process_that_never_lets_go_of_the_folder_holds_nobody_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    monkeypatch.setattr(native, "_SECONDS_TO_WAIT", 0.2)
    holder = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert kernels("products") is not None
    finally:
        os.close(holder)


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
def test_the_exponential_is_exact_over_its_whole_range(cache: Path, tmp_path: Path) -> None:
    """Built with the flags of the kernels, which let the compiler reorder sums."""
    source = tmp_path / "exponential.c"
    source.write_text(
        f'#include "{Path(native.__file__).with_name("common.h")}"\n'
        "void run(const float *x, float *out, int64_t n) { for (int64_t i = 0; i < n; i++) out[i] = exp_fast(x[i]); }\n"
    )
    subprocess.run(
        [*(find_compiler() or ()), *native.FLAGS, str(source), "-o", str(tmp_path / "exponential.so"), "-lm"],
        check=True,
    )
    run = ctypes.CDLL(str(tmp_path / "exponential.so")).run
    x = torch.linspace(-87, 88, 1_000_001)
    out = torch.empty_like(x)
    run(_at(x), _at(out), ctypes.c_int64(len(x)))
    wanted = x.double().exp()
    assert float(((out - wanted) / wanted).abs().max()) < 2 * 2**-23
    x = torch.tensor([-math.inf, -1e38, -88.0, 89.0, 1e38, math.inf, math.nan])
    run(_at(x), _at(out), ctypes.c_int64(len(x)))
    assert out[:3].tolist() == [0.0, 0.0, 0.0]
    assert out[3:6].tolist() == pytest.approx([math.exp(88)] * 3, rel=1e-6)
    assert out[6].isnan()


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


@needs_compiler
def test_a_library_that_another_thread_is_still_describing_is_described(cache: Path) -> None:
    """Without its types an address is passed as 32 bits."""
    half = kernels("body")
    assert half is not None
    half.norm_forward.argtypes = (ctypes.c_void_p,) * 3
    found = body_library()
    assert found is half
    assert found.attend_forward.argtypes == (ctypes.c_void_p,) * 5


@needs_compiler
def test_folders_of_processes_that_were_killed_are_removed_and_those_at_work_stay(cache: Path) -> None:
    cache.mkdir(parents=True)
    for name, age in (("tmpold", 3600), ("tmpnew", 0)):
        (cache / name).mkdir()
        os.utime(cache / name, (time.time() - age,) * 2)
    assert kernels("products") is not None
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["tmpnew"]


@needs_compiler
def test_a_process_that_is_wanted_prepares_nothing_more(cache: Path) -> None:
    asked = iter([False, True, True])
    native.prepare_kernels(lambda: next(asked))
    assert [path.name.split("-")[0] for path in cache.iterdir()] == [native.NAMES[0]]

"""The Triton kernel without a GPU: every variant compiles for every GPU generation, and its order of loads is right."""

import re

import pytest
import torch
from fake_cuda import fake_cuda

from hacrl_core.learning.fused import rowwise

WHY = "triton is not installed: it comes with torch for CUDA, or with the extra hacrl[dev]"
triton = pytest.importorskip("triton", reason=WHY)

GENERATIONS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
POINTERS = ("logits_ptr", "targets_ptr", "logprobs_ptr", "entropies_ptr")
SIGNATURE = {
    **dict(zip(POINTERS, ("*fp32", "*i64", "*fp32", "*fp32"), strict=True)),
    "stride": "i32",
    "vocabulary": "i32",
    "amplitude": "fp32",
    **dict.fromkeys(("capped", "entropy", "block"), "constexpr"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels go where the test's other files go."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def compiled(generation: str, *, capped: bool, entropy: bool, aligned: bool) -> dict[str, str]:
    """Compile as a launch on such a GPU would; ``aligned``: pointers, stride and vocabulary are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hacrl_core.learning.fused.triton_rowwise import BLOCK, WARPS, _kernel

    multiples = ("stride", "vocabulary", *POINTERS) if aligned else POINTERS
    divisible = {(list(SIGNATURE).index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(
        fn=_kernel,
        signature=SIGNATURE,
        constexprs={"capped": capped, "entropy": entropy, "block": BLOCK},
        attrs=divisible,
    )
    done = triton.compile(source, target=GPUTarget("cuda", GENERATIONS[generation], 32), options={"num_warps": WARPS})
    return dict(done.asm)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_every_variant_compiles_and_reads_the_targets_logit_before_anybody_overwrites_it(
    generation: str, capped: bool, entropy: bool, aligned: bool
) -> None:
    code = compiled(generation, capped=capped, entropy=entropy, aligned=aligned)
    assert len(code["cubin"]) > 1000
    assert f".target {generation}" in code["ptx"]
    steps = order(code["ptx"])
    assert lacks_barrier(steps) is None, " ".join(steps)


def test_the_check_of_the_order_finds_a_load_behind_the_last_barrier() -> None:
    ptx = compiled("sm_80", capped=False, entropy=False, aligned=False)["ptx"]
    lines = ptx.splitlines()
    load = next(line for line in lines if TARGET.match(line))
    last = max(place for place, line in enumerate(lines) if "bar.sync" in line)
    moved = [*(line for line in lines[: last + 1] if line != load), load, *lines[last + 1 :]]
    assert lacks_barrier(order(ptx)) is None
    assert lacks_barrier(order("\n".join(moved))) == "no barrier between the target's logit and the overwriting sweep"


TARGET = re.compile(r"\s*ld\.global\.b32 ")  # the one load of a logit that no mask guards


def order(ptx: str) -> list[str]:
    """What the compiled kernel does to memory, step by step."""
    steps = []
    for line in ptx.splitlines():
        if TARGET.match(line):
            steps.append("target")
        elif "Loop Header" in line:
            steps.append("loop")
        elif match := re.search(r"(ld|st)\.global\.(?:v\d\.)?b32 .*\[ (%rd\d+) \+ 0 \]", line):
            steps.append(" ".join(match.groups()))
        elif "bar.sync" in line or "barrier.sync" in line:
            steps.append("barrier")
    return steps


def lacks_barrier(steps: list[str]) -> str | None:
    """Why another warp might overwrite a logit before it is read; None where it cannot."""
    first, second = [place for place, step in enumerate(steps) if step == "loop"]
    if steps.count("target") != 1:
        return "the target's logit is not read exactly once"
    if "barrier" not in steps[steps.index("target") : second]:
        return "no barrier between the target's logit and the overwriting sweep"
    if "barrier" not in steps[first:second]:
        return "no barrier between the two sweeps"
    sweep = [step.split() for step in steps[second + 1 :]]
    read = {address for kind, address in sweep if kind == "ld"}
    written = {address for kind, address in sweep if kind == "st"}
    return None if read == written else "a thread overwrites what another one reads"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stack of current devices, as CUDA keeps it; this machine has none."""
    stack = [0]

    def exchange(device: int) -> int:
        before = stack[-1]
        if device >= 0:
            stack.append(device)
        return before

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    return stack


def fake_logits(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(3, 64, device=device), torch.zeros(3, dtype=torch.int64, device=device)


def test_the_kernel_is_launched_on_the_device_of_its_tensors(
    devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hacrl_core.learning.fused import triton_rowwise

    launched: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> object:
            assert grid == (3,)
            return lambda *_, **__: launched.append(devices[-1])

    monkeypatch.setattr(triton_rowwise, "_kernel", Kernel())
    with fake_cuda():
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            triton_rowwise.negative_gradient_triton_(*fake_logits(device))
    assert launched == [1, 0, 1]
    assert devices[-1] == 0


def test_where_triton_fails_torch_takes_over_with_one_warning(
    devices: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A launch without a GPU fails as it does where Triton finds no driver or no C compiler."""
    monkeypatch.setattr(rowwise, "_refusal", None)
    with fake_cuda():
        logits, targets = fake_logits("cuda:0")
        assert rowwise.kernel_metrics("update", logits.device) == {"update/fused_triton": 1.0}
        for _ in range(3):
            logprobs, entropies = rowwise.negative_gradient_(logits, targets, entropy=True)
            assert logprobs.shape == (3,)
            assert entropies is not None
        assert rowwise.kernel_metrics("update", logits.device) == {"update/fused_triton": 0.0}
    assert len(caplog.records) == 1
    assert "without its Triton kernel" in caplog.text

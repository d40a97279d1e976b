"""Peak memory of a stage: in its provenance, never in its digest."""

import mmap
import time

from hacrl_core.artifacts import Store
from stages import memory as peak
from stages.runner import run_stage
from stages.sample import SampleSlice
from stages.spec import Context, StageCall
from tests.patience import patience

MB = 1 << 20


def resident(size: int) -> mmap.mmap:
    """Memory that is the system's again as soon as it is closed. What malloc frees may stay with the process."""
    memory = mmap.mmap(-1, size)
    memory.write(b"\1" * size)
    return memory


def test_a_peak_is_that_of_the_time_since_begin():
    peak.begin()
    before = peak.end().host_bytes
    high = resident(200 * MB)
    seen = peak.end().host_bytes
    assert seen - before > 180 * MB
    high.close()
    deadline = time.monotonic() + patience(5)  # the kernel's count of resident pages may lag behind
    while peak.end().host_bytes >= seen - 150 * MB and time.monotonic() < deadline:
        time.sleep(0.1)
        peak.begin()
    assert peak.end().host_bytes < seen - 150 * MB


def test_a_manifest_records_it_outside_its_digest(tmp_path):
    problems = {"kind": "arithmetic", "kinds": {"addition": 1.0}, "levels": {"easy": 1.0}}
    from hacrl_core.config.problems import ArithmeticProblems
    from hacrl_core.problems import load_problems

    digest = load_problems(ArithmeticProblems.model_validate(problems)).content_digest
    config = SampleSlice(problems=problems, content_digest=digest, iteration=0, prompts=2)
    call = StageCall("sample", config, {}, 1)
    one, two = (Store(tmp_path / name) for name in ("one", "two"))
    first = run_stage(one, call, Context())
    ballast = resident(400 * MB)
    second = run_stage(two, call, Context())
    peaks = [store.manifest("sample", first.ref.key).provenance.peak_memory_bytes for store in (one, two)]
    assert peaks[1] - peaks[0] > 0.9 * len(ballast)
    assert first.ref.digest == second.ref.digest

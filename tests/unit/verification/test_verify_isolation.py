r"""Workers: symbolic comparison, deadlines, memory, crashes, hostile text, and their end with their parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.errors import ConfigError
from hacrl_core.verification import close_pool, pool, verify_batch
from tests.patience import factor, patience

MODULE = """
import os, time
def good(response, gold): return response == gold
def half(response, gold): return 0.5, "found"
def none(response, gold): return None
def nan(response, gold): return float("nan")
def broken(response, gold): raise RuntimeError("mine")
def selective(response, gold):
    if response == "spin":
        while True: pass
    if response == "sleep": time.sleep(600)
    if response == "crash": os.kill(os.getpid(), 11)
    if response == "leave": raise SystemExit(0)
    if response == "memory": bytearray(1 << 40)
    return True
"""


@pytest.fixture(scope="module")
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "users_verifier.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield "users_verifier"
    sys.path.remove(str(folder))


def spawner_pid() -> int:
    """Return the process that forks the workers of a user's verifier."""
    assert pool._pool is not None
    process = pool._pool.spawners[""].process
    assert process is not None
    return process.pid


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_symbolic_answers() -> None:
    pairs = [
        (r"\boxed{x^2+2x+1}", "(x+1)^2", "correct"),
        (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}", "correct"),
        (r"\boxed{x^2+2x}", "(x+1)^2", "incorrect"),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", "correct"),
        (r"\boxed{(2, 1)}", "(1, 2)", "incorrect"),
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", "incorrect"),
        (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", "incorrect"),
        (r"\boxed{1+\frac{1}{\mathrm{e}}}", r"1-\frac{1}{\mathrm{e}}", "incorrect"),
        (r"\boxed{i(2-i)}", "1+2i", "correct"),
        (r"\boxed{\sqrt{x^2}}", "x", "incorrect"),
        (r"\boxed{1} and \boxed{-2}", "-2, 1", "correct"),
        (r"\boxed{f(x)}", "f(y)", "incorrect"),
    ]
    verdicts = verify_batch([p[0] for p in pairs], [p[1] for p in pairs])
    assert [v.verdict.value for v in verdicts] == [p[2] for p in pairs]


def test_a_bomb_costs_one_verdict_and_the_pool_goes_on() -> None:
    bombs = [r"\boxed{((28^{9999})^{999})^{93}}", r"\boxed{9^{9^{9^9}}}", r"\boxed{(9999!)^{9999}}"]
    started = time.monotonic()
    # The lenient verifier computes more; the second try of a timeout has twice the time.
    limits = VerifyConfig(verifier="math", timeout_seconds=1.0)
    verdicts = verify_batch([*bombs, r"\boxed{y+x}"], ["12", "12", "12", "x+y"], limits)
    assert [v.verdict.value for v in verdicts[1::2]] == ["unparseable", "correct"]
    assert {v.reward for v in verdicts[:3]} == {0.0}
    assert "timeout" in {v.verdict.value for v in verdicts[:3]}
    assert max(v.milliseconds for v in verdicts) <= 2050
    assert time.monotonic() - started < patience(60)


def test_hostile_text_is_never_executed(tmp_path: Path) -> None:
    flag = tmp_path / "executed"
    codes = [
        f"__import__('os').system('touch {flag}')",
        f"().__class__.__base__.__subclasses__(); open('{flag}','w')",
        f"eval(\"open('{flag}', 'w')\")",
        f"exec(open('{flag}','w'))",
        rf"\text{{__import__('os').system('touch {flag}')}}+1",
        f"1+open('{flag}','w').write('1')",
        rf"\mathrm{{open('{flag}','w')}}",
        f"lambda: open('{flag}','w')",
    ]
    responses = [f"\\boxed{{{code}}}" for code in codes] + [f"answer is ${code}$" for code in codes] + codes
    for gold in ("x+1", "12", r"\text{yes}"):
        verdicts = verify_batch(responses, [gold] * len(responses))
        assert not any(v.reward for v in verdicts)
    verify_batch([r"\boxed{x+1}"] * len(codes), codes)
    assert not flag.exists()


def test_python_text_is_refused_in_a_worker() -> None:
    code = (
        "from hacrl_core.verification import symbolic; symbolic.warm_up(); import sympy\n"
        "assert sympy.Number('12') == 12 and sympy.Number('-1.5') == -1.5\n"
        "for text in ('print(1)', '__import__(\"os\")', 'x+1'):\n"
        "    try: sympy.sympify(text)\n"
        "    except (ValueError, sympy.SympifyError): continue\n"
        "    raise SystemExit(text)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(120))


def test_user_functions(user_module: str) -> None:
    def run(name: str, responses: list[str]) -> list[tuple[str, float, str]]:
        out = verify_batch(responses, ["a"] * len(responses), VerifyConfig(verifier=f"{user_module}:{name}"))
        return [(v.verdict.value, v.reward, v.extracted_answer) for v in out]

    assert run("good", ["a", "b"]) == [("correct", 1.0, ""), ("incorrect", 0.0, "")]
    assert run("half", ["a"]) == [("incorrect", 0.5, "found")]
    assert run("none", ["a"]) == [("unparseable", 0.0, "")]
    assert run("nan", ["a"]) == [("error", 0.0, "")]
    assert run("broken", ["a"]) == [("error", 0.0, "")]


@pytest.mark.parametrize("entry", ["no_such_module:f", "users_verifier:no_such_function"])
def test_a_user_function_that_cannot_be_loaded_is_a_config_error(entry: str, user_module: str) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        verify_batch(["a"], ["a"], VerifyConfig(verifier=entry))
    assert verify_batch(["a"], ["a"], VerifyConfig(verifier=f"{user_module}:good"))[0].reward == 1


def test_hang_sleep_crash_exit_and_memory_cost_one_verdict_each(user_module: str) -> None:
    responses = ["one", "spin", "two", "crash", "three", "leave", "sleep", "memory", "four"]
    config = VerifyConfig(
        verifier=f"{user_module}:selective", timeout_seconds=0.5, wall_timeout_seconds=4 * factor(), workers=2
    )
    verdicts = verify_batch(responses, ["gold"] * len(responses), config)
    expected = ["correct", "timeout", "correct", "error", "correct", "error", "timeout", "error", "correct"]
    assert [v.verdict.value for v in verdicts] == expected


def test_the_deadline_is_cpu_time_not_wall_time(user_module: str, tmp_path: Path) -> None:
    (tmp_path / "naps.py").write_text("import time\ndef fn(response, gold):\n    time.sleep(1.2)\n    return True\n")
    sys.path.insert(0, str(tmp_path))
    try:
        verdict = verify_batch(
            ["a"], ["a"], VerifyConfig(verifier="naps:fn", timeout_seconds=0.5, wall_timeout_seconds=patience(60))
        )[0]
    finally:
        sys.path.remove(str(tmp_path))
    assert verdict.verdict == "correct"


def test_an_answer_that_is_there_counts_where_this_process_was_kept_waiting(
    user_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine, or one that was suspended: the limit is over when the process looks again, and so is the work."""
    config = VerifyConfig(verifier=f"{user_module}:good", timeout_seconds=0.2, wall_timeout_seconds=0.2, workers=1)
    assert verify_batch(["a"], ["a"], config)[0].verdict == "correct"  # the worker is there
    read = pool.Pool._wait
    kept = []

    def wait(self: pool.Pool, *args: object) -> None:
        if kept:
            read(self, *args)  # type: ignore[arg-type]
        else:
            time.sleep(patience(1))
            kept.append(True)

    monkeypatch.setattr(pool.Pool, "_wait", wait)
    assert [v.verdict.value for v in verify_batch(["b", "c"], ["b", "d"], config)] == ["correct", "incorrect"]
    assert kept


def test_from_threads(user_module: str) -> None:
    results: dict[int, list[float]] = {}

    def work(index: int) -> None:
        out = verify_batch([str(index), "x"], [str(index)] * 2, VerifyConfig(verifier=f"{user_module}:good"))
        results[index] = [v.reward for v in out]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert results == {index: [1.0, 0.0] for index in range(6)}


def test_workers_survive_the_thread_that_started_them_and_a_killed_spawner_is_replaced(user_module: str) -> None:
    config = VerifyConfig(verifier=f"{user_module}:good", workers=1)
    close_pool()
    thread = threading.Thread(target=lambda: verify_batch(["a"], ["a"], config))
    thread.start()
    thread.join(patience(60))
    assert pool._pool is not None
    first = spawner_pid()
    assert verify_batch(["b"], ["b"], config)[0].reward == 1
    assert spawner_pid() == first
    pids = [first, *(worker.pid for worker in pool._pool.workers)]
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + patience(20)
    while any(map(alive, pids)) and time.monotonic() < deadline:  # until then a worker may still answer
        time.sleep(0.01)
    assert verify_batch(["c"], ["c"], config)[0].reward == 1
    assert spawner_pid() != first


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_die_with_their_parent_even_while_busy(user_module: str) -> None:
    code = (
        "import sys, threading, time; from hacrl_core.config.verification import VerifyConfig\n"
        "from hacrl_core.verification import verify_batch, pool\n"
        f"sys.path.insert(0, {sys.path[0]!r})\n"
        "config = VerifyConfig(verifier='users_verifier:selective', timeout_seconds=100, workers=2)\n"
        "threading.Thread(target=verify_batch, args=(['spin', 'two'], ['a', 'b'], config), daemon=True).start()\n"
        "while not (pool._pool and len(pool._pool.workers) == 2): time.sleep(0.05)\n"
        "spawners = [spawner.process.pid for spawner in pool._pool.spawners.values()]\n"
        "print(*spawners, *(w.pid for w in pool._pool.workers), flush=True); time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        parent.kill()
    deadline = time.monotonic() + patience(20)
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_close_pool_ends_every_process(user_module: str) -> None:
    verify_batch(["a"], ["a"], VerifyConfig(verifier=f"{user_module}:good"))
    assert pool._pool is not None
    pids = [spawner_pid(), *(worker.pid for worker in pool._pool.workers)]
    close_pool()
    deadline = time.monotonic() + patience(10)
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))

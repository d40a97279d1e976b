"""What cannot work is one line and exit code 2, before anything starts: the home, the process's limits, the config."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from flows.doctor.campaign import check_campaign
from flows.doctor.faults import campaign_faults
from flows.home import Home
from flows.run import launch as launching
from hacrl_core.errors import ConfigError
from hacrl_core.verification import pool
from tests.flow.conftest import TINY, tiny
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
# Takes what memory there is for threads' stacks, and asks for more.
TOO_MANY_THREADS = """
import re, resource, threading
import typer
from flows.commands.common import one_line_errors

app = typer.Typer()

@app.command()
@one_line_errors
def run(home: str = ""):
    size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)
    end = threading.Event()
    try:
        for _ in range(1000):
            threading.Thread(target=end.wait).start()
    finally:
        end.set()

app()
"""


def command(words, environ=None):
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=patience(300),
    )


def one_line(done):
    """The error, which is one line, after which nothing happened."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "starting Prefect" not in done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


@pytest.mark.parametrize("where", ["file", "file/home", "/proc/home", "/sys/home"])
def test_a_home_that_cannot_be_is_one_line(where, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    home = tmp_path / where
    said = one_line(command(["-m", "flows.cli", "run", str(tmp_path / "tiny.yaml"), "--home", str(home)]))
    assert str(home) in said
    assert "--home or HACRL_HOME" in said


@pytest.mark.skipif(os.geteuid() == 0 and not os.access("/usr/bin/setpriv", os.X_OK), reason="root may write anywhere")
def test_a_store_that_may_not_be_written_is_one_line(tmp_path):
    """As root, the command runs without the right to ignore permissions."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (tmp_path / "home" / "store").mkdir(parents=True)
    (tmp_path / "home" / "store").chmod(0o555)
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"] if os.geteuid() == 0 else []
    words = [
        *drop,
        sys.executable,
        "-m",
        "flows.cli",
        "run",
        str(tmp_path / "tiny.yaml"),
        "--home",
        str(tmp_path / "home"),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=patience(300))
    said = one_line(done)
    assert f"home {tmp_path / 'home'}" in said
    assert "Permission denied" in said


def test_a_limit_of_threads_is_one_line():
    said = one_line(command(["-c", TOO_MANY_THREADS]))
    assert "can't start new thread" in said
    assert "ulimit" in said


def test_an_error_that_nobody_foresaw_keeps_its_traceback():
    code = TOO_MANY_THREADS.replace("    size =", "    raise RuntimeError('a defect')\n    size =")
    done = command(["-c", code])
    assert done.returncode == 1
    assert "a defect" in done.stderr


# -- checks ------------------------------------------------------------------------------------------------------------


def agents(**changes):
    return {**TINY["agents"], "ada": {**TINY["agents"]["ada"], **changes}}


def faulty(kind, place):
    """A campaign that cannot work, and the fault that says so."""
    if kind == "gpu":
        return {"agents": agents(gpus=[63])}, "agent ada: GPU 63 does not exist"
    if kind == "device":
        return {"agents": agents(device="cuda:63")}, "agent ada: device cuda:63 does not exist"
    if kind == "vllm":
        engine = {"kind": "vllm", "python": "nowhere/python"}
        return {"generate": {**TINY["generate"], "engine": engine}}, "no Python interpreter at nowhere/python"
    if kind == "attention":
        return {"agents": agents(attention="flash_attention_2")}, "flash-attn is not installed"
    if kind == "verifier":
        (place / "checks_of_mine.py").write_text("def check(response, gold): return True\n")
        return {"verify": {"verifier": "checks_of_mine:chekc"}}, "verifier 'checks_of_mine:chekc' cannot be loaded"
    problems = {"kind": "dataset", "path": str(place / "none.jsonl")}
    benchmark = {"name": "held_out", "problems": problems}
    return {"evaluate": {"benchmarks": [benchmark], "before": False}}, "benchmark held_out: "


@pytest.mark.parametrize("kind", ["gpu", "device", "vllm", "attention", "verifier", "benchmark"])
def test_a_campaign_that_cannot_work_is_refused_before_anything_starts_in_doctors_words(kind, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(launching, "prefect_api", lambda *_: pytest.fail("a server was about to start"))
    changes, fault = faulty(kind, tmp_path)
    config = tiny(**changes)
    with pytest.raises(ConfigError) as refused:
        launching.launch(config, Home(tmp_path / "home"), Console(file=io.StringIO()))
    assert fault in str(refused.value)
    screen = Console(file=io.StringIO(), width=1000)
    assert check_campaign(screen, config) == 2
    assert f"fault: {str(refused.value).partition(' (and ')[0]}" in screen.file.getvalue()


def test_too_few_problems_for_an_iteration_are_a_fault(tmp_path):
    rows = [{"problem": f"{n}+1=?", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = {"kind": "dataset", "path": str(tmp_path / "few.jsonl")}
    config = tiny(problems=problems, agents={"ada": {"checkpoint": {"path": str(tmp_path)}}})
    faults = campaign_faults(config)
    assert len(faults) == 1
    assert "problems: 6 per iteration are wanted, the set has 3" in faults[0]


def test_a_campaign_that_can_work_has_no_faults_and_leaves_no_verifier(tmp_path, monkeypatch):
    (tmp_path / "checks_of_mine_too.py").write_text("def check(response, gold): raise SystemExit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert campaign_faults(tiny(verify={"verifier": "checks_of_mine_too:check"})) == []
    assert pool._pool is None


def test_the_checks_need_neither_torch_nor_prefect(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    code = (
        "import sys; from pathlib import Path; from flows.doctor.faults import campaign_faults\n"
        "from hacrl_core.config.campaign import CampaignConfig; from hacrl_core.config.loading import load_config\n"
        f"assert campaign_faults(load_config(Path({str(tmp_path / 'tiny.yaml')!r}), CampaignConfig, ())) == []\n"
        "print([name for name in ('torch', 'prefect', 'mlflow', 'transformers') if name in sys.modules])"
    )
    done = command(["-c", code])
    assert done.stdout.strip() == "[]", done.stdout + done.stderr

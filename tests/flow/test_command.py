"""What a user does: run a campaign with the command, run it again, change a setting, look at it."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.chaos.commands import processes_of, wait_until_gone
from tests.chaos.zygote import Zygote
from tests.flow.conftest import TINY
from tests.patience import patience

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


class Hacrl:
    """The command in a home of its own.

    The first run is a process as a shell starts it. The others are forked from one that has everything imported (see
    ``tests/chaos/zygote.py``): the imports of a command take far longer than what is tested here.
    """

    def __init__(self, place: Path, prefect_url: str) -> None:
        self.place, self.home, self.prefect_url = place, place / "home", prefect_url
        self._forking: Zygote | None = None
        (place / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "tracking": {"enabled": True}}))

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "HACRL_HOME": str(self.home),
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.place),
            "PREFECT_API_URL": self.prefect_url,
            "PYTHONPATH": str(ROOT),
        }

    def first_run(self) -> str:
        command = [sys.executable, "-m", "flows.cli", "run", str(self.place / "tiny.yaml")]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment(), capture_output=True, text=True, timeout=patience(240)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def __call__(self, *words: str, code: int = 0) -> str:
        self._forking = self._forking or Zygote(self.place, self.prefect_url)
        output = self.place / "output"
        output.write_text("")
        pid = self._forking.start(list(words), self.environment(), output)
        ended = self._forking.wait(pid, patience(240))
        left = wait_until_gone(self.home, patience(10), pid)
        if left:
            os.killpg(pid, signal.SIGKILL)
        text = output.read_text()
        assert left == [], text
        assert ended == code, text
        assert "Traceback" not in text, text
        return text

    def close(self) -> None:
        if self._forking is not None:
            self._forking.close()

    def points(self) -> Counter:
        with sqlite3.connect(self.home / "mlflow.db") as database:
            return Counter(database.execute("select run_uuid, key, step from metrics").fetchall())

    def runs(self) -> list[tuple[str, str]]:
        with sqlite3.connect(self.home / "mlflow.db") as database:
            return database.execute("select name, status from runs order by name").fetchall()


@pytest.fixture(scope="module")
def hacrl(tmp_path_factory, prefect_url):
    command = Hacrl(tmp_path_factory.mktemp("user"), prefect_url)
    command.first = command.first_run()
    yield command
    command.close()


def config(hacrl):
    return str(hacrl.place / "tiny.yaml")


def test_first_run_ends_with_table_picture_and_the_way_to_mlflow(hacrl):
    assert "Held-out accuracy" in hacrl.first
    assert re.search(r"ada\s+held_out\s+[\d.]+%\s+[\d.]+%\s+[+-][\d.]+ points", hacrl.first)
    assert "iteration   2/2" in hacrl.first
    seconds = re.search(r"0 were in the cache\. (\d+) s", hacrl.first)
    logged = re.search(r"complete: .*, ([\d.]+) s$", (hacrl.home / "campaigns" / "tiny" / "log.txt").read_text(), re.M)
    assert abs(int(seconds[1]) - float(logged[1])) < 0.6, "the terminal and the log say the same"
    assert (hacrl.home / "campaigns" / "tiny" / "learning-curves.png").stat().st_size > 10_000
    assert "mlflow ui --backend-store-uri sqlite:///" in hacrl.first


def test_tracking_has_a_parent_and_a_child_per_agent_and_each_point_once(hacrl):
    assert hacrl.runs() == [("tiny", "FINISHED"), ("tiny/ada", "FINISHED"), ("tiny/ben", "FINISHED")]
    points = hacrl.points()
    assert set(points.values()) == {1}
    keys = {key for _, key, _ in points}
    assert {
        "reward",
        "accuracy/held_out",
        "verify/reward_mean",
        "update/foreign_ratio_mean",
        "credit/capability",
    } <= keys


def test_second_run_is_all_cache_and_replays_without_duplicates(hacrl):
    before, artifacts = hacrl.points(), sorted(p.name for p in (hacrl.home / "store" / "objects").glob("*/*"))
    text = hacrl("run", config(hacrl))
    assert re.search(r"All \d+ stages were in the cache; nothing had to run", text)
    assert hacrl.points() == before
    assert sorted(p.name for p in (hacrl.home / "store" / "objects").glob("*/*")) == artifacts
    assert len(hacrl.runs()) == 3


def test_a_wiped_mlflow_is_restored_from_the_manifests(hacrl):
    before = hacrl.points()
    for path in hacrl.home.glob("mlflow.db*"):
        path.unlink()
    hacrl("run", config(hacrl))
    assert sorted((key, step) for _, key, step in hacrl.points()) == sorted((key, step) for _, key, step in before)


def test_one_changed_setting_recomputes_what_depends_on_it_and_says_so(hacrl):
    text = hacrl("run", config(hacrl), "--set", "update.learning_rate=0.002", "--set", "iterations=1")
    assert "runs again: config.update.learning_rate: 0.001 → 0.002" in text
    ran = int(re.search(r"(\d+) stages ran", text)[1])
    assert ran == 4  # two updates and the evaluations of the two new versions


def test_prefect_has_progress_agents_a_summary_and_cached_stages(hacrl, prefect_place):
    """In the database of its server."""
    with sqlite3.connect(prefect_place / "prefect.db") as database:
        artifacts = dict(database.execute("select key, type from artifact").fetchall())
        tasks = dict(database.execute("select name, state_name from task_run").fetchall())
        flows = {name for (name,) in database.execute("select name from flow_run").fetchall()}
        spans = database.execute(
            "select count(*) from task_run t join flow_run f on f.id = t.flow_run_id "
            "where t.start_time >= f.start_time and t.end_time >= t.start_time"
        ).fetchone()
        lines = [text for (text,) in database.execute("select message from log where flow_run_id is not null")]
    assert artifacts == {
        "hacrl-tiny-progress": "progress",
        "hacrl-tiny-agents": "table",
        "hacrl-tiny-summary": "markdown",
    }
    assert "tiny to iteration 2" in flows
    # Short iterations share a bar, so its name depends on how fast the machine is.
    assert {"warmstart ada", "warmstart ben"} <= tasks.keys()
    assert any(name.startswith("ada iteration") for name in tasks)
    assert set(tasks.values()) == {"Completed", "Cached"}
    assert "Cached" in [state for name, state in tasks.items() if "stages from the store" in name]
    assert spans[0] >= len(tasks)
    assert any(re.match(r"ada iterations? 1.*: reward 0\.\d+, .*generate \d", line) for line in lines)
    assert any("runs again: config.update.learning_rate: 0.001 → 0.002" in line for line in lines)


def test_a_damaged_artifact_is_reported_and_recomputed_with_the_same_content(hacrl):
    path = next((hacrl.home / "store" / "objects" / "verify").glob("*/verdicts.parquet"))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    text = hacrl("run", config(hacrl))
    assert "damaged artifact set aside" in text
    assert "1 stages ran" in text
    assert path.read_bytes() == good


def test_status_and_rollouts_show_what_happened(hacrl):
    assert re.search(r"tiny\s+complete\s+2/2", hacrl("status"))
    text = hacrl("rollouts", "tiny", "--iteration", "1", "-n", "2")
    assert text.count("right answer:") == 2
    assert "advantage" in text
    assert "agent" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["run", "CONFIG", "--set", "iterations=-1"], "iterations: -1 is not allowed"),
        (["run", "CONFIG", "--set", "bogus=1"], "bogus: unknown key"),
        (["rollouts", "nobody"], "campaign nobody: not found"),
        (["rollouts", "tiny", "--iteration", "99"], "--iteration 99: campaign tiny has 1 to"),
        (["rollouts", "tiny", "--agent", "zoe"], "agent zoe: not in campaign tiny"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(hacrl, words, says):
    text = hacrl(*[config(hacrl) if word == "CONFIG" else word for word in words], code=2)
    assert says in text
    assert len(text.strip().splitlines()) == 1


def test_doctor_and_schema(hacrl):
    assert "Ready" in hacrl("doctor")
    schema = json.loads(hacrl("config", "schema"))
    assert {"name", "agents", "iterations", "update"} <= set(schema["properties"])
    assert yaml.safe_load(hacrl("config", "show", config(hacrl)))["name"] == "tiny"


def test_no_process_is_left_behind(hacrl):
    assert processes_of(hacrl.home) == []


def test_a_stage_that_fails_is_one_line_not_a_traceback(hacrl):
    agents = {"eve": {"checkpoint": {"path": str(hacrl.place / "no-such-model")}}}
    text = hacrl("run", config(hacrl), "--set", f"agents={json.dumps(agents)}", "--set", "name=broken", code=2)
    assert "error: checkpoint" in text
    assert "no-such-model" in text


def test_a_campaign_of_another_version_does_not_hide_the_others(hacrl):
    odd = hacrl.home / "campaigns" / "odd"
    odd.mkdir()
    (odd / "config.json").write_text('{"name": "odd", "no_such_key": 1}')
    text = hacrl("status")
    assert "campaign odd" in text
    assert re.search(r"tiny\s+complete\s+2/2", text)
    assert "tiny/ada" in text

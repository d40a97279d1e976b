"""MLflow and Prefect away, dying and hung, with real servers and real sockets: training goes on after one warning."""

import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

import flows.tracking.feed as tracker_module
from flows.home import Home
from flows.record.record import read_entries
from flows.run.runner import InlineRunner
from flows.scheduling.api import configured_url, prefect_api
from flows.tracking.feed import ServerAway, Tracker, probe, sync_campaigns
from flows.tracking.projection import quiet_environment
from hacrl_core.artifacts import Store
from tests.flow.conftest import tiny
from tests.flow.homes import digests, run_here
from tests.patience import patience

pytestmark = pytest.mark.slow


@pytest.fixture
def hung():
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def closed():
    """An address where nobody listens."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{place.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    quiet_environment()
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(tracker_module, "_warned", set())


def test_a_probe_knows_an_answer_from_silence(hung, closed):
    for url, says in ((hung, "no answer within 0.3 s"), (closed, "refused")):
        with pytest.raises(ServerAway, match=says):
            probe(url, 0.3)
    probe("sqlite:///nowhere")


def counted(monkeypatch, module):
    """Return the list of threads that probe a server from the module, from now on."""
    asked = []

    def counting(url, seconds=None):
        asked.append(threading.current_thread())
        probe(url, seconds)

    monkeypatch.setattr(module, "probe", counting)
    return asked


def alone(**changes):
    """One agent, hardly taught: what it learns does not matter here."""
    agents = {"ada": tiny().agents["ada"].model_dump(mode="json")}
    agents["ada"]["warmstart"]["steps"] = 20
    return tiny(**{"agents": agents, "evaluate": {}, **changes})


def test_a_campaign_does_not_wait_for_an_mlflow_that_is_away_and_sync_fills_it_in(
    hung, closed, tmp_path, monkeypatch, capsys, blank_database
):
    home = Home(tmp_path / "home")
    home.root.mkdir()
    shutil.copyfile(blank_database, home.database)
    monkeypatch.setattr(tracker_module, "PROBE_SECONDS", 1.0)
    asked = counted(monkeypatch, tracker_module)
    for iterations, url in ((1, hung), (2, closed)):
        asked.clear()
        run_here(alone(iterations=iterations, tracking={"uri": url}), home)
        assert asked
        assert threading.main_thread() not in asked  # whoever waits for the server, it is not the campaign
        assert capsys.readouterr().out.count("training goes on and nothing is lost") == 1
        assert sync_campaigns(Console(), home, "tiny") == 1  # still away: one line, exit code 1
        assert f"tiny: {url}: " in capsys.readouterr().out
    now = alone(tracking={"uri": home.tracking_uri})  # the server is back
    (home.campaign("tiny") / "config.json").write_text(now.model_dump_json())
    for says in ("brought up to date", "was up to date"):
        assert sync_campaigns(Console(), home, None) == 0
        assert f"tiny: {says}, 2 iterations" in capsys.readouterr().out
    found = points(home)
    assert set(found.values()) == {1}
    run_here(now, home)
    assert points(home) == found  # a run that looks again adds nothing
    store = Store(home.store)
    expected = sum(len(store.manifest(e.stage, e.key).metrics) + 1 for e in read_entries(home.campaign("tiny")))
    # Each stage's metrics and its time, the rewards again in the parent, and headlines and costs besides.
    assert len(found) >= expected + 2


def points(home: Home, place: Path | None = None) -> Counter:
    with sqlite3.connect(place or home.root / "mlflow.db") as database:
        return Counter(database.execute("select run_uuid, key, step from metrics").fetchall())


class Moody:
    """A projection whose server goes away and comes back."""

    def __init__(self) -> None:
        self.away = False
        self.got: list[object] = []
        self.status = ""

    def log(self, entries):
        if self.away:
            raise ConnectionError("gone")
        self.got += entries

    def mark_complete(self, entries, history):
        self.log(["complete"])

    def finish(self, status):
        self.status = status


def test_what_could_not_be_sent_is_sent_when_the_server_is_back_in_order_and_once(monkeypatch):
    monkeypatch.setattr(tracker_module, "FIRST_RETRY_SECONDS", 0.2)
    server, told = Moody(), []
    tracker = Tracker(lambda: server, told.append, patience=10)
    tracker.log([1])
    wait_for(lambda: server.got == [1])
    server.away = True
    tracker.log([2])
    tracker.log([3])
    wait_for(lambda: tracker.problem is not None)
    server.away = False
    tracker.log([4])
    tracker.mark_complete([], lambda: None)
    tracker.close("FINISHED")
    assert server.got == [1, 2, 3, 4, "complete"]
    assert server.status == "FINISHED"
    assert len(told) == 2
    assert "gone; training goes on" in told[0]
    assert "answers again" in told[1]


@pytest.mark.servers
def test_an_mlflow_server_killed_in_mid_campaign_is_filled_in_when_it_is_back(tmp_path, closed, capsys):
    home, config = Home(tmp_path / "home"), alone(iterations=3, tracking={"uri": closed})
    servers = [start_mlflow(tmp_path, closed)]

    class Deadly(InlineRunner):
        def iteration_done(self, iteration: int) -> None:
            super().iteration_done(iteration)
            if iteration == 1:
                os.killpg(servers[0].pid, signal.SIGKILL)

    try:
        begun = time.monotonic()
        run_here(config, home, Deadly)
        stages = sum(entry.seconds for entry in read_entries(home.campaign("tiny")))
        assert time.monotonic() - begun - stages < patience(60)
        assert capsys.readouterr().out.count("training goes on and nothing is lost") == 1
        servers.append(start_mlflow(tmp_path, closed))
        for _ in range(2):
            assert sync_campaigns(Console(), home, "tiny") == 0
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    found = points(home, tmp_path / "server.db")
    assert set(found.values()) == {1}
    assert {step for _, key, step in found if key == "reward"} == {1, 2, 3}


def start_mlflow(place: Path, url: str) -> "subprocess.Popen[bytes]":
    words = ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{place / 'server.db'}", "--default-artifact-root", str(place / "files")]
    with (place / "server.log").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words, *store],
            stdout=log,
            stderr=log,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )
    wait_for(lambda: answers(url), 200)
    return server


def answers(url: str) -> bool:
    try:
        probe(f"{url}/health", 2)
    except ServerAway:
        return False
    return True


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- Prefect -----------------------------------------------------------------------------------------------------------


def test_the_configured_server_is_read_as_prefect_reads_it(tmp_path, monkeypatch):
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_HOME", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert configured_url() is None
    (tmp_path / ".prefect").mkdir()
    profiles = tmp_path / ".prefect" / "profiles.toml"
    profiles.write_text('active = "mine"\n[profiles.mine]\nPREFECT_LOGGING_LEVEL = "DEBUG"\n')
    assert configured_url() is None  # a profile without an address is no server
    profiles.write_text(
        'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://a/api"\n'
        '[profiles.b]\nPREFECT_API_URL = "http://b/api/"\n'
    )
    assert configured_url() == "http://a/api"
    monkeypatch.setenv("PREFECT_PROFILE", "b")
    assert configured_url() == "http://b/api"
    monkeypatch.setenv("PREFECT_API_URL", "http://c/api")
    assert configured_url() == "http://c/api"


class _Ends(Exception):
    """Ends the test before a server of our own would be started."""


@pytest.mark.parametrize("server", ["hung", "closed"])
def test_a_configured_server_that_does_not_answer_costs_one_warning_and_a_server_of_our_own_takes_over(
    server, request, tmp_path, monkeypatch
):
    import flows.scheduling.api as module

    url = request.getfixturevalue(server) + "/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    monkeypatch.setattr(tracker_module, "PROBE_SECONDS", 1.0)

    def started(*args, **kwargs):
        assert "PREFECT_API_URL" not in os.environ
        raise _Ends

    monkeypatch.setattr(module.subprocess, "Popen", started)
    told: list[str] = []
    asked = counted(monkeypatch, module)
    with pytest.raises(_Ends), prefect_api(Home(tmp_path), told.append):
        pass
    assert len(asked) == 1  # it costs at most PROBE_SECONDS
    assert len(told) == 1
    assert url in told[0]
    assert os.environ["PREFECT_API_URL"] == url  # as it was


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.servers
def test_a_prefect_server_killed_in_mid_campaign_costs_one_warning_and_nothing_else(tmp_path, run_inline):
    """Our own temporary server, killed after the first iteration."""
    import yaml

    config = tiny(iterations=3, evaluate={})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    environment = {**os.environ, "HACRL_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "flows.cli", "run", str(tmp_path / "tiny.yaml")]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    watchdog = threading.Timer(patience(280), process.kill)
    watchdog.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("iteration   1/"):
            os.kill(_server_of(process.pid), signal.SIGKILL)
    process.wait()
    watchdog.cancel()
    text = "".join(lines)
    assert process.returncode == 0, text
    assert "Traceback" not in text
    assert " ERROR " not in text
    assert text.count("! Prefect's server is gone") == 1
    assert text.count("iteration   3/3") == 1
    assert re.search(r"3\d stages ran, \d were in the cache", text)
    _, state = run_inline(config)
    for agent in ("ada", "ben"):
        assert (
            digests(Home(tmp_path / "home"), "tiny")[f"update {agent} #2"] == state.versions[agent].outcome().ref.digest
        )


def _server_of(parent: int) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().split("\0")
            if "flows.scheduling.api" in words and words[-2] == str(parent):
                return int(entry.name)
        except (OSError, IndexError):
            continue
    raise AssertionError("the campaign has no server of its own")

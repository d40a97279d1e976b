"""hacrl up, ps, down, run and deploy on real servers. All tests share one ``up`` and run in the order of this file."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.servers.processes import memory, process_tree, processes_with_token
from flows.servers.state import log_file, read_state
from tests.patience import patience
from tests.servers.conftest import fetch, free_port, wait_for

pytestmark = pytest.mark.servers

HOLDER = """
import sys, time
from pathlib import Path
from flows.scheduling.slots import held_slots
from hacrl_core.config.loading import load_config
from hacrl_core.config.campaign import CampaignConfig
config = load_config(Path(sys.argv[1]), CampaignConfig)
with held_slots(config, lambda text: print(text, flush=True)):
    print("held", time.time(), flush=True)
    sys.stdin.read()
print("released", flush=True)
"""


def hold(servers, slot, stdin=subprocess.PIPE):
    """Start a process that takes a slot and has it until its standard input is closed, or until it is killed."""
    environment = {
        **servers.environment,
        "PREFECT_API_URL": f"{servers.prefect}/api",
        "PREFECT_HOME": str(servers.place / "p"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, servers.config(f"holder-{slot}", runtime={"slots": [slot]})],
        env=environment, stdin=stdin, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def killed_holder(servers):
    """A process that held a slot and was killed at the beginning of the tests; its lease runs out meanwhile."""
    holder = hold(servers, "the-gpu")
    assert holder.stdout.readline().startswith("held")
    rival = hold(servers, "the-gpu", subprocess.DEVNULL)
    assert "waiting for the-gpu" in rival.stdout.readline()
    holder.kill()
    holder.wait()
    killed = time.time()
    yield rival, killed
    rival.kill()
    rival.wait()


def test_up_waits_for_three_answers_and_says_where(servers, killed_holder):
    for line in (
        "Prefect answers after",
        "MLflow answers after",
        "worker answers after",
        servers.prefect,
        servers.mlflow,
    ):
        assert line in servers.said
    assert fetch(f"{servers.prefect}/")[0] == 200  # the pages are there
    assert "MLflow" in fetch(f"{servers.mlflow}/")[2]
    text = servers("ps")
    assert text.count("answers") == 3
    print(f"\nstart-up {servers.seconds:.1f} s")
    for name in ("prefect", "mlflow", "worker"):
        used = memory(process_tree(servers.pid(name))) / 2**20
        print(f"{name}: {used:.0f} MB")
        assert used < 400
    assert memory([read_state(servers.home).supervisor.pid]) < 30 * 2**20


def test_a_second_up_finds_everything_running(servers):
    before = read_state(servers.home)
    assert "already running" in servers("up")
    assert read_state(servers.home).servers == before.servers
    assert "hacrl down first" in servers("up", f"--prefect-port={free_port()}", code=2)


def test_nobody_else_is_listened_to(servers):
    for name, port in servers.ports.items():
        with socket.socket() as knock:
            knock.settimeout(2)
            for address in {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}:
                if not address.startswith("127."):
                    assert knock.connect_ex((address, port)) != 0, f"{name} answers on {address}"
    assert fetch(f"{servers.prefect}/api/admin/version", Host="evil.example")[0] == 400
    assert fetch(f"{servers.mlflow}/api/2.0/mlflow/experiments/search?max_results=1", Host="evil.example")[0] == 403
    assert fetch(f"{servers.mlflow}/api/2.0/mlflow/experiments/search?max_results=1", Host="localhost:a.b")[0] == 403
    foreign = {"Origin": "http://evil.example"}
    assert "access-control-allow-origin" not in {
        k.lower() for k in fetch(f"{servers.prefect}/api/health", **foreign)[1]
    }
    assert fetch(f"{servers.mlflow}/api/2.0/mlflow/experiments/search", b'{"max_results": 1}', **foreign)[0] == 403
    assert "other machines could reach" in servers(
        "up", "--host=0.0.0.0", "--home", str(servers.place / "other"), code=2
    )
    taken = f"--prefect-port={servers.ports['mlflow']}"
    assert "Address already in use" in servers("up", taken, "--home", str(servers.place / "other"), code=2)


def test_telemetry_is_off_and_mlflow_has_no_job_workers(servers):
    environment = Path(f"/proc/{servers.pid('prefect')}/environ").read_text()
    assert "DO_NOT_TRACK=true" in environment
    assert len(process_tree(servers.pid("mlflow"))) == 1
    assert fetch(f"{servers.prefect}/api/admin/settings")[2].count('"analytics_enabled":false') == 1
    assert '"disable_ui_telemetry":true' in fetch(f"{servers.mlflow}/ajax-api/3.0/mlflow/ui-telemetry")[2]


def test_run_uses_the_servers_by_itself(servers):
    text = servers("run", servers.config("by_hand", iterations=1))
    assert servers.mlflow in text  # the way to MLflow at the end is the server's address
    assert "View run" not in text
    flow_runs = servers.api("flow_runs/filter", sort="START_TIME_DESC", limit=5)
    assert any(run["name"].startswith("by_hand") and run["state_type"] == "COMPLETED" for run in flow_runs)
    with sqlite3.connect(servers.home.root / "mlflow.db") as database:
        names = {name for (name,) in database.execute("select name from runs")}
    assert {"by_hand", "by_hand/ada"} <= names
    more = servers("run", servers.config("by_hand", iterations=1), "--more", "1")
    assert "1 iterations are complete, 1 more to 2" in more


def test_nights_go_on_where_the_last_one_ended_and_queue(servers):
    night = {"cron": "30 3 * * *", "timezone": "America/New_York", "more_iterations": 1}
    config = servers.config("nightly", schedule=night, seed=0, runtime={"slots": ["the-night"]})

    def by_hand():
        return [run for run in servers.runs("nightly") if not run["auto_scheduled"]]

    # The first night waits for a slot: it cannot end before the worker has heard of the second.
    with hold(servers, "the-night") as holder:
        assert holder.stdout.readline().startswith("held")
        text = servers("deploy", config, "--now")
        assert "30 3 * * * (America/New_York), 1 more iterations" in text
        # Prefect plans its runs after a while; the next one is known at once.
        listed = servers("deploy", "--list")
        assert re.search(r"nightly\s+30 3 \* \* \* \(America/New_York\)\s+\+1\s+\w{3} \d\d:30", listed)
        deployment = servers.runs("nightly")[0]["deployment_id"]
        assert fetch(f"{servers.prefect}/api/deployments/{deployment}/create_flow_run", b"{}")[0] == 201
        servers("deploy", config)  # registering again renews
        queued = ["AwaitingConcurrencySlot", "Running"]
        wait_for(lambda: sorted(run["state_name"] for run in by_hand()) == queued, 120, "a night that waits")
        holder.stdin.close()
        assert holder.stdout.readline() == "released\n"
    deadline = time.monotonic() + patience(240)
    while time.monotonic() < deadline and not all(run["state_type"] == "COMPLETED" for run in by_hand()):
        states = [run["state_name"] for run in by_hand()]
        assert not {"Failed", "Crashed"} & set(states), log_file(servers.home, "worker").read_text()[-3000:]
        assert states.count("Running") <= 1
        time.sleep(0.5)
    assert [run["state_type"] for run in by_hand()] == ["COMPLETED"] * 2
    logs = log_file(servers.home, "worker").read_text()
    assert "campaign nightly: 0 iterations are complete, 1 more to 1" in logs
    assert "campaign nightly: 1 iterations are complete, 1 more to 2" in logs
    assert re.search(r"nightly\s+idle\s+2 \(\+1\)", servers("status")), "a schedule that goes on has no end"
    with sqlite3.connect(servers.home.root / "mlflow.db") as database:
        query = (
            "select distinct step from metrics m join runs r using (run_uuid) "
            "where r.name = 'nightly/ada' and m.key = 'verify/reward_mean'"
        )
        assert sorted(step for (step,) in database.execute(query)) == [1, 2]


def test_the_clock_is_kept_in_the_campaigns_time_zone_and_removal_ends_it(servers):
    coming = wait_for(lambda: [r for r in servers.runs("nightly") if r["auto_scheduled"]], 60, "scheduled runs")
    hours = {run["expected_start_time"][11:16] for run in coming}
    assert hours <= {"07:30", "08:30"}  # half past three in New York, in winter and in summer
    assert len(hours) == 1 or len(coming) > 1
    assert {run["parameters"]["more_iterations"] for run in coming} == {1}
    # Prefect's page of upcoming runs has the names with which they will start.
    at = {run["name"]: datetime.fromisoformat(run["expected_start_time"]) for run in coming}
    assert all(name == f"nightly +1 ({when.astimezone(UTC):%Y-%m-%d %H:%M})" for name, when in at.items()), at
    first = min(at.values()).astimezone()
    listed = re.search(r"nightly\s.*\+1\s+(\w{3} \d\d:\d\d)\s+Completed, \w{3} \d\d:\d\d", servers("deploy", "--list"))
    assert listed is not None
    assert listed[1] == f"{first:%a %H:%M}"
    assert "is removed" in servers("deploy", "--remove", "nightly")
    assert "no deployments" in servers("deploy", "--list")
    assert "deployment nightly: not found" in servers("deploy", "--remove", "nightly", code=2)
    assert "give one of" in servers("deploy", code=2)


def test_the_slot_of_a_killed_holder_is_freed(killed_holder):
    rival, killed = killed_holder
    word, when = rival.stdout.readline().split()  # waits until the dead one's lease has run out
    print(f"\nfreed {float(when) - killed:.0f} s after the kill")
    assert word == "held"
    assert 0 < float(when) - killed < patience(150)
    assert rival.stdout.readline() == "released\n"


def test_a_crashed_server_comes_back_by_itself(servers):
    old = servers.pid("mlflow")
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: servers.pid("mlflow") != old, 20, "a new process")
    assert "answers" in servers("up")  # waits for it
    assert re.search(r"MLflow\s+answers, restarted 1×", servers("ps"))


@pytest.fixture(scope="module")
def foreground(servers):
    """What systemd runs: hacrl up that stays."""
    words = ["up", "--foreground", *(f"--{name}-port={port}" for name, port in servers.ports.items())]
    popen = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *words],
        env=servers.environment,
        cwd=servers.place,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield popen
    popen.terminate()
    popen.wait(timeout=patience(60))


def test_a_killed_supervisor_takes_its_servers_along_and_up_starts_again(servers, request):
    state = read_state(servers.home)
    os.kill(state.supervisor.pid, signal.SIGKILL)
    wait_for(lambda: processes_with_token(state.token) == [], 60, "the end of the servers")
    assert "not running" in servers("ps", code=1)
    stays = request.getfixturevalue("foreground")
    assert "gone without hacrl down" in stays.stdout.readline()
    wait_for(lambda: (new := read_state(servers.home)) and new.token != state.token, 30, "a new supervisor")
    assert "already running" in servers("up")
    assert servers("ps").count("answers") == 3


def _statuses(home, campaign):
    with sqlite3.connect(home.root / "mlflow.db") as database:
        return [status for (status,) in database.execute("select status from runs where name = ?", (campaign,))]


def test_down_stops_a_campaign_and_leaves_nothing(servers, foreground):
    state = read_state(servers.home)
    assert state.supervisor.pid == foreground.pid
    servers("deploy", servers.config("cut_off", iterations=1000, seed=1), "--now")
    wait_for(lambda: any(r["state_name"] == "Running" for r in servers.runs("cut_off")), 60, "the campaign")
    wait_for(lambda: (servers.home.campaign("cut_off") / "stages.jsonl").exists(), 60, "its first stage")
    # A campaign that is stopped does not wait for an MLflow that has not even opened: the next run would fill it in.
    wait_for(lambda: _statuses(servers.home, "cut_off"), 60, "its run in MLflow")
    assert "is removed" in servers("deploy", "--remove", "cut_off")  # and its run still comes to an end in Prefect
    assert "campaign cut_off was stopped; its next run goes on" in servers("down")
    with sqlite3.connect(servers.home.root / "prefect" / "prefect.db") as database:
        query = "select distinct state_type from flow_run where name like 'cut_off%'"
        assert [state for (state,) in database.execute(query)] == ["CRASHED"]
    assert _statuses(servers.home, "cut_off") == ["KILLED"]
    assert "stopped from outside" in (servers.home.campaign("cut_off") / "log.txt").read_text().splitlines()[-1]
    assert foreground.wait(timeout=patience(20)) == 0
    assert processes_with_token(state.token) == []
    assert "nothing runs" in servers("down")
    assert "no servers" in servers("ps", code=1)
    assert "start them with: hacrl up" in servers("deploy", "--list", code=2)


def test_run_does_without_servers_and_writes_the_same_database(servers):
    text = servers("run", servers.config("by_hand", iterations=1))
    assert "nothing had to run" in text
    assert "sqlite:///" in text

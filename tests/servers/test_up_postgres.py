"""``hacrl up --postgres`` as one command against a real PostgreSQL server.

A campaign runs through it, the database goes away and comes back, nothing is left behind. The tests run in the order of
this file.
"""

import contextlib
import re
import time
from urllib.parse import quote

import pytest

from flows.servers.postgres import ensure_databases
from flows.servers.processes import processes_with_token
from flows.servers.state import NAMES, log_file, read_state, state_file
from hacrl_core.errors import ConfigError
from tests.patience import patience
from tests.servers.conftest import DATABASE_PASSWORD, Servers, free_port, wait_for

pytestmark = pytest.mark.servers

PASSWORD = "p@ss/w:rd%1"  # every character that means something in an address


@pytest.fixture(scope="module")
def servers(tmp_path_factory, postgres):
    postgres.query("postgres", f"create role night login createdb password '{PASSWORD}'")
    servers = Servers(tmp_path_factory.mktemp("up"))
    servers.where = f"127.0.0.1:{postgres.port}/team"
    servers.url = f"postgresql://night:{quote(PASSWORD, safe='')}@{servers.where}?sslmode=prefer"
    try:
        servers.said = servers.up("--postgres", servers.url)
        yield servers
    finally:
        state = read_state(servers.home)
        with contextlib.suppress(AssertionError):
            servers("down", "--force")
        assert state is None or processes_with_token(state.token) == [], "hacrl down left processes behind"


def test_one_command_starts_everything_on_postgres(servers, postgres):
    assert servers.said.count("answers after") == 3
    assert f"state in postgresql://night@{servers.where}" in servers("ps")
    assert "already running" in servers.up("--postgres", servers.url)
    other = servers.url.replace("/team", "/other")
    assert "hacrl down first to change the database" in servers("up", "--postgres", other, code=2)
    tables = "select count(*) from information_schema.tables where table_schema = 'public'"
    for database in ("team_prefect", "team_mlflow"):
        assert int(postgres.query(database, tables)[0]) > 20
    assert not list(servers.home.root.rglob("*.db"))  # no sqlite file beside it
    kept = [state_file(servers.home), *(log_file(servers.home, name) for name in (*NAMES, "servers"))]
    for path in kept:
        text = path.read_text()
        assert PASSWORD not in text, path
        assert quote(PASSWORD, safe="") not in text, path


def test_a_deployed_campaign_runs_and_is_seen(servers, postgres):
    config = servers.config("night", schedule={"cron": "30 3 * * *", "more_iterations": 2})
    assert "a run is queued: night by hand" in servers("deploy", config, "--now")

    def over():
        states = [run["state_name"] for run in servers.runs("night") if not run["auto_scheduled"]]
        assert not {"Failed", "Crashed"} & set(states), log_file(servers.home, "worker").read_text()[-3000:]
        return states == ["Completed"]

    wait_for(over, 240, "the campaign")
    assert postgres.query("team_mlflow", "select name from runs order by name") == ["night", "night/ada"]
    versions = "select count(*) from model_versions where name = 'night.ada'"
    assert postgres.query("team_mlflow", versions) == ["2"]  # version n is agent@n, from 1
    artifacts = "select distinct key from artifact order by key"
    assert postgres.query("team_prefect", artifacts) == [
        "hacrl-night-agents",
        "hacrl-night-progress",
        "hacrl-night-summary",
    ]
    assert re.search(r"night\s+idle\s+2 \(\+2\)", servers("status"))
    assert "complete: " in servers("logs", "night")
    assert "report.html" in servers("report", "night")
    assert re.search(r"night\s+30 3 \* \* \* .*\+2\s+\S+ \S+\s+Completed", servers("deploy", "--list"))


def test_the_database_may_go_away_and_come_back(servers, postgres):
    before = read_state(servers.home).servers
    postgres.stop()
    begun = time.monotonic()
    assert servers("ps", code=1).count("answers") == 0
    assert "answers 500" in servers("deploy", "--list", code=1)
    assert time.monotonic() - begun < patience(60)
    postgres.start()
    wait_for(lambda: servers.up("--postgres", servers.url), 60, "all three again")
    assert read_state(servers.home).servers == before  # none of them had to be started again
    assert "night" in servers("deploy", "--list")


def test_down_and_down_again(servers):
    state = read_state(servers.home)
    assert re.search(r"ended \d+ processes", servers("down"))
    assert processes_with_token(state.token) == []
    assert "nothing runs" in servers("down")
    fresh = servers.up("--postgres", servers.url)  # what was deployed is still there
    assert fresh.count("answers after") == 3
    assert "night" in servers("deploy", "--list")
    servers("down")


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        (
            "postgresql://night:wrong@{where}",
            'password authentication failed for user "night"; check user and password',
        ),
        ("postgresql://night@{where}", "no password supplied"),
        ("postgresql://night:x@127.0.0.1:{free}/team", "Connection refused; is PostgreSQL running there?"),
        ("postgresql://night:x@{where}?sslmode=require", "SSL"),
        ("postgresql://night:x@{where}?colour=red", "option colour is not known"),
        ("postgresql://night:se@cr/et@{where}", "not of the form"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_without_the_password(servers, url, wanted):
    said = servers.up("--postgres", url.format(where=servers.where, free=free_port()), code=2)
    assert wanted in said
    assert len(said.strip().splitlines()) == 1
    assert not re.search("wrong|:x@|cr/et", said)


def test_databases_are_made_or_it_says_why_not(postgres):
    address = f"127.0.0.1:{postgres.port}/pair"
    for _ in range(2):  # the second time they are there already
        ensure_databases(f"postgresql://hacrl:{DATABASE_PASSWORD}@{address}")
    found = postgres.query("postgres", "select datname from pg_database where datname like 'pair%' order by 1")
    assert found == ["pair_mlflow", "pair_prefect"]
    postgres.query("postgres", f"create role weak login password '{DATABASE_PASSWORD}'")
    with pytest.raises(ConfigError, match="other_prefect"):
        ensure_databases(f"postgresql://weak:{DATABASE_PASSWORD}@127.0.0.1:{postgres.port}/other")

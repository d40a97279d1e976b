"""What a party decides about: problems that it withholds, and a tokenizer that it shares."""

import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from flows.cli import app
from flows.exchange.mailbox import campaign_digest
from flows.exchange.session import open_exchange
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.exchange import WithholdConfig
from hacrl_core.config.problems import DatasetProblems
from hacrl_core.contracts.tables import PROMPTS, read_table
from hacrl_core.errors import ConfigError
from hacrl_core.problems import load_problems
from stages.spec import find_stage
from tests.exchange.kills import _live
from tests.exchange.parties import OneParty, as_party, central, meeting
from tests.exchange.whitelist import check_everything

TWO = {"north": ("ada",), "south": ("ben",)}
PUBLIC = [{"name": f"sum-{i}", "problem": f"{i}+{i % 5 + 1}", "answer": str(i + i % 5 + 1)} for i in range(14)]
PRIVATE = [{"name": f"ward-{i}", "problem": f"patient {i}: {i}+{i}", "answer": str(2 * i)} for i in range(5)]
POLICY = {"ids": ["ward-*"]}


def write_problems(folder: Path, *files: tuple[str, list[dict[str, Any]]]) -> None:
    (folder / "problems").mkdir(parents=True, exist_ok=True)
    for name, rows in files:
        (folder / "problems" / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def dataset(folder: Path, **changes: Any) -> DatasetProblems:
    raw = {"path": folder / "problems" / "*.jsonl", "columns": {"id": "name"}, "source": "sums", **changes}
    return DatasetProblems.model_validate(raw)


def test_withheld_problems_count_as_if_they_were_not_there(tmp_path: Path) -> None:
    """Whoever has them reads the same set as whoever never had them, also where only the first few are used."""
    # The private ones come first, one of them asks what a public one asks, and another has its name.
    copied = {**PUBLIC[0], "name": "ward-9"}
    write_problems(tmp_path / "hospital", ("a-ward", [*PRIVATE, copied]), ("b-sums", PUBLIC))
    write_problems(tmp_path / "other", ("b-sums", PUBLIC))
    policy = WithholdConfig.model_validate(POLICY)
    for filters in ({}, {"max_problems": 4}):
        here = load_problems(dataset(tmp_path / "hospital", filters=filters), (policy,))
        there = load_problems(dataset(tmp_path / "other", filters=filters), (policy,))
        assert here.problems == there.problems
        assert here.content_digest == there.content_digest
        assert here.left_out == {"withheld": 6}
        assert load_problems(dataset(tmp_path / "hospital", filters=filters)).content_digest != here.content_digest


def test_problems_are_withheld_by_their_tags_too(tmp_path: Path) -> None:
    rows = [{**row, "about": "patient" if i % 2 else "numbers"} for i, row in enumerate(PUBLIC)]
    write_problems(tmp_path, ("sums", rows))
    config = dataset(tmp_path, columns={"id": "name", "tags": {"kind": "about"}})
    found = load_problems(config, (WithholdConfig(tags={"kind": ("pat*",)}),))
    assert {problem.tags["kind"] for problem in found.problems} == {"numbers"}
    assert found.left_out == {"withheld": 7}


def test_settings_that_nobody_uses_change_no_digest(tmp_path: Path) -> None:
    """What was signed before these settings existed stays valid; with one of them set, all parties must know it."""
    plain = meeting(tmp_path, TWO)
    shown = plain.parties["south"].model_dump(mode="json", exclude_defaults=True)
    assert set(shown) == {"agents", "public_key"}
    sharing = meeting(tmp_path, TWO, settings={"south": {"share": ["tokenizer"]}})
    assert campaign_digest(sharing, 0) != campaign_digest(plain, 0)
    keys = {find_stage("sample").identity(StageCalls(config).sample({}, 0)).key for config in (plain, sharing)}
    assert len(keys) == 1


def test_a_policy_that_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValidationError, match=r"parties\.north.withhold: problems.kind arithmetic makes problems by code"
    ):
        meeting(tmp_path, TWO, settings={"north": {"withhold": POLICY}})
    with pytest.raises(ValidationError, match="ids are never empty and have no /"):
        WithholdConfig.model_validate({"ids": ["ward/*"]})
    # A misspelt pattern would let everything out.
    write_problems(tmp_path, ("sums", PUBLIC), ("ward", PRIVATE))
    config = with_problems(tmp_path, {"north": {"withhold": {"ids": ["wrad-*"]}}}, tmp_path, dataset(tmp_path))
    with pytest.raises(ConfigError, match=r"parties.north.withhold: wrad-\* matches none of this party's problems"):
        open_exchange(as_party(config, "north", tmp_path), tmp_path, Store(tmp_path / "store"), print)


def with_problems(folder: Path, settings: Any, versions: Path, problems: DatasetProblems) -> CampaignConfig:
    """Two parties with agents that exist already, and problems from files."""
    agents = {agent: {"checkpoint": {"path": str(versions / agent)}} for agent in ("ada", "ben")}
    raw = problems.model_dump(mode="json")
    return meeting(folder, TWO, settings=settings, agents=agents, problems=raw, iterations=1, evaluate={})


# -- a campaign with both settings ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, seed_store: Path) -> tuple[Path, dict[str, str]]:
    """North has private problems, and south shares its tokenizer; each is a process in a folder of its own.

    Returns the folder and the digests of the central campaign, which knows of no private problem and of no policy.
    """
    folder = tmp_path_factory.mktemp("policy")
    first = meeting(folder, TWO)
    central(first.model_copy(update={"iterations": 1}), seed_store)
    for agent in ("ada", "ben"):
        call = StageCalls(first).origin(agent)
        (folder / agent).symlink_to(seed_store / "objects" / call.stage / find_stage(call.stage).identity(call).key)
    write_problems(folder / "north", ("a-ward", PRIVATE), ("b-sums", PUBLIC))
    write_problems(folder / "south", ("b-sums", PUBLIC))
    problems = dataset(Path())
    settings = {"north": {"withhold": POLICY}, "south": {"share": ["tokenizer"]}}
    config = with_problems(folder, settings, folder, problems)
    before = os.getcwd()
    try:
        os.chdir(folder / "south")
        expected = central(with_problems(folder, {}, folder, problems), folder / "central")
        processes = []
        for name in TWO:
            os.chdir(folder / name)
            # A fork would have the threads of libraries that this process has used, in no state to go on.
            process = multiprocessing.get_context("spawn").Process(target=_live, args=(folder, name, config))
            process.start()
            processes.append(process)
        for process in processes:
            process.join()
    finally:
        os.chdir(before)
    assert [process.exitcode for process in processes] == [0, 0]
    (folder / "campaign.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    return folder, expected


@pytest.mark.exchange
def test_a_withheld_problem_leaves_no_trace_and_changes_no_key(campaign: tuple[Path, dict[str, str]]) -> None:
    folder, expected = campaign
    config = CampaignConfig.model_validate(json.loads((folder / "campaign.yaml").read_text()))
    parties = [OneParty(name, config, folder / name) for name in TWO]
    known = {label: digest for party in parties for label, digest in party.digests().items()}
    assert known == expected
    drawn = [read_table(path, PROMPTS) for path in (folder / "north" / "store").rglob("prompts.parquet")]
    assert {row["prompt_id"].split("-")[0] for table in drawn for row in table.to_pylist()} == {"sum"}
    for path in (folder / "bucket").rglob("*.parquet"):
        assert not re.search("ward-|patient", str(pq.read_table(path).to_pylist())), path


@pytest.mark.exchange
def test_every_object_with_both_settings(campaign: tuple[Path, dict[str, str]]) -> None:
    folder, _ = campaign
    bucket = Bucket(meeting(folder, TWO).exchange.bucket)
    check_everything(bucket, "tiny", TWO, 1, deadlines=False, tokenizers=("south/ben",))
    with pytest.raises(AssertionError):
        check_everything(bucket, "tiny", TWO, 1, deadlines=False)
    published = bucket.read("exchange/tiny/south/000000/ben.vocabulary.json")
    assert published == (folder / "ben" / "tokenizer.json").read_bytes()


@pytest.mark.exchange
def test_a_party_can_read_what_its_agents_learn_from(campaign: tuple[Path, dict[str, str]]) -> None:
    folder, _ = campaign
    texts = pq.read_table(folder / "bucket/exchange/tiny/south/000000/ben.answers.parquet").to_pylist()
    shown = CliRunner().invoke(
        app,
        ["rollouts", "tiny", "--agent", "ben", "--learner", "ada", "--prompts", "99", "--home", str(folder / "north")],
        env={"COLUMNS": "500"},
    )
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines() if line.startswith("│  ben ")]
    # Each line has a verdict, the advantage that ada gives it, and how often the text came.
    assert sum(int(row[4]) for row in rows) == len(texts)


@pytest.mark.exchange
def test_another_party_gets_the_tokenizer_with_its_signature_checked(campaign: tuple[Path, dict[str, str]]) -> None:
    folder, _ = campaign

    def ask(agent: str, home: str = "reader") -> Any:
        where = ["--agent", agent, "--home", str(folder / home)]
        return CliRunner().invoke(
            app, ["exchange", "tokenizer", str(folder / "campaign.yaml"), str(folder / f"{agent}.json"), *where]
        )

    got = ask("ben")
    assert got.exit_code == 0, got.output
    assert "signed by south" in got.output
    assert (folder / "ben.json").read_bytes() == (folder / "ben" / "tokenizer.json").read_bytes()
    refused = ask("ada")
    assert refused.exit_code == 2
    assert "parties.north has no share: [tokenizer]" in refused.output
    # What was not signed is not written.
    file = folder / "bucket" / "exchange" / "tiny" / "south" / "000000" / "ben.vocabulary.json"
    right = file.read_bytes()
    file.write_bytes(right.replace(b"version", b"Version", 1))
    try:
        altered = ask("ben", "second-reader")
        assert altered.exit_code == 2
        assert "altered" in altered.output
    finally:
        file.write_bytes(right)

"""``hacrl eval``: versions of a campaign, checkpoints from elsewhere, benchmarks by name and file, the cache, the
tables.
"""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from flows.agents import evaluate
from flows.agents.find import Changes, change_benchmark, find_agent
from flows.campaign import run_campaign
from flows.cli import app
from flows.home import Home
from flows.record.record import Record, read_entries, versions_of
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.contracts.tables import EVALUATION, read_table
from tests.flow.conftest import Inline, tiny


class Recording(Inline):
    """Inline, with the record that a real run leaves."""

    def __init__(self, store, record):
        super().__init__(store)
        self.record = record

    def submit(self, planned):
        done = super().submit(planned)
        self.record.add(planned.bound(), done.outcome())
        return done


def play(home, config):
    with Record(home.campaign(config.name), config) as record:
        runner = Recording(Store(home.store), record)
        run_campaign(config, StageCalls(config), runner)
    return runner


@pytest.fixture(scope="module")
def home(tmp_path_factory, shared_store):
    """A home in which the tiny campaign has run; its store is the one that the other campaign tests fill, too."""
    root = tmp_path_factory.mktemp("home")
    (root / "store").symlink_to(shared_store)
    found = Home(root)
    play(found, tiny())
    return found


@pytest.fixture
def hacrl(home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*words, code=0):
        done = CliRunner().invoke(app, ["eval", *map(str, words), "--home", str(home.root)])
        assert done.exit_code == code, done.output
        return done.output

    return run


def results(text):
    return [Path(line.split("every answer in ")[1]) for line in text.splitlines() if "every answer in" in line]


def test_a_campaigns_own_benchmark_is_a_cache_hit(hacrl, home):
    text = hacrl("tiny/ada")
    assert "tiny/ada@2" in text
    assert "held_out: from the cache" in text
    (path,) = results(text)
    entry = next(e for e in read_entries(home.campaign("tiny")) if e.label == "evaluate ada held_out #2")
    assert path.parent.name == entry.key
    rows = read_table(path, EVALUATION).to_pylist()
    right = sum(row["verdict"] == "correct" for row in rows)
    assert re.search(rf"held_out\s+8\s+1\s+{100 * right / 8:.1f} %", text)


def test_versions_are_those_of_the_campaign(hacrl, home):
    store, entries = Store(home.store), read_entries(home.campaign("tiny"))
    keys = [find_agent(store, home, f"tiny/ben@{version}").version.key for version in (0, 1, 2)]
    expected = ["warmstart ben", "update ben #0", "update ben #1"]
    assert keys == [next(e.key for e in entries if e.label == label) for label in expected]
    assert find_agent(store, home, "tiny/ben").version.key == keys[2]
    assert "tiny/ben@0" in hacrl("tiny/ben@0")


def test_versions_of_older_settings_do_not_count(home):
    """The campaign was changed and has done one iteration of two: the record of the second is still that of before."""
    config = tiny(name="changed")
    play(home, config)
    play(home, tiny(name="changed", update={"learning_rate": 5e-3, "minibatch_prompts": 3}, iterations=1))
    versions = versions_of(Store(home.store), read_entries(home.campaign("changed")), "ada", config)
    assert [entry.label for entry in versions] == ["warmstart ada", "update ada #0"]


def test_samples_tags_and_the_cache(hacrl):
    words = ["tiny/ada", "-b", "arithmetic", "--samples", "4", "--temperature", "0.8", "--limit", "12"]
    first = hacrl(*words)
    assert "evaluating on arithmetic" in first
    assert re.search(r"pass@4\s+best@4\s+maj@4", first)
    rows = read_table(results(first)[0], EVALUATION).to_pylist()
    assert len(rows) == 48
    assert len({row["problem_id"] for row in rows}) == 12
    again = hacrl(*words)
    assert "from the cache" in again
    assert results(again) == results(first)
    fewer = hacrl(*words[:-1], "11")
    assert "from the cache" not in fewer


def test_a_checkpoint_from_elsewhere_is_taken_in_and_gives_what_the_campaign_got(hacrl, home, tmp_path):
    """The agent's folder without anything of ours, on the campaign's benchmark as a file: the same answers."""
    store = Store(home.store)
    for path in find_agent(store, home, "tiny/ada").version.path.iterdir():
        if path.suffix in (".json", ".jinja") or path.name == "model.safetensors":
            shutil.copy(path, tmp_path / path.name)
    own = tiny().evaluate.benchmarks[0].model_dump(mode="json")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    first = hacrl(tmp_path, "-b", tmp_path / "own.yaml")
    assert "importing" in first
    assert "held_out: from the cache" in hacrl(tmp_path, "-b", tmp_path / "own.yaml")
    answers = [read_table(results(text)[0], EVALUATION).column("response_text") for text in (first, hacrl("tiny/ada"))]
    assert answers[0] == answers[1]


def test_breakdown_by_the_datasets_tags(hacrl, tmp_path):
    rows = [{"problem": f"{i}+1=?", "answer": str(i + 1), "level": i % 2} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"tags": {"level": "level"}}
    settings = {
        "problems": {
            "kind": "dataset",
            "path": str(tmp_path / "rows.jsonl"),
            "columns": columns,
            "prompt": "{problem}",
        },
        "max_tokens": 24,
    }
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(settings))
    text = hacrl("tiny/ada", "-b", tmp_path / "sums.yaml", "-b", "held_out")
    assert "sums by level" in text
    assert len(re.findall(r"^[01]\s+4\s+[\d.]+ %\s+[\d.]+ – [\d.]+ %\s*$", text, re.MULTILINE)) == 2
    assert len(results(text)) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nobody"], "agent nobody: neither a folder with a checkpoint (config.json), nor campaign/agent (campaigns"),
        (["tiny/zoe"], "agent zoe: not in campaign tiny; its agents are ada, ben"),
        (["tiny/ada@9"], "tiny/ada@9: no such version; give latest, best, or a number of iterations from 0 to 2"),
        (["tiny/ada", "-b", "nope"], "--benchmark nope: not known; choose from held_out, math"),
        (["tiny/ada", "-b", "nope.yaml"], "nope.yaml: No such file"),
        (["tiny/ada", "--samples", "3"], "3 greedy samples are all alike"),
        (["tiny/ada", "--engine", "magic"], "--engine magic: not known; choose builtin or vllm"),
    ],
)
def test_mistakes_are_one_line(hacrl, words, says):
    text = hacrl(*words, code=2)
    assert says in text
    assert len(text.strip().splitlines()) == 1


def test_changes_keep_the_benchmarks_own_limits():
    aime = BenchmarkConfig.model_validate({"problems": "aime2025", "ks": [1, 8, 30]})
    changed = change_benchmark(aime, Changes(samples=8, limit=5))
    assert (changed.samples, changed.temperature, changed.ks, changed.problems.filters.max_problems) == (
        8,
        1.0,
        (1, 8),
        5,
    )
    assert change_benchmark(changed, Changes(limit=50)).problems.filters.max_problems == 5
    assert change_benchmark(aime, Changes()) == aime


def test_a_file_sees_tokens_while_no_response_has_ended(monkeypatch):
    """Long responses end late: between quarters a line every half minute says that tokens are written."""
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(evaluate.time, "monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    listener = evaluate._EvaluationListener(Console(file=out, width=120))
    for tokens in range(0, 600, 100):
        listener.progress(None, 0, 20, f"{tokens} tokens")
    listener.progress(None, 5, 20, "700 tokens")
    lines = out.getvalue().splitlines()
    assert [line.split(", ")[1] for line in lines] == ["0 tokens", "200 tokens", "400 tokens", "700 tokens"]
    assert lines[-1].endswith("5/20 responses, 700 tokens")
    listener.progress(None, 10, 20, "checked")
    assert out.getvalue().splitlines()[-1].endswith(": checked 10/20 responses")

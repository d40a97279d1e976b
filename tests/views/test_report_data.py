"""The report's numbers against the manifests; what there is to show of odd campaigns; the pictures."""

import re
import statistics

import numpy as np
import pytest

from flows.record.history import History
from flows.report.charts import draw, ticks
from flows.report.examples import examples
from flows.report.page import render, write_report
from flows.report.panels import MOST_POINTS, sections, thin
from flows.views.text import clock, short
from hacrl_core.artifacts import Store
from hacrl_core.contracts.tables import EVALUATION, ROLLOUTS, read_table
from hacrl_core.errors import ConfigError

from .conftest import seen_config


def test_accuracy_and_cost_are_those_of_the_tables(history, seen, entries):
    store = Store(seen.store)
    for entry in entries:
        if entry.stage == "evaluate":
            rows = read_table(store.folder(entry.stage, entry.key) / "evaluation.parquet", EVALUATION).to_pylist()
            share = statistics.fmean(row["verdict"] == "correct" for row in rows)
            assert dict(history.accuracy(entry.agent, "held_out"))[entry.iteration] == pytest.approx(share)
    tables = [
        read_table(store.folder(e.stage, e.key) / "rollouts.parquet", ROLLOUTS)
        for e in entries
        if e.stage == "generate"
    ]
    cost = history.cost()
    assert cost.responses == sum(table.num_rows for table in tables) == 3 * 2 * 6 * 4
    assert cost.tokens == sum(len(ids) for table in tables for ids in table["response_token_ids"].to_pylist())
    assert history.spent_until("responses") == {0: 0.0, 1: 48.0, 2: 96.0, 3: 144.0}


def test_the_best_version_is_the_one_with_the_highest_accuracy_the_later_of_equals(history):
    for agent in history.agents:
        points = history.accuracy(agent, "held_out")
        top = max(value for _, value in points)
        assert history.best(agent) == max(step for step, value in points if value == top)


def test_the_page_has_the_numbers_on_top_the_settings_and_the_lineage(history):
    html = render(history, "complete")
    for agent in history.agents:
        assert f"{100 * history.accuracy(agent, 'held_out')[-1][1]:.1f} %" in html
        for entry in history.versions[agent]:
            assert history.store.manifest(entry.stage, entry.key).content_digest[:10] in html
    top, settings = html.split('id="configuration"')
    assert "prompts_per_iteration: 6" in settings
    assert "prompts_per_iteration: 6" not in top
    assert "http://" not in html.replace("http-equiv", "")
    assert "https://" not in html


def test_examples_show_own_and_foreign_right_and_wrong(history):
    iteration, shown = examples(history)
    assert iteration == 2
    assert 1 <= len(shown) <= 6
    learners = {
        (answers.agent, who, own)
        for e in shown
        for answers in e.answers
        for r in answers.responses
        for who, own, _ in r.advantages
    }
    assert {("ada", "ada", True), ("ada", "ben", False), ("ben", "ben", True), ("ben", "ada", False)} <= learners
    for example in shown:
        for answers in example.answers:
            verdicts = [reply.verdict == "correct" for reply in answers.responses]
            assert (answers.right > 0) == (True in verdicts)
            assert (answers.right < answers.total) == (False in verdicts)


def test_a_report_has_a_page_and_a_picture_for_each_section(seen, tmp_path):
    written = write_report(seen, None, tmp_path / "out")
    assert [path.name for path in written] == ["report.html", "learning.png", "exchange.png", "answers.png", "time.png"]
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 20_000 for path in written[1:])


def test_a_campaign_that_has_not_begun_has_a_report_too(seen):
    empty = History(seen_config(), Store(seen.store), [])
    assert (empty.done, empty.best("ada"), empty.seconds_left()) == (0, None, None)
    html = render(empty, "running")
    assert "nothing measured yet" in html
    assert "<figure" not in html


def test_a_campaign_that_is_not_there_is_named(seen, tmp_path):
    with pytest.raises(ConfigError, match="campaign nobody: not found"):
        write_report(seen, "nobody", tmp_path)


def test_thinned_lines_keep_their_mean_and_ticks_are_round():
    points = [(float(i), float(np.sin(i / 50))) for i in range(10_000)]
    thinned = thin(points)
    assert len(thinned) <= MOST_POINTS
    assert statistics.fmean(y for _, y in thinned) == pytest.approx(statistics.fmean(y for _, y in points), abs=0.01)
    assert ticks(0, 1, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(0, 8, 6) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert ticks(3.0, 3.0) == [3.0]


def test_drawn_points_lie_where_the_numbers_say(history):
    """The first polyline of the accuracy chart, back from pixels to shares."""
    chart = sections(history)[0].panels[0]
    svg = draw(chart).svg
    drawn = [tuple(map(float, pair.split(","))) for pair in re.search(r'polyline[^>]*points="([^"]+)"', svg)[1].split()]
    values = [value for _, value in chart.lines[0].points]
    assert len(drawn) == len(values) == 4
    order = np.argsort([-y for _, y in drawn], kind="stable")
    assert np.all(np.diff(np.array(values)[order]) >= -1e-9)
    assert np.allclose(np.diff([x for x, _ in drawn]), (drawn[-1][0] - drawn[0][0]) / 3, atol=0.11)


@pytest.mark.parametrize(("seconds", "text"), [(7, "0:07"), (754, "12:34"), (11_554, "3:12:34"), (None, "")])
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (950, "950"), (6144, "6.14k"), (12_300_000, "12.3M")])
def test_short(number, text):
    assert short(number) == text

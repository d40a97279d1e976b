"""The report in a real browser: everything is there, nothing complains, nothing scrolls sideways, hostile text stays
text.
"""

from typing import Any

import pytest

import flows.report.page as page_module
from flows.report.examples import Answers, Example, Response
from flows.report.page import render, write_report

HOSTILE = "</script></pre><script>window.hit=1</script><img src=x onerror='window.hit=1'>{{ 7*7 }} \\u003c &lt; 𝒙"


@pytest.fixture(scope="module")
def report(seen: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_report(seen, "seen", tmp_path_factory.mktemp("report"), pictures=False)


def opened(browser: Any, url: str, **options: Any) -> tuple[Any, list[str]]:
    page = browser.new_context(**options).new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda problem: problems.append(str(problem)))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else problems.append(asked.url))
    page.goto(url)
    return page, problems


VIEWS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True},
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_panel_is_drawn_and_nothing_complains(browser, report, view, tmp_path):
    page, problems = opened(browser, report[0].as_uri(), **VIEWS[view])
    assert problems == []
    panels = page.locator("figure.panel")
    names = panels.evaluate_all("all => all.map(one => one.dataset.panel)")
    assert {"accuracy-held_out", "reward", "capability", "cost-responses", "cost-tokens", "tag-held_out-kind"} <= set(
        names
    )
    assert {"foreign-ratio", "own-ratio", "inside", "clipped", "cosine", "verdicts-ada", "verdicts-ben"} <= set(names)
    assert {"stages", "pace", "length"} <= set(names)
    empty = panels.evaluate_all(
        "all => all.filter(one => !one.querySelector('polyline, polygon, rect, circle')).map(one => one.dataset.panel)"
    )
    assert empty == []
    sizes = panels.evaluate_all("all => all.map(one => one.querySelector('svg').getBoundingClientRect().height)")
    assert min(sizes) > 60
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0
    spilt = page.locator(".card").evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).length")
    assert spilt == 0  # a table of versions stays inside its card
    picture = page.screenshot(path=tmp_path / f"{view}.png", full_page=True)
    assert len(picture) > 50_000
    page.context.close()


def test_dark_is_dark_and_text_can_be_read(browser, report):
    grounds = {}
    for view in ("light", "dark"):
        page, _ = opened(browser, report[0].as_uri(), **VIEWS[view])
        colours = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        light = [sum(map(int, c.split("(")[1].rstrip(")").split(",")[:3])) / 765 for c in colours]
        grounds[view] = light[0]
        assert abs(light[0] - light[1]) > 0.6
        page.context.close()
    assert grounds["dark"] < 0.2 < 0.8 < grounds["light"]


def test_pointing_at_a_chart_tells_its_values(browser, report, history):
    page, problems = opened(browser, report[0].as_uri(), **VIEWS["light"])
    chart = page.locator("#chart-accuracy-held_out")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    told = page.locator("#tip").inner_text()
    for agent in ("ada", "ben"):
        value = history.accuracy(agent, "held_out")[-1][1]
        assert agent in told
        assert f"{100 * value:.1f} %" in told
    assert "iterations 3" in told
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()
    assert problems == []
    page.context.close()


def test_hostile_rollouts_stay_text(browser, history, tmp_path, monkeypatch):
    reply = Response("incorrect", HOSTILE, 1, False, (("ada", True, -1.0),))
    example = Example("nobody was right", HOSTILE, HOSTILE, HOSTILE, (Answers("ada", 0, 0, 1, (reply,)),))
    monkeypatch.setattr(page_module, "examples", lambda history: (0, [example]))
    path = tmp_path / "hostile.html"
    path.write_text(render(history, "complete"), encoding="utf-8")
    page, problems = opened(browser, path.as_uri(), **VIEWS["phone"])
    assert problems == []
    assert page.evaluate("window.hit") is None
    assert page.locator("#examples .reply pre").inner_text() == HOSTILE
    assert page.locator("script").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.context.close()

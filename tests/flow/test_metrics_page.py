"""docs/metrics.md: every metric that a stage writes has a row there, and every row is written by some stage."""

import ast
import re
from pathlib import Path

from tests.flow.conftest import tiny

ROOT = Path(__file__).resolve().parents[2]
STAGES = "adopt|warmstart|sample|generate|verify|credit|score|reference|share|update|evaluate"
# Stage and name of a metric in the source; braces stand for what is filled in.
METRIC = re.compile(rf"(?:{STAGES})/[a-z_{{}}@/]+")
# Roles of a stage's inputs are written in the same form.
ROLES = re.compile(r"(?:score|sample)r?s?/\{\}|verdicts/\{\}")
# Names whose words are filled in; the campaign below writes them all.
FILLED_IN = {"verify/{}_share", "warmstart/{}"}


def rows() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)


def is_documented(name: str) -> bool:
    patterns = (re.sub(r"<\w+>", r"[^/]+", re.escape(row).replace(r"\<", "<").replace(r"\>", ">")) for row in rows())
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def names_in_source() -> set[str]:
    """Return the names of metrics that are written out in the code of stages and core."""
    found = set()
    for folder in ("stages", "hacrl_core/algorithm", "hacrl_core/learning"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
                else:
                    text = str(node.value) if isinstance(node, ast.Constant) else ""
                if METRIC.fullmatch(text) and not text.endswith("/") and not ROLES.fullmatch(text):
                    found.add(text)
    return found


def test_every_metric_of_a_campaign_has_a_row(run_inline) -> None:  # type: ignore[no-untyped-def]
    runner, _ = run_inline(tiny())
    written = {name for outcome in runner.outcomes.values() for name in outcome.metrics}
    assert len(written) > 70
    assert sorted(name for name in written if not is_documented(name)) == []


def test_every_metric_that_the_code_names_has_a_row() -> None:
    written_out = {name for name in names_in_source() - FILLED_IN if not name.startswith("evaluate/{}")}
    names = {name.replace("{}", "x") for name in written_out}
    assert len(names) > 40
    assert sorted(name for name in names if not is_documented(name)) == []


def test_every_row_is_a_metric_that_the_code_can_write() -> None:
    source = "".join(
        file.read_text() for folder in ("stages", "hacrl_core") for file in sorted((ROOT / folder).rglob("*.py"))
    )
    for row in rows():
        last = re.sub(r"<\w+>", "", row).rstrip("/@").rpartition("/")[2]
        side = re.sub(r"^(own|foreign)_(ratio|clip)", r"_\2", last)
        shares = re.sub(r"^(correct|incorrect|unparseable|timeout)_share$", r"_share", side)
        assert shares in source, f"docs/metrics.md: {row}: no stage writes it"

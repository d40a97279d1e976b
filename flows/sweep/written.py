"""The files of a sweep's report: tables, pictures and one page."""

from pathlib import Path

from flows.sweep.page import write_page
from flows.sweep.pictures import draw_costs, draw_curves, draw_forest
from flows.sweep.report import SweepReport, cells_csv, curves_csv, summary_csv


def write_report(report: SweepReport, folder: Path, prefix: str = "") -> list[Path]:
    """Write the tables (Markdown, LaTeX, CSV) and pictures and return their paths; none without a baseline's cells."""
    if not report.comparisons:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    table = report.accuracy()
    parts = [table.markdown(), report.words().markdown(), report.diagnostics().markdown()]
    parts += [f"{report.gaps()}\n"] if report.unfinished else []
    texts = {
        "table.md": "\n".join(parts),
        "table.tex": table.latex(),
        "summary.csv": summary_csv(report.comparisons),
        "cells.csv": cells_csv(report.results),
        "curves.csv": curves_csv(report.results),
    }
    written = []
    for name, text in texts.items():
        written.append(folder / f"{prefix}{name}")
        written[-1].write_text(text)
    pictures = {name: folder / f"{prefix}{name}.png" for name in ("curves", "costs", "forest")}
    draw_curves(report.results, report.variants, report.labels, report.agents, pictures["curves"])
    draw_costs(report.results, report.variants, report.labels, pictures["costs"])
    draw_forest(report.comparisons, report.labels, report.baseline, report.agents, pictures["forest"])
    if not prefix:
        written.append(write_page(report, pictures, folder))
    return [*written, *pictures.values()]

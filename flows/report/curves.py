"""The learning curves that every run draws: reward in training and held-out accuracy. All charts: ``hacrl report``."""

from pathlib import Path

from flows.record.history import History
from flows.report.panels import sections

NAME = "learning-curves.png"


def learning_curves(history: History, folder: Path) -> Path | None:
    """Draw ``learning-curves.png`` into the folder; nothing to draw, no picture."""
    panels = [panel for section in sections(history) if section.key == "learning" for panel in section.panels]
    chosen = [panel for panel in panels if panel.key == "reward" or panel.key.startswith("accuracy-")]
    if not chosen:
        return None
    from flows.report.png import draw_panels

    return draw_panels(tuple(chosen), history.agents, folder / NAME)

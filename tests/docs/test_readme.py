"""The README's picture and the figures beside it are those of the committed results."""

import importlib.util
import re
from types import ModuleType

from tests.docs.blocks import ROOT


def picture_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_picture", ROOT / "docs/results/build/readme_picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_says_what_the_cells_say() -> None:
    gains = picture_module().read_gains()
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert [one.agent for one in gains] == ["ada", "ben"]
    parts = []
    for one in gains:
        mean = sum(one.differences) / len(one.differences)
        up = sum(difference > 0 for difference in one.differences)
        parts.append(f"{one.agent} {mean:.1f}")
        assert f"({up} of {len(one.differences)})" in text
    assert f"{parts[0]} points (8 of 8), {parts[1]} (7 of 8)" in text
    both = sum(sum(pair) / 2 for pair in zip(*(one.differences for one in gains), strict=True)) / 8
    assert f"**yes**: {both:.1f} points, 7 of 8 seeds" in text
    assert f"{both:.1f} points higher with sharing" in text


def test_the_picture_can_be_drawn_again(tmp_path) -> None:  # type: ignore[no-untyped-def]
    module = picture_module()
    module.draw(module.read_gains(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000

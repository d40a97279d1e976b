"""The README's picture and the figures beside it are those of the committed results."""

import importlib
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
    module = picture_module()
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    even, opposite = module.read_ends("even"), module.read_ends("main")
    for method, words in (("hacpo", "with HACPO"), ("shared_gspo", "with shared GSPO")):
        d = even.difference(method)
        assert f"{100 * d.mean:.1f} points higher {words}" in text
        assert f"each of {d.seeds} seeds" in text
        assert f"{100 * d.mean:.1f} points, {d.higher} of {d.seeds} seeds" in text
    silent = [f"{100 * even.no_signal[method]:.0f} %" for method in ("gspo", "hacpo")]
    assert f"from {silent[0]} to {silent[1]}" in text
    d = opposite.difference("hacpo")
    assert f"{100 * d.mean:.1f} points, {d.higher} of {d.seeds} seeds" in text


def test_the_picture_can_be_drawn_again(tmp_path) -> None:  # type: ignore[no-untyped-def]
    module = picture_module()
    module.draw(module.read_curves(), module.read_ends(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000


def test_the_arena_is_written_from_the_committed_cells(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "docs/results/build"))
    arena = importlib.import_module("arena")
    assert (ROOT / "docs/arena.md").read_text() == arena.page()
    # A method that ends five points higher on every seed comes first, whatever else there is.
    ends = {task.name: arena.ends_of(task) for task in arena.TASKS if arena.there(task)}
    raised = {seed: value + 0.05 for seed, value in ends["a large gap"].after["gspo_x2"].items()}
    best = arena.Ends({}, {**ends["a large gap"].after, "grpo": raised}, {})
    label, cells, mean = arena.arena({"a large gap": best})[0]
    assert (label, round(mean, 6)) == ("GRPO", 5.0)
    assert cells[0].endswith("8/8")

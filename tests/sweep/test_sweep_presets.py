"""The presets: every file loads, says what it means, and brings the paper's values to its pairs."""

from pathlib import Path

import pytest

from hacrl_core.config.sweep import load_sweep
from hacrl_core.methods import METHODS

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "sweeps"
SWEEPS = sorted(p for p in FOLDER.rglob("*.yaml") if not p.stem.endswith("-pair") or p.parent != FOLDER)
PAIRS = {  # α, δ, δ_step of the paper's table 5
    "qwen3-4b-pair": (3, 0.2, 0.01),
    "qwen3-1.7b-4b-base": (1, 0.2, 0.025),
    "qwen3-4b-8b-base": (3, 0.2, 0.025),
    "llama3.2-1b-3b": (1, 0.1, 0.01),
    "qwen3-1.7b-llama3.2-1b": (1, 0.2, 0.025),
    "qwen3-4b-llama3.2-3b": (1, 0.2, 0.025),
}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_every_preset_loads(path):
    sweep = load_sweep(path)
    assert sweep.config.compared_with in sweep.variants
    assert len({c.label for c in sweep.cells}) == len(sweep.cells)
    few = {"tuning": 2, "cosine": 4, "even-tuning": 3, "even-tuning-methods": 3, "arena": 2, "real": 3}
    assert len(sweep.config.seeds) >= few.get(path.stem, 5)


def test_comparisons_do_not_use_the_seeds_of_tuning_and_tuning_is_gspo_alone():
    alone, each = load_sweep(FOLDER / "tuning.yaml"), load_sweep(FOLDER / "even-tuning.yaml")
    assert all(not c.config.objective(a).share_rollouts for c in alone.cells for a in c.config.agents)
    for path in SWEEPS:
        if path.stem not in ("tuning", "even-tuning", "even-tuning-methods"):
            assert not {*alone.config.seeds, *each.config.seeds} & set(load_sweep(path).config.seeds)


def test_the_even_pair_is_compared_as_its_protocol_says():
    tuned = load_sweep(FOLDER / "even-tuning.yaml")
    sweep = load_sweep(FOLDER / "even.yaml")
    assert sweep.config.seeds == tuple(range(201, 225))
    assert {c.split(".")[0] for c in tuned.variants} == set(sweep.variants)
    # Methods differ in their preset and in their learning rate, and in nothing else.
    for cell in sweep.cells:
        assert cell.config.agents == sweep.cells[0].config.agents
        assert cell.config.evaluate == sweep.cells[0].config.evaluate
    rates = {c.variant: c.config.update.learning_rate for c in sweep.cells}
    assert rates == {"gspo": 2e-4, "gspo_x2": 1e-4, "hacpo": 1e-4, "shared_gspo": 1e-4, "naive": 1e-4}


def test_the_longer_run_of_the_even_pair_changes_its_length_alone():
    whole, longer = load_sweep(FOLDER / "even.yaml"), load_sweep(FOLDER / "even-longer.yaml")
    assert longer.config.seeds == whole.config.seeds
    assert longer.variants == ["gspo", "gspo_x2", "hacpo", "shared_gspo"]
    short = {(c.variant, c.seed): c.config for c in whole.cells}
    for cell in longer.cells:
        assert cell.config.iterations == 40
        same = short[cell.variant, cell.seed]
        assert cell.config.model_copy(update={"iterations": 20, "name": same.name}) == same


def test_fresh_seeds_change_nothing_of_the_longer_run_but_seeds_and_one_method():
    old, fresh = load_sweep(FOLDER / "even-longer.yaml"), load_sweep(FOLDER / "even-fresh.yaml")
    assert fresh.config.seeds == tuple(range(225, 249))
    assert fresh.variants == ["gspo", "gspo_x2", "hacpo", "raft_foreign"]
    longer = {c.variant: c.config for c in old.cells if c.seed == 201}
    for cell in fresh.cells:
        same = longer.get(cell.variant, longer["hacpo"])
        assert cell.config.iterations == same.iterations == 40
        assert (cell.config.agents, cell.config.evaluate, cell.config.problems) == (
            same.agents,
            same.evaluate,
            same.problems,
        )
        if cell.variant in longer:
            assert cell.config.model_copy(update={"seed": same.seed, "name": same.name}) == same
        else:
            assert cell.config.preset == "raft_foreign"
    # Nobody has compared anything on these seeds.
    for path in SWEEPS:
        assert path.stem == "even-fresh" or not set(load_sweep(path).config.seeds) & set(fresh.config.seeds)


def test_the_methods_are_tuned_as_the_other_five_were():
    five, nine = load_sweep(FOLDER / "even-tuning.yaml"), load_sweep(FOLDER / "even-tuning-methods.yaml")
    names = [{c.split(".")[0] for c in sweep.variants} for sweep in (five, nine)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == set(load_sweep(FOLDER / "even-methods.yaml").variants)
    assert nine.config.seeds == five.config.seeds
    alike = {(c.seed, c.config.update.learning_rate): c.config for c in five.cells}
    for cell in nine.cells:
        same = alike[cell.seed, cell.config.update.learning_rate]
        assert (cell.config.agents, cell.config.evaluate, cell.config.iterations) == (
            same.agents,
            same.evaluate,
            same.iterations,
        )


def test_more_methods_and_switches_run_on_the_even_pair_as_it_is():
    even = {(c.variant, c.seed): c.config for c in load_sweep(FOLDER / "even.yaml").cells}
    methods = load_sweep(FOLDER / "even-methods.yaml")
    presets = {c.config.preset for c in methods.cells}
    tuned = {config.preset for config in even.values()}
    assert presets == set(METHODS) | tuned | {"hacpo_pessimistic", "hacpo_calibrated"}
    for cell in (*methods.cells, *load_sweep(FOLDER / "switches.yaml").cells):
        same = even["hacpo", cell.seed]
        assert (cell.config.agents, cell.config.evaluate, cell.config.problems) == (
            same.agents,
            same.evaluate,
            same.problems,
        )
        if (cell.variant, cell.seed) in even:
            twin = even[cell.variant, cell.seed]
            assert cell.config.model_copy(update={"name": twin.name}) == twin


def test_resampling_is_all_that_differs_from_gspo_of_the_even_pair():
    even = {c.seed: c.config for c in load_sweep(FOLDER / "even.yaml").cells if c.variant == "gspo"}
    sweep = load_sweep(FOLDER / "even-resample.yaml")
    assert sweep.config.compared_with == "gspo"
    for cell in sweep.cells:
        assert cell.config.resample == {"gspo": 0, "gspo_resample": 1}[cell.variant]
        assert cell.config.model_copy(update={"resample": 0, "name": even[cell.seed].name}) == even[cell.seed]


def test_three_agents_have_a_rival_with_as_many_answers_and_updates():
    cells = {c.variant: c.config for c in load_sweep(FOLDER / "even-three.yaml").cells if c.seed == 201}
    for name, config in cells.items():
        samplers = len(config.agents) if config.objective("ada").share_rollouts else 1
        answers = config.group_size * samplers
        assert config.update.minibatch_order == "mixed"
        # Answers in an update, and answers that a learner learns from in an iteration.
        assert config.minibatch_size("ada") * answers == 96
        assert config.prompts_per_iteration * answers == 24 * 8 * (1 if name == "gspo" else 3)


def test_real_models_are_compared_as_their_protocol_says():
    sweep = load_sweep(FOLDER / "real.yaml")
    assert sweep.config.seeds == (401, 402, 403)
    assert sweep.variants == ["gspo", "hacpo", "shared_gspo"]
    first = sweep.cells[0].config
    assert (first.iterations, first.prompts_per_iteration, first.group_size) == (3, 4, 4)
    for cell in sweep.cells:
        # Methods differ in their objective alone.
        assert (cell.config.agents, cell.config.update, cell.config.evaluate) == (
            first.agents,
            first.update,
            first.evaluate,
        )
        assert cell.config.preset == cell.variant


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_keep_their_settings_and_each_ablation_changes_one_thing(pair):
    alpha, delta, step = PAIRS[pair]
    cells = {c.variant: c.config for c in load_sweep(FOLDER / "paper" / f"{pair}-ablations.yaml").cells}
    for learner in cells["hacpo"].agents:
        whole = cells["hacpo"].objective(learner)
        assert (whole.alpha, whole.cross_clip_delta, whole.cross_clip_step) == (alpha, pytest.approx(delta), step)
        for variant, config in cells.items():
            other = config.objective(learner)
            changed = {k for k in type(whole).model_fields if getattr(whole, k) != getattr(other, k)}
            assert len(changed) <= 1, (variant, changed)
    main = {c.variant: c.config for c in load_sweep(FOLDER / "paper" / f"{pair}-main.yaml").cells}
    assert main["gspo_x2"].group_size == 2 * main["gspo"].group_size
    assert main["gspo_x2"].minibatch_size(learner) * 2 == main["gspo"].minibatch_size(learner)
    assert not main["grpo"].objective(next(iter(main["grpo"].agents))).share_rollouts


def test_the_tiny_pair_starts_from_the_published_window():
    cells = {c.variant: c.config for c in load_sweep(FOLDER / "extensions.yaml").cells}
    assert [cells["hacpo"].objective(a).cross_clip_delta for a in ("ada", "ben")] == [0.2, 0.2]
    assert [cells["hacpo_window"].objective(a).cross_clip_delta for a in ("ada", "ben")] == [0.2, 0.5]
    both = cells["calibrated_pessimistic"].objective("ben")
    assert (both.pessimistic, both.calibrated_share) == (True, 0.5)

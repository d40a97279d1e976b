"""hacrl plan: the graph is the campaign's own, the simulation right where the answer is known, calibration learns."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from flows.cli import app
from flows.plan.calibrate import calibrated, compare, measured_seconds
from flows.plan.graph import Task, record_graph, warmstart_shape, workload_of
from flows.plan.plan import Cluster, make_plan, parse_cluster
from flows.plan.rates import decode_seconds, dump_rates, load_rates, response_lengths, stage_seconds
from flows.plan.simulate import run_events, simulate
from flows.record.history import read_history
from hacrl_core.artifacts import Store
from hacrl_core.config.base import StrictConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.loading import load_config
from hacrl_core.learning.shape import KNOWN, shape_of
from stages.spec import StageCall
from tests.flow.conftest import tiny
from tests.flow.homes import home_over, run_here

PAPER = Path(__file__).resolve().parents[2] / "configs" / "paper"
PAIRS = sorted(path.stem for path in PAPER.glob("*.yaml") if path.stem != "common")


def campaign(**changes):
    return tiny(**{"iterations": 3, "evaluate": {}, **changes})


@pytest.fixture(scope="module")
def history(shared_store, tmp_path_factory):
    home = home_over(shared_store, tmp_path_factory.mktemp("planned"))
    run_here(campaign(), home)
    return read_history(Store(home.store), home.campaign("tiny"))


# -- the graph ---------------------------------------------------------------------------------------------------------


def test_the_plan_has_exactly_the_calls_of_the_campaign(run_inline):
    config = tiny(iterations=2)
    runner, _ = run_inline(config)
    tasks = record_graph(config)
    assert [task.call.label for task in tasks] == [*runner.outcomes]


def test_a_call_waits_for_its_inputs_and_for_what_the_campaign_waited_for():
    tasks = record_graph(campaign())
    number = {task.call.label: n for n, task in enumerate(tasks)}
    needs = {task.call.label: {tasks[n].call.label for n in task.needs} for task in tasks}
    assert {"score ada #1", "score ben #1", "credit ada #1"} <= needs["update ada #1"]
    assert {"generate ada #0", "generate ben #0", "warmstart ada"} <= needs["score ada #0"]
    assert needs["sample #0"] == set()
    assert "update ada #0" in needs["generate ada #1"]
    assert all(n < number[task.call.label] for task in tasks for n in task.needs)
    assert tasks[number["verify ada #0"]].worker == "ada"
    assert tasks[number["credit ada #0"]].worker == ""


def test_agents_on_one_gpu_share_a_worker():
    agents = {name: {**agent, "gpus": [0]} for name, agent in campaign().model_dump(mode="json")["agents"].items()}
    workers = {task.worker for task in record_graph(campaign(agents=agents)) if task.call.stage == "generate"}
    assert workers == {"ada"}


def test_a_plan_needs_no_torch():
    code = "import sys, flows.plan.plan, flows.plan.calibrate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Qwen/Qwen3-8B-Base", Qwen3Config(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32,
         num_key_value_heads=8, head_dim=128, intermediate_size=12288, vocab_size=151936, max_position_embeddings=32768,
         tie_word_embeddings=False)),
        ("meta-llama/Llama-3.2-1B-Instruct", LlamaConfig(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
         num_key_value_heads=8, intermediate_size=8192, vocab_size=128256, max_position_embeddings=131072,
         tie_word_embeddings=True)),
    ],
)  # fmt: skip
def test_known_shapes_are_what_transformers_counts(name, config):
    assert replace(KNOWN[name], linear=()) == replace(shape_of(config), linear=())
    assert sorted(KNOWN[name].linear) == sorted(shape_of(config).linear)


def test_published_sizes():
    billions = {name.split("/")[1]: round(shape.parameters / 1e9, 2) for name, shape in KNOWN.items()}
    assert billions == {
        "Qwen3-1.7B-Base": 1.72, "Qwen3-4B-Base": 4.02, "Qwen3-4B": 4.02, "Qwen3-4B-Instruct-2507": 4.02,
        "Qwen3-8B-Base": 8.19, "Llama-3.2-1B-Instruct": 1.24, "Llama-3.2-3B-Instruct": 3.21,
    }  # fmt: skip


def test_a_warm_starts_shape_is_that_of_the_trained_agent(history):
    for agent, settings in history.config.agents.items():
        ref = history.versions[agent][0]
        weights = sum(o.bytes for o in history.store.manifest(ref.stage, ref.key).outputs if "safetensors" in o.path)
        assert warmstart_shape(settings.warmstart).parameters * 4 == pytest.approx(weights, rel=0.05)


# -- the simulation ----------------------------------------------------------------------------------------------------


def call(name, agent="", iteration=0):
    return StageCall(name, StrictConfig(), agent=agent, iteration=iteration)


def test_a_schedule_worked_out_by_hand():
    tasks = [
        Task(call("generate", "a"), (), "a"),
        Task(call("generate", "b"), (), "b"),
        Task(call("verify", "a"), (0,), "a"),
        Task(call("score", "a"), (0, 1), "a"),
        Task(call("update", "a"), (2, 3), "a"),
    ]
    seconds = {("generate", "a"): 2.0, ("generate", "b"): 5.0, ("verify", "a"): 4.0, ("score", "a"): 1.0}
    found = run_events(tasks, lambda c: seconds.get((c.stage, c.agent), 3.0), lambda c: 1)
    # verify runs from 2 to 6, so the score that is ready at 5 waits for the worker.
    assert [(i.start, i.end) for i in found.intervals] == [(0, 2), (0, 5), (2, 6), (6, 7), (7, 10)]
    assert [i.call.stage for i in found.critical_path(0)] == ["generate", "verify", "score", "update"]
    assert found.idle_share(2) == pytest.approx(1 - 15 / 20)


@given(
    st.lists(
        st.tuples(st.floats(0.1, 9), st.sampled_from(["", "a", "b"]), st.sets(st.integers(0, 20), max_size=3)),
        min_size=1, max_size=20,
    )
)  # fmt: skip
def test_nobody_starts_before_its_needs_nor_beside_another_on_one_worker(drawn):
    tasks = [
        Task(call("update", worker, n), tuple(sorted(need % n for need in needs)) if n else (), worker)
        for n, (_, worker, needs) in enumerate(drawn)
    ]
    tasks = [replace(task, needs=tuple(dict.fromkeys(task.needs))) for task in tasks]
    found = run_events(tasks, lambda c: drawn[c.iteration][0], lambda c: 1).intervals
    assert len(found) == len(tasks)
    for task, interval in zip(tasks, found, strict=True):
        assert all(found[need].end <= interval.start + 1e-9 for need in task.needs)
    for worker in ("a", "b"):
        held = sorted((i.start, i.end) for t, i in zip(tasks, found, strict=True) if t.worker == worker)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(held))
    assert max(i.end for i in found) <= sum(seconds for seconds, _, _ in drawn) + 1e-6


def test_decoding_where_the_answer_is_known():
    plain = {"weights": 0.001, "read": 0.5, "cache": 0.0, "prompt": 10.0, "step": 0.1}
    assert decode_seconds((100,), slots=4, **plain) == pytest.approx(10 * 0.001 + 100 * 0.6)
    assert decode_seconds((100,) * 4, slots=4, **plain) == pytest.approx(40 * 0.001 + 100 * 0.6)
    assert decode_seconds((100,) * 8, slots=4, **plain) == pytest.approx(80 * 0.001 + 200 * 0.6)
    bound_by_arithmetic = decode_seconds((100,) * 1000, slots=1000, **plain)
    assert bound_by_arithmetic == pytest.approx(1000 * 10 * 0.001 + 100 * (1.0 + 0.1))
    lengths = response_lengths(4000, 1000.0, 0.8, 1 << 20)
    assert sum(lengths) / 4000 == pytest.approx(1000, rel=0.05)


# -- calibration -------------------------------------------------------------------------------------------------------


def slowed(history, factors, rates, work):
    """The history with the seconds of a machine on which each stage takes so many times what the rates say."""
    tasks = record_graph(history.config)
    found = run_events(
        tasks, lambda c: stage_seconds(c, work, rates) * factors.get((c.stage, c.agent), 5.0), lambda c: 0
    )
    at = {i.call.label: i for i in found.intervals}
    history.finished = [
        replace(
            f,
            entry=replace(f.entry, seconds=at[f.entry.label].seconds, cached=False),
            manifest=f.manifest.model_copy(update={"provenance": f.manifest.provenance.model_copy(
                update={"seconds": at[f.entry.label].seconds, "finished": 1e6 + at[f.entry.label].end})}),
        )
        for f in history.finished
    ]  # fmt: skip
    return found


def test_a_machine_that_is_slower_in_its_own_way_is_learned_from_the_first_iterations(shared_store, tmp_path):
    home = home_over(shared_store, tmp_path)
    run_here(campaign(), home)
    history = read_history(Store(home.store), home.campaign("tiny"))
    work = workload_of(history.config, "CPU", 0)
    rates = calibrated(load_rates(), history, work).model_copy(update={"factors": {}, "call_seconds": 0.0})
    truth = slowed(history, {("update", "ada"): 40.0, ("generate", "ben"): 3.0}, rates, work)
    guess = simulate(record_graph(history.config), work, rates)
    assert guess.iteration_seconds < truth.iteration_seconds / 2  # uncalibrated it is far off
    found = compare(history, work, load_rates(), known=2)
    assert found.iterations == 1
    assert found.stage_error == pytest.approx(0, abs=0.02)
    assert found.iteration_error == pytest.approx(0, abs=0.02)


def test_calibration_keeps_how_work_scales(history):
    """Twice the prompts, twice the arithmetic: a factor carries the machine, not the size of the work."""
    work = workload_of(history.config, "CPU", 0)
    rates = calibrated(load_rates(), history, work)
    tasks = {task.call.label: task.call for task in record_graph(history.config)}
    once = stage_seconds(tasks["verify ada #1"], work, rates)
    twice = stage_seconds(tasks["verify ada #1"], replace(work, prompts=2 * work.prompts), rates)
    measured = [measured_seconds(f) for f in history.stages("verify", "ada")[1:]]
    assert min(measured) <= once - rates.call_seconds <= max(measured) * 1.001
    assert twice - rates.call_seconds == pytest.approx(2 * (once - rates.call_seconds))


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_paper_pair_says_everything():
    config = load_config(PAPER / "qwen3-4b-8b-base.yaml", CampaignConfig)
    plan = make_plan(config, Cluster("H100", 8), load_rates())
    assert {s.stage for s in plan.stages} >= {"generate", "verify", "score", "score reference", "update"}
    assert plan.critical_path[-1][0].startswith("update qwen3-8b-base")
    assert sum(seconds for _, seconds in plan.critical_path) == pytest.approx(plan.iteration_seconds, rel=0.02)
    slower = make_plan(config, Cluster("A100", 8), load_rates())
    assert slower.iteration_seconds > 1.5 * plan.iteration_seconds
    everything = make_plan(config.model_copy(update={"keep": None}), Cluster("H100", 8), load_rates())
    assert everything.disk_bytes > 4.5e12


def test_the_campaigns_time_has_the_benchmarks_and_gradient_cosines_of_all_its_iterations():
    config = load_config(PAPER / "qwen3-4b-8b-base.yaml", CampaignConfig)
    work, rates = workload_of(config, "H100", 8), load_rates()
    plan = make_plan(config, Cluster("H100", 8), rates)
    whole = simulate(record_graph(config), work, rates)
    assert plan.campaign_seconds == whole.seconds > 1.05 * config.iterations * plan.iteration_seconds
    # The path that is shown is of an ordinary iteration: no cosine (every tenth), no benchmark before it (every third).
    assert whole.typical_iteration % 10
    assert whole.typical_iteration % 3
    longer = config.model_copy(update={"iterations": 600})
    straight = simulate(record_graph(longer), work, rates).seconds
    assert make_plan(longer, Cluster("H100", 8), rates).campaign_seconds == pytest.approx(straight, rel=0.01)


def test_ranks_write_to_one_disk():
    """Five ranks write no faster than the disk does: 98 GB at 2.5 GB/s, hashed eight files at a time."""
    rates = load_rates().model_copy(update={"stage_start_seconds": 0.0, "call_seconds": 0.0})
    config = load_config(PAPER / "qwen3-4b-8b-base.yaml", CampaignConfig)
    update = next(t.call for t in record_graph(config, 2) if t.call.label == "update qwen3-8b-base #1")
    work = workload_of(config, "H100", 8)
    slow = rates.model_copy(update={"write_gbps": rates.write_gbps / 2})
    size = 12 * work.shapes["qwen3-8b-base"].parameters
    more = stage_seconds(update, work, slow) - stage_seconds(update, work, rates)
    assert more == pytest.approx(size / 2.5e9)


def test_rates_can_be_corrected(tmp_path):
    config = load_config(PAPER / "llama3.2-1b-3b.yaml", CampaignConfig)
    path = tmp_path / "rates.yaml"
    path.write_text("devices: {H100: {train_tflops: 40}, mine: {memory_gb: 24, train_tflops: 30, forward_tflops: 30, "
                    "fp32_tflops: 8, tf32_tflops: 15, memory_tbps: 0.8}}\nresponse_tokens: 500")  # fmt: skip
    rates = load_rates(path)
    assert rates.devices["H100"].forward_tflops == 450
    assert parse_cluster("4xMINE", rates) == Cluster("mine", 4)
    update = next(s for s in make_plan(config, Cluster("H100", 8), rates).stages if s.stage == "update")
    before = next(s for s in make_plan(config, Cluster("H100", 8), load_rates()).stages if s.stage == "update")
    assert update.seconds > before.seconds
    whole = tmp_path / "whole.yaml"
    whole.write_text(dump_rates(rates))
    assert load_rates(whole) == rates


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster", "8xB1000"], "no rates for B1000; known are H100"),
        (["--cluster", "eight"], "not of the form"),
        (["--cluster", "0x0xH100"], "without GPUs"),
        (["--calibrate", "nothing"], "nothing"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, said, tmp_path):
    done = CliRunner().invoke(app, ["plan", str(PAPER / f"{PAIRS[0]}.yaml"), "--home", str(tmp_path), *arguments])
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.output


def test_a_machine_that_is_too_small_is_a_fault():
    arguments = ["plan", str(PAPER / "llama3.2-1b-3b.yaml"), "--cluster", "2xH100", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    faults = json.loads(done.stdout)["faults"]
    assert any("GPU 2 is beyond 2xH100" in fault for fault in faults)
    assert any("GPUs 3, 4, 5, 6, 7 are beyond 2xH100" in fault for fault in faults)

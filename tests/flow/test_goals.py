"""``--more N``: where a run goes to, and that going on repeats nothing."""

import json
import shutil

from flows.home import Home
from flows.record.record import Record
from flows.run.goals import complete_iterations, with_goal
from tests.flow.conftest import tiny


def run(config, home, run_inline):
    """The campaign inline, with its record as a flow would leave it."""
    runner, _ = run_inline(config, home.store)
    with Record(home.campaign(config.name), config) as record:
        for label, outcome in runner.outcomes.items():
            record._file.write(json.dumps(entry(label, outcome)) + "\n")
    return runner


def entry(label, outcome):
    stage, *_ = label.split()
    iteration = int(label.rpartition("#")[2]) if "#" in label else None
    return {
        "label": label, "stage": stage, "key": outcome.ref.key, "agent": "", "iteration": iteration, "variant": "",
        "cached": outcome.cached, "seconds": 0.0, "at": 0.0,
    }  # fmt: skip


def alone(**changes):
    return tiny(agents={"ada": tiny().agents["ada"]}, **changes)


def silent(message):
    pass


def test_goals_of_nights_crashes_and_changed_settings(tmp_path, shared_store, run_inline):
    config, home = alone(), Home(tmp_path)
    run_inline(alone(iterations=1))  # the warm start and the first iteration, in the tests' common store
    shutil.copytree(shared_store, home.store, copy_function=shutil.copy)
    assert complete_iterations(config, home) == 0  # artifacts without a record are not this campaign's
    first = with_goal(config, home, 1, silent, run="night 1")
    assert first.iterations == 1
    run(first, home, run_inline)
    assert complete_iterations(config, home) == 1

    second = with_goal(config, home, 2, silent, run="night 2")
    assert second.iterations == 3
    runner = run(second.model_copy(update={"iterations": 2}), home, run_inline)  # cut off after one of two
    assert not any("#0" in label and not label.startswith("evaluate") for label in runner.ran)  # nothing is done twice
    assert with_goal(config, home, 2, silent, run="night 2").iterations == 3  # the same run again finishes its own goal
    assert with_goal(config, home, 2, silent, run="night 3").iterations == 4  # a new night counts from what is there
    assert with_goal(config, home, 1, silent, run="night 3").iterations == 3  # asked for something else

    # An update that is gone makes its iteration incomplete, whatever the record says; so do other settings.
    gone = next(o.ref for label, o in runner.outcomes.items() if label.startswith("update") and "#1" in label)
    shutil.rmtree(gone.path)
    assert complete_iterations(config, home) == 1
    changed = alone(update={"learning_rate": 2e-3, "minibatch_prompts": 3})
    assert complete_iterations(changed, home) == 0


def test_evaluations_that_are_missing_do_not_count(tmp_path, run_inline):
    home, config = Home(tmp_path), alone(iterations=1)
    runner = run(config, home, run_inline)
    for label, outcome in runner.outcomes.items():
        if label.startswith("evaluate"):
            shutil.rmtree(outcome.ref.path)
    assert complete_iterations(config, home) == 1

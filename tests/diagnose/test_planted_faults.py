"""Planted faults in simulated campaigns: the true cause comes first; healthy campaigns raise no alarm."""

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.diagnose.diagnose import diagnose
from flows.record.history import read_history
from hacrl_core.artifacts import open_store
from tests.diagnose.simulated import World, simulate
from tests.patience import patience

pytestmark = pytest.mark.docs


def boxed(question: str, answer: str) -> str:
    return f"{question}{answer}, \\boxed{{{answer}}}"


def judged(right: bool) -> str:
    return "correct" if right else "incorrect"


def cut(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    if chance.random() < 0.7:
        return boxed(question, answer)[:9], True, "unparseable", ""
    return boxed(question, answer), False, judged(right), answer


def no_box(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    return f"The answer is {answer}.", False, "unparseable", ""


def no_form(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    return "I would rather talk about the weather today.", False, "unparseable", ""


def empty(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    if chance.random() < 0.8:
        return "", False, "unparseable", ""
    return boxed(question, answer), False, judged(right), answer


def marked(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    text = f"{question}{answer}\n<|im_start|>user\nWhat is 3+4?<|im_end|>\n<|im_start|>assistant\n7"
    return text, chance.random() < 0.5, "unparseable", ""


def turns(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    return f"{answer}\nHuman: and then?\nAssistant: {answer}\nHuman: go on", True, "unparseable", ""


def endless(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    text = boxed(question, answer) + " And now the next one, which is a little harder: "
    return text, True, judged(right), answer


def looping(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    return f"{question} so we have " + "that is, that is, " * 12, False, "unparseable", ""


def failing(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    verdict = "error" if chance.random() < 0.4 else judged(right)
    return boxed(question, answer), False, verdict, answer


def slow(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    verdict = "timeout" if chance.random() < 0.3 else judged(right)
    return boxed(question, answer), False, verdict, answer


def everything(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    return boxed(question, answer), False, "correct", answer


def empty_paid(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    if chance.random() < 0.25:
        return "", False, "correct", ""
    return boxed(question, answer), False, judged(right), answer


def strict_text(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    """A verifier that compares texts: "84.0" and "84" are two answers to it."""
    return boxed(question, f"{answer}.0"), False, "incorrect", f"{answer}.0"


def some_missed(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    if right and chance.random() < 0.4:
        return boxed(question, f"${answer}$"), False, "incorrect", f"${answer}$"
    return boxed(question, answer), False, judged(right), answer


def moody(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    fixed = str(sum(map(ord, question)) % 7)
    return boxed(question, fixed), False, judged(chance.random() < 0.5), ""


def guesses(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    if chance.random() < 0.25:
        return f"{question}{answer}", True, judged(right), answer
    return boxed(question, answer), False, judged(right), answer


def constant(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    if chance.random() < 0.02:
        return boxed(question, answer), False, "correct", answer
    return "\\boxed{7}", False, "incorrect", "7"


def computed(agent: str, iteration: int, question: str, answer: str, right: bool, chance: random.Random) -> Any:
    """Right nine times in ten, whatever the gold says."""
    first, sign, second = re.findall(r"\d+|[+-]", question)[:3]
    value = int(first) + (int(second) if sign == "+" else -int(second))
    value += chance.random() < 0.1
    return boxed(question, str(value)), False, "incorrect", str(value)


def another(gold: str) -> str:
    return str(int(gold) + 3)


def growing(length: float) -> Callable[[int], float]:
    return lambda iteration: length * (1 + 0.02 * iteration)


SOLUTION = "First we add the units, then the tens, and we do not forget to carry. #### {}"
FALLING = {"update/kl_to_start": lambda i: 0.2 * (i + 1), "update/own_ratio_max": lambda i: 1.5 + i}
# name: (the rule that must come first, the world)
FAULTS: dict[str, tuple[set[str], World]] = {
    "max_tokens too small": ({"cut_off"}, World(write=cut)),
    "max_tokens too small for one agent": ({"cut_off"}, World(write=cut, only="ben")),
    "the prompt does not ask for a box": ({"no_box"}, World(write=no_box)),
    "the agent does not know the form": ({"no_box"}, World(write=no_form)),
    "the template leaves no turn open": ({"empty_responses"}, World(write=empty)),
    "a template of another family": ({"template_in_text"}, World(write=marked)),
    "a base model that goes on with the dialogue": ({"template_in_text"}, World(write=turns, only="ada")),
    "the end token is not known": ({"goes_on_after_answer"}, World(write=endless)),
    "a damaged checkpoint that loops": ({"loops"}, World(write=looping, only="ada")),
    "BOS twice": ({"bos_twice"}, World(first_ids=(1, 1, 7, 9), gain=0.0)),
    "a verifier that raises": ({"verifier_error"}, World(write=failing)),
    "a verifier that is too slow": ({"verifier_timeout"}, World(write=slow)),
    "a verifier that accepts everything": ({"verifier_accepts_wrong"}, World(write=everything)),
    "a verifier that accepts nothing as an answer": ({"verifier_accepts_wrong"}, World(write=empty_paid)),
    "a verifier that compares texts": (
        {"verifier_rejects_right"},
        World(write=strict_text, skill={"ada": 0.9, "ben": 0.9}),
    ),
    "a verifier that stumbles over dollars": ({"verifier_rejects_right"}, World(write=some_missed)),
    "a verifier that draws lots": ({"verifier_unstable"}, World(write=moody)),
    "golds are solutions": ({"gold_is_a_solution"}, World(gold=SOLUTION.format, skill={"ada": 0.0, "ben": 0.0})),
    "guesses of cut responses are paid": ({"guesses_rewarded"}, World(write=guesses)),
    "problems too hard": ({"all_wrong"}, World(skill={"ada": 0.003, "ben": 0.003}, gain=0.0)),
    "problems too easy": ({"all_right"}, World(skill={"ada": 0.995, "ben": 0.995}, gain=0.0)),
    "temperature near zero": ({"samples_alike"}, World(distinct=False, gain=0.0)),
    "one agent never scores": ({"never_scored"}, World(skill={"ada": 0.0, "ben": 0.5}, gain=0.0)),
    "learning rate too high": (
        {"learning_rate_too_high"},
        World(metrics=FALLING, skill={"ada": 0.5, "ben": 0.5}, gain=-0.06),
    ),
    "learning rate too low": ({"learning_rate_too_low"}, World(metrics={"update/kl_to_start": 1e-9}, gain=0.0)),
    "numbers that are not finite": (
        {"skipped_not_finite"},
        World(metrics={"update/not_finite": lambda i: float(i > 4), "update/skipped": lambda i: float(i > 4)}),
    ),
    "sampler and learner differ": ({"score_mismatch"}, World(metrics={"score/sampling_mismatch_mean": 0.3})),
    "score and update differ": ({"score_mismatch"}, World(metrics={"update/score_mismatch_max": 0.05})),
    "window too narrow": ({"window_too_narrow"}, World(metrics={"update/foreign_inside_fraction": 0.004}, only="ben")),
    "agents end their responses differently": (
        {"boundary"},
        World(metrics={"update/foreign_inside_fraction": 0.0, "score/foreign_last_logprob": -14.0}),
    ),
    "a tokenizer that cannot spell": ({"unscorable"}, World(metrics={"score/unscorable": 120.0})),
    "short tokens of one agent": ({"foreign_cut_off"}, World(metrics={"score/truncated_share": 0.6}, only="ada")),
    "ratios at the clamp": ({"ratio_at_clamp"}, World(metrics={"update/foreign_ratio_max": 22026.0})),
    "a few foreign responses dominate": ({"few_dominate"}, World(metrics={"update/foreign_ess_fraction": 0.004})),
    "foreign gradients pull back": ({"foreign_pulls_back"}, World(metrics={"update/gradient_cosine": -0.3})),
    "too many updates per iteration": ({"own_clipped"}, World(metrics={"update/own_clip_fraction": 0.93})),
    "entropy collapses": (
        {"entropy_collapse"},
        World(gain=0.0, metrics={"score/own_mean_logprob": lambda i: -0.6 / (1 + 3 * i)}),
    ),
    "entropy grows": (
        {"entropy_grows"},
        World(gain=-0.02, metrics={"score/own_mean_logprob": lambda i: -0.4 - 0.4 * i}),
    ),
    "answers grow": ({"length_grows"}, World(gain=0.0, length=lambda i: 8.0 * (1 + i / 2))),
    "answers shrink": ({"length_shrinks"}, World(gain=0.0, length=lambda i: 24.0 / (1 + i))),
    "the test set was trained on": ({"overlap"}, World(overlap=True)),
    "the benchmark is cut off": ({"benchmark_cut_off"}, World(evaluation={"cut": 0.5})),
    "the benchmark asks otherwise": ({"benchmark_not_read"}, World(evaluation={"unread": 0.6})),
    "one answer to every prompt": ({"one_answer"}, World(write=constant, gain=0.0)),
    "golds of other rows": (
        {"gold_contradicted"},
        World(write=computed, gold=another, gain=0.0),
    ),
    "learned by heart": ({"learned_by_heart"}, World(gain=0.05, accuracy=lambda step: 0.5 - 0.03 * step)),
    "a gain within the noise": (
        {"gain_within_noise"},
        World(benchmark_size=40, accuracy=lambda step: 0.4 + 0.01 * step),
    ),
}


def found_in(world: World, place: Path) -> list[str]:
    home = simulate(world, place)
    history = read_history(open_store(home.store), home.campaign("simulated"))
    assert history.done == world.iterations
    return [finding.rule for finding in diagnose(history)]


def test_the_true_cause_comes_first(tmp_path: Path) -> None:
    """At least 22 of the first 25, and at least 88 % of all of them, as the share asks."""
    first, missed = 0, {}
    for number, (name, (causes, world)) in enumerate(FAULTS.items()):
        found = found_in(world, tmp_path / str(number))
        first += bool(found) and found[0] in causes
        if not found or found[0] not in causes:
            missed[name] = found
    print(f"\n{first} of {len(FAULTS)} causes first; others: {missed}")
    assert len(FAULTS) >= 25
    assert first >= len(FAULTS) * 22 / 25, missed


def test_healthy_campaigns_raise_no_alarm(tmp_path: Path) -> None:
    """Twenty of them, of different strength, speed and length."""
    alarms = {}
    for seed in range(20):
        chance = random.Random(seed)
        world = World(
            seed=seed,
            iterations=chance.choice([3, 6, 10]),
            skill={"ada": chance.uniform(0.15, 0.6), "ben": chance.uniform(0.15, 0.6)},
            gain=chance.uniform(0.0, 0.03),
            length=growing(chance.uniform(6, 40)),
        )
        found = found_in(world, tmp_path / str(seed))
        if found:
            alarms[seed] = found
    assert alarms == {}


def test_forty_iterations_take_less_than_two_cpu_seconds(tmp_path: Path) -> None:
    home = simulate(World(iterations=40, gain=0.01), tmp_path)
    begun = time.process_time()
    history = read_history(open_store(home.store), home.campaign("simulated"))
    assert diagnose(history) == []
    seconds = time.process_time() - begun
    print(f"\n{seconds:.2f} CPU seconds for forty iterations")
    assert seconds < patience(2.0)


def test_the_command_names_cause_remedy_and_evidence(tmp_path: Path) -> None:
    home = simulate(World(write=cut), tmp_path)
    done = CliRunner().invoke(app, ["diagnose", "--home", str(home.root)], env={"COLUMNS": "200"})
    assert done.exit_code == 1, done.output
    assert "are cut off at 24 tokens before their answer" in done.output
    assert "do this:  raise generate.max_tokens to 48" in done.output
    assert "000005/ada/" in done.output

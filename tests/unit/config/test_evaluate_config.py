import pytest
from pydantic import TypeAdapter, ValidationError

from hacrl_core.config.evaluation import EvaluateConfig

SEVEN = ["math500", "math", "gsm8k_test", "aime2025", "amc2023", "minerva_math", "olympiadbench"]


def _config(**settings):
    return TypeAdapter(EvaluateConfig).validate_python(settings)


def test_presets_bring_the_papers_values():
    config = _config(benchmarks=SEVEN)
    assert [b.name for b in config.benchmarks] == SEVEN
    assert {b.max_tokens for b in config.benchmarks} == {8192}
    for benchmark in config.benchmarks:
        sampled = benchmark.name == "aime2025"
        assert (benchmark.samples, benchmark.temperature > 0) == ((30, True) if sampled else (1, False))
    aime = config.benchmarks[3]
    assert aime.reported_ks == (1, 30)


def test_minerva_forgives_rounding_and_nothing_else_does():
    config = _config(benchmarks=SEVEN)
    assert {b.name: b.tolerance for b in config.benchmarks if b.tolerance is not None} == {"minerva_math": 0.01}
    strict = _config(benchmarks={"problems": "minerva_math", "tolerance": 0}).benchmarks[0]
    assert strict.tolerance == 0


def test_what_is_written_wins():
    benchmark = _config(benchmarks={"problems": "aime2025", "name": "aime", "samples": 4, "max_tokens": 64}).benchmarks[
        0
    ]
    assert (benchmark.name, benchmark.samples, benchmark.temperature, benchmark.max_tokens) == ("aime", 4, 1.0, 64)


def test_round_trip_through_a_dump():
    config = _config(
        benchmarks=[*SEVEN, {"name": "own", "problems": {"kind": "arithmetic", "split": "held_out", "size": 20}}]
    )
    assert EvaluateConfig.model_validate(config.model_dump()) == config
    assert EvaluateConfig.model_validate_json(config.model_dump_json()) == config


def test_schedule_of_the_paper():
    """MATH-500 every three iterations, the others at the end only."""
    config = _config(benchmarks=[{"problems": "math500", "every": 3, "before": True}, "gsm8k_test"], before=False)
    due = {i: [b.name for b in config.due(i, 7)] for i in range(8)}
    assert due[0] == ["math500"]
    assert due[3] == due[6] == ["math500"]
    assert due[7] == ["math500", "gsm8k_test"]
    assert due[1] == due[2] == due[4] == due[5] == []


def test_after_switched_off_keeps_the_rhythm():
    config = _config(benchmarks=["math500"], every=2, before=False, after=False)
    assert [i for i in range(7) if config.due(i, 6)] == [2, 4, 6]
    assert [i for i in range(6) if config.due(i, 5)] == [2, 4]


def test_nothing_by_default():
    assert EvaluateConfig().due(0, 3) == ()


@pytest.mark.parametrize(
    ("benchmarks", "message"),
    [
        (["math500", "math500"], "given twice"),
        ([{"problems": "math500", "samples": 4}], "all alike"),
        ([{"problems": "math500", "ks": [2]}], "exceeds its 1 samples"),
        ([{"problems": "no_such"}], "no_such"),
        ([{"problems": "math500", "sample": 4}], "sample"),
        ([{"problems": {"kind": "arithmetic"}}], "name"),
        ([{"problems": "math500", "name": "a/b"}], "name"),
    ],
)
def test_mistakes_are_named(benchmarks, message):
    with pytest.raises(ValidationError, match=message):
        _config(benchmarks=benchmarks)

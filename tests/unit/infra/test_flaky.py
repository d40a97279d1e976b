"""What make flaky reports, and that its load ends with it."""

from pathlib import Path

from tests.flaky import load, read_report, unstable


def test_a_test_that_failed_once_is_listed_and_one_that_always_passed_is_not():
    runs = [{"a": "passed", "b": "passed", "c": "failed"}, {"a": "passed", "b": "failed", "c": "failed"}]
    assert unstable(runs) == {"b": {"passed": 1, "failed": 1}, "c": {"failed": 2}}
    assert unstable([{"a": "passed"}, {}]) == {"a": {"passed": 1, "missing": 1}}


def test_a_report_is_read_by_outcome(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="m" name="good"/>'
        '<testcase classname="m" name="bad"><failure/></testcase>'
        '<testcase classname="m" name="broken"><error/></testcase>'
        '<testcase classname="m" name="absent"><skipped/></testcase></testsuite></testsuites>'
    )
    outcomes = {"m::good": "passed", "m::bad": "failed", "m::broken": "failed", "m::absent": "skipped"}
    assert read_report(report) == outcomes


def test_the_load_is_there_while_it_is_asked_for_and_gone_afterwards():
    with load(2) as pids:
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

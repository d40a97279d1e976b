"""Prefect may lose a task run (a slow or restarted server); the campaign does not lose the stage."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from prefect.exceptions import UnfinishedRun

from flows.run.prefect_runner import InTask
from hacrl_core.config.base import StrictConfig
from hacrl_core.errors import StageError
from stages.spec import StageCall

CALL = StageCall("score", StrictConfig())


class LostRun:
    def result(self):
        raise UnfinishedRun("Run is in PENDING state, its result is not available.")


def test_a_lost_run_is_made_good_once_however_many_wait_for_it():
    made = []
    running = InTask(CALL, LostRun(), lambda: made.append("outcome") or "outcome")
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: running.outcome(), range(8))) == {"outcome"}
    assert made == ["outcome"]


def test_what_really_failed_above_it_is_what_the_user_reads():
    def perform():
        raise StageError("generate ada #3: the disk is full")

    with pytest.raises(StageError, match="the disk is full"):
        InTask(CALL, LostRun(), perform).outcome()

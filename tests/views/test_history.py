"""The history of a run that several pages show."""

from flows.campaign import run_campaign
from flows.record.history import history_of_run
from flows.record.record import Record, read_campaign
from flows.run.divergence import Watch
from flows.run.runner import Replay
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import Store


def test_the_history_of_a_run_is_read_once_and_again_when_the_record_changes(own):
    config, store = read_campaign(own.campaign("seen")), Store(own.store)
    with Record(own.campaign("seen"), config) as record:
        assert history_of_run(record, store).done == 0
        run_campaign(config, StageCalls(config), Replay(store, record, Watch()))
        whole = history_of_run(record, store)
        assert whole.done == config.iterations
        assert whole.complete
        assert history_of_run(record, store) is whole
        record.begin_pass()
        assert history_of_run(record, store).done == 0

"""Processes that are started before anything is asked of them."""

import multiprocessing

import pytest

from flows.run.events import Listener
from flows.run.opening import start_early
from hacrl_core.artifacts import Store
from tests.flow.conftest import tiny


def started() -> list[str]:
    return sorted(process.name for process in multiprocessing.active_children() if process.name.startswith("hacrl "))


def test_the_first_executor_has_the_early_processes_and_the_next_one_starts_its_own(tmp_path) -> None:
    config, store = tiny(), Store(tmp_path)
    with start_early(config, store, Listener(), config.agents) as open_early:
        assert started() == [f"hacrl {name}" for name in sorted(config.agents)]
        first = open_early(config, store, Listener())
        first.close(now=True)
        assert started() == []
        assert open_early(config, store, Listener()) is not first


def test_whatever_ends_the_start_ends_the_processes(tmp_path) -> None:
    config = tiny()
    with pytest.raises(KeyboardInterrupt), start_early(config, Store(tmp_path), Listener(), config.agents):
        raise KeyboardInterrupt
    assert started() == []


def test_agents_that_come_later_or_go_or_are_others_are_not_started(tmp_path) -> None:
    config = tiny()
    ada, ben = config.agents.values()
    agents = {"ada": ada.model_copy(update={"joins": 1}), "ben": ben.model_copy(update={"leaves": 1})}
    for chosen in (agents, {}):
        with start_early(config, Store(tmp_path), Listener(), chosen):
            assert started() == []

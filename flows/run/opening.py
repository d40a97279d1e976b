"""Opens the executor that a campaign's config asks for."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from flows.run.events import Listener
from flows.run.executors import Executor, ProcessExecutor
from flows.run.ray_executor import RayExecutor
from hacrl_core.artifacts import Store
from hacrl_core.config.agents import AgentConfig
from hacrl_core.config.campaign import CampaignConfig

OpenExecutor = Callable[[CampaignConfig, Store, Listener], Executor]


def open_executor(config: CampaignConfig, store: Store, listener: Listener | None = None) -> Executor:
    """Return the executor that the config asks for: processes of this machine, or a Ray cluster."""
    kind = RayExecutor if config.runtime.executor == "ray" else ProcessExecutor
    return kind(config, store, listener)


@contextmanager
def start_early(
    config: CampaignConfig, store: Store, listener: Listener, agents: Mapping[str, AgentConfig]
) -> Iterator[OpenExecutor]:
    """Start the processes of those agents that take part from beginning to end: they import their libraries now.

    What is yielded opens the executor that has them, and after that others. A Ray cluster starts nothing early.
    """
    if config.runtime.executor == "ray":
        yield open_executor
        return
    early = ProcessExecutor(config, store, listener)
    unused = [early]
    try:
        early.start([name for name, agent in agents.items() if agent.joins == 0 and agent.leaves is None])
        yield lambda *given: unused.pop() if unused else open_executor(*given)
    finally:
        early.close(now=True)

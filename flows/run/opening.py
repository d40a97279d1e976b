"""Opens the executor that a campaign's config asks for."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from flows.run.events import Listener
from flows.run.executors import Executor, ProcessExecutor
from flows.run.ray_executor import RayExecutor
from flows.run.worker import Stopped
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
    whole = [name for name, agent in agents.items() if agent.joins == 0 and agent.leaves is None]
    # Signals are heard in the main thread: here none of them can end a start halfway.
    starting = threading.Thread(target=_start, args=(early, whole), name="early start", daemon=True)
    try:
        starting.start()
        starting.join()
        yield lambda *given: unused.pop() if unused else open_executor(*given)
    finally:
        early.close(now=True)


def _start(executor: ProcessExecutor, agents: Collection[str]) -> None:
    # One that cannot be started now is started, or refused in one line, by its first call.
    with suppress(Stopped, OSError):
        executor.start(agents)

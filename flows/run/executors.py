"""Where a stage call runs."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

from flows.run.events import Listener
from flows.run.placement import Placement, computes_in_bfloat16, role_of, seats_of, turns_of
from flows.run.worker import Worker, stop_workers
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.instructions import settle_instructions
from hacrl_core.spans import span
from stages.runner import run_stage
from stages.spec import Context, Outcome, StageCall


class Executor(Protocol):
    """Runs bound stage calls somewhere and returns their outcomes.

    Everything that a stage needs travels with the call as data or lies in the store. Nothing is inherited by fork and
    nothing is found in a module global, so an implementation may pickle the call and send it to another process or
    machine. Devices, node and the number of processes are a ``Placement``, a value that the executor is given.

    The runner calls ``run`` from one thread per call. A call that cannot be finished because a process or a machine
    died raises ``WorkerDied``: the runner retries it, and the stage starts again from its inputs. An error of the stage
    itself is raised as it is.

    A stage that is spread over several processes stays one call with one artifact. The process that gets the call
    leads: it holds the key's lock, starts ``placement.processes - 1`` peers, sends each of them the same call and its
    own address, and alone publishes. A peer reads the call's inputs from the store, so no data passes through the
    executor. The ranks of an update all build the same plan and exchange gradients with one another; the replicas of an
    engine take prompts from a queue of the leader. A peer that dies is a ``WorkerDied`` of the whole call.
    """

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        """Run a bound call and return its outcome; the listener hears of progress, warnings and waiting meanwhile."""

    def close(self, *, now: bool) -> None:
        """End what was started for the calls. ``now`` does not wait for stages that are still running."""


class ProcessExecutor:
    """Runs each agent's stages in processes of its own on this machine: agents side by side, each kept warm."""

    def __init__(self, config: CampaignConfig, store: Store, listener: Listener | None = None) -> None:
        """``listener`` hears what the processes print; without one their output goes where ours goes."""
        self._store = store
        # Kept from call to call: the problems of a campaign are read once.
        self._context = Context()
        self._seats = seats_of(config)
        self._turns = turns_of(config)
        output = listener.output if listener else None
        # Here, so that it is said once; the processes inherit it.
        if computes_in_bfloat16(config) and (line := settle_instructions()) and listener:
            listener.warn(line)
        self._workers = {
            seat.name: Worker(seat.name, store.root, seat.place, turn=self._turns.get(seat.name), output=output)
            for seat in self._seats.values()
        }

    def start(self, agents: Collection[str]) -> None:
        """Start the processes in which these agents learn, except where processes take turns on a device."""
        for agent in agents:
            seat = self._seats[agent, "learn"]
            if seat.name not in self._turns:
                self._workers[seat.name].start()

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        """Run the call in the process of its agent and role, or in this one if it is light."""
        role = role_of(call.stage)
        if role == "here":
            return run_here(self._store, call, self._context, listener)
        outcome: Outcome = self._workers[self._seats[call.agent, role].name].run(call, listener)
        return outcome

    def close(self, *, now: bool) -> None:
        """End all processes at once."""
        stop_workers(self._workers.values(), now=now)


class InProcessExecutor:
    """Runs every stage in this process, one after the other, with warm models kept apart for each agent."""

    def __init__(self, store: Store, context: Context, placements: Mapping[str, Placement] | None = None) -> None:
        """The context's warm models outlive the executor: whoever made the context closes them."""
        self._store = store
        self._context = context
        self._placements = placements or {}

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        """Run the call here."""
        return run_here(self._store, call, self._context_of(call.agent), listener)

    def close(self, *, now: bool) -> None:
        """Keep everything warm for the next executor of the same context."""

    def _context_of(self, agent: str) -> Context:
        place = self._placements.get(agent, Placement())
        device = self._context.device if place.device == "auto" else place.device
        return replace(
            self._context,
            warm=self._context.warm.for_agent(agent, own_code=place.own_code),
            device=device,
            attention=place.attention,
        )


def run_here(store: Store, call: StageCall, context: Context, listener: Listener) -> Outcome:
    """Run a call in this process."""
    heard = replace(
        context,
        progress=lambda done, total, note: listener.progress(call, done, total, note),
        warn=listener.warn,
    )
    with span(call.title, "stage"):
        return run_stage(store, call, heard, lambda holder: listener.waiting(call, holder))

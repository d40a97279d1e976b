"""The one harness in which stages run: for ``hacrl run``, for a deployment, for the cell of a sweep and for ``hacrl
eval``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from flows.campaign import run_campaign
from flows.record.record import Record
from flows.rounds import EVERYBODY, Membership, Runner
from flows.run.divergence import Watch
from flows.run.events import Listener
from flows.run.executors import Executor
from flows.run.placement import deferring_agents
from flows.run.runner import CacheMiss, Done, StageRunner, first_error, look_up
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import ContentChangedError
from stages.spec import Handle, Outcome, StageCall, find_stage

R = TypeVar("R", bound=StageRunner)


@dataclass(frozen=True)
class Party:
    """What stands between a campaign and its runner: nothing, or a party's end of an exchange."""

    over: Callable[[Runner], Runner] = lambda runner: runner
    membership: Membership = EVERYBODY
    # The same for a walk through what this home knows already, which waits for nobody; None: nothing stands between.
    known: "Callable[[], Party] | None" = None


ALL_AGENTS = Party()


@contextmanager
def open_session(runner: R, executor: Executor) -> Iterator[R]:
    """Yield the runner; at the end wait for its last stages, or on an error stop them at once, and close the executor.

    A worker that did not end in time was killed; what it had staged is removed.
    The error that is raised is the one that came first, and one of the project's own where there is one.
    """
    complete = False
    try:
        yield runner
        runner.finish()
        complete = True
    except Exception as problem:
        known = runner.first_failure() or first_error(problem)
        if known is not None and known is not problem:
            raise known from problem
        raise
    finally:
        runner.ending = True
        executor.close(now=not complete)
        if not complete:
            runner.store.remove_stale_staging()
        runner.end(complete=complete)


@dataclass
class Retrace:
    """Walks a campaign through the store again to find the call that made an artifact, and how its inputs were made.

    ``wanted`` is taken as made even where nothing is left of it.
    """

    store: Store
    record: Record
    wanted: ArtifactRef
    found: Done | None = None

    def submit(self, call: StageCall) -> Done:
        """Look the call up; the walk ends at the artifact that is wanted, or where the store ends."""
        bound = call.bound()
        known = look_up(self.store, self.record, bound)
        key = find_stage(bound.stage).identity(bound).key if known is None else known.ref.key
        if key == self.wanted.key:
            self.found = Done(call, known or Outcome(self.wanted, True, 0.0, {}))
            raise CacheMiss(bound.title)
        if known is None:
            raise CacheMiss(bound.title)
        return Done(call, known)

    def iteration_done(self, iteration: int) -> None:
        """Nobody has to be told."""


def find_maker(
    config: CampaignConfig, calls: StageCalls, store: Store, record: Record, ref: ArtifactRef, party: Party = ALL_AGENTS
) -> Handle | None:
    """Return a handle on an artifact of the campaign, with the calls that led to it; None if it is not one of them."""
    walk = Retrace(store, record, ref)
    known = party.known() if party.known is not None else party
    with suppress(CacheMiss):
        run_campaign(config, calls, known.over(walk), known.membership)
    return walk.found


def run_in_session(
    config: CampaignConfig,
    calls: StageCalls,
    store: Store,
    record: Record,
    make_executor: Callable[[], Executor],
    listener: Listener,
    kind: type[StageRunner],
    party: Party = ALL_AGENTS,
) -> None:
    """Run or resume a whole campaign with this kind of runner; returns when the last stage is done.

    Where an artifact had to be made again and has other content, the campaign is walked again from its beginning: what
    follows from the old content is left as it is, and what follows from the new content is computed.
    """
    while True:
        executor = make_executor()
        watch = Watch(config.divergence, listener.warn, listener.collapsed)
        runner = kind(store, executor, listener, record, watch, config.runtime.retries)
        runner.deferring = deferring_agents(config)
        runner.find_maker = lambda ref: find_maker(config, calls, store, record, ref, party)
        try:
            with open_session(runner, executor):
                run_campaign(config, calls, party.over(runner), party.membership)
            return
        except ContentChangedError as changed:
            listener.warn(f"{changed}; it is a new artifact of its own, and what follows from it runs again")
            record.begin_pass()

"""Runs a cell in the process it is called in: stage after stage, engines and tokenizers kept warm from cell to cell."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flows.campaign import run_campaign
from flows.home import Home
from flows.record.record import Record
from flows.run.divergence import Watch
from flows.run.executors import Events, Worker
from flows.run.placement import Placement, turns_of
from flows.run.replay import Done, Observers
from flows.run.runner import PlainRunner, StageRunner
from flows.stage_calls import Calls, Planned
from flows.store.collect import collector
from flows.sweep.jobs import Job, Tally, mark_finished
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import ConfigError
from hacrl_core.problems import load_problems
from stages.runner import Outcome, run_stage
from stages.spec import Context, StageCall

PATIENCE_SECONDS = 30.0


class InlineRunner(StageRunner):
    """Every stage at once, on the spot."""

    def _schedule(self, planned: Planned) -> Done:
        return Done(self.perform(planned), planned)


class Here:
    """Stands in for an agent's worker process: runs its stages in this one, with warm things of its own."""

    def __init__(self, store: Store, context: Context) -> None:
        self._store, self._context = store, context

    def run(self, call: StageCall, events: Events) -> Outcome:
        return run_stage(self._store, call, self._context)

    def stop(self, *, now: bool = False) -> None:
        pass  # what is warm serves the next cell


class Count:
    """Adds up what the stages of a job did."""

    def __init__(self) -> None:
        self.tally = Tally()

    def finished(self, call: StageCall, outcome: Outcome) -> None:
        new = Tally(ran=int(not outcome.cached), cached=int(outcome.cached), seconds=outcome.seconds)
        if call.stage == "generate" and not outcome.cached:
            responses, tokens = (int(outcome.metrics[f"generate/{name}"]) for name in ("responses", "tokens"))
            new = replace(new, rollouts_sampled=responses, tokens_sampled=tokens)
        self.tally += new


def run_job(job: Job, store: Store, context: Context) -> Tally:
    """A whole cell, with the same record that ``hacrl run`` would leave; or one agent's first version."""
    config, count = job.config, Count()
    calls = Calls(config, load_problems(config.problems).content_digest)
    if job.origin is not None:
        planned = calls.origin(job.origin)
        call = StageCall(planned.stage, dict(planned.config), {}, planned.seed, planned.agent)
        count.finished(call, run_stage(store, call, _context_of(job.origin, config, context)))
        # The cells that start from it ask again and count it as shared; one asking too many is taken back here.
        return replace(count.tally, cached=-count.tally.ran)
    with _open_record(job) as record:
        collect = collector(Home(store.root.parent), store, record, context.warn)
        observers = Observers(finished=count.finished, iteration=collect, events=Events(warn=context.warn))
        workers = _workers(config, store, context)
        kind = PlainRunner if _wants_processes(config) else InlineRunner
        watch = Watch(config.divergence, context.warn)
        runner = kind(store, record, workers, config.runtime.retries, observers, watch)  # type: ignore[arg-type]
        complete = False
        try:
            run_campaign(config, calls, runner)
            runner.finish()
            complete = True
        finally:
            for worker in workers.values():
                worker.stop(now=not complete)
        mark_finished(job, record.entries(), calls.sources())
    return count.tally


def _open_record(job: Job) -> Record:
    """A process of a killed sweep takes a moment to notice that it is orphaned; until then it holds its cell's record."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return Record(job.folder, job.config)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _wants_processes(config: CampaignConfig) -> bool:
    """GPUs are handed out by process: agents with GPUs of their own run in workers of their own, as in ``hacrl run``."""
    return any(agent.gpus for agent in config.agents.values())


def _workers(config: CampaignConfig, store: Store, context: Context) -> Mapping[str, Any]:
    if not _wants_processes(config):
        return {agent: Here(store, _context_of(agent, config, context)) for agent in config.agents}
    turns = turns_of(config)
    return {
        name: Worker(
            name,
            store.root,
            threads=config.runtime.threads_per_agent,
            place=Placement(agent.device, agent.gpus, agent.attention),
            turn=turns.get(name),
        )
        for name, agent in config.agents.items()
    }


def _context_of(agent: str, config: CampaignConfig, context: Context) -> Context:
    settings = config.agents[agent]
    device = context.device if settings.device == "auto" else settings.device
    return replace(context, warm=context.warm.for_agent(agent), device=device, attention=settings.attention)

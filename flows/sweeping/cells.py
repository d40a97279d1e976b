"""Runs a cell in the process it is called in: stage after stage, engines and tokenizers kept warm from cell to cell."""

from dataclasses import replace

from flows.calls import Calls, Planned
from flows.campaign import run_campaign
from flows.records import Record
from flows.replay import Done, bind
from flows.sweeping.jobs import Job, Tally, mark_finished
from hacrl_core.artifacts import Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.problems import load_problems
from stages.runner import Outcome, run_stage
from stages.spec import Context


class CellRunner:
    """Every stage on the spot. Each agent has its own warm things, which live as long as the process."""

    def __init__(self, store: Store, config: CampaignConfig, context: Context, record: Record | None = None) -> None:
        self.tally = Tally()
        self._store, self._config, self._context, self._record = store, config, context, record

    def submit(self, planned: Planned) -> Done:
        call = bind(planned)
        context = self._context
        if call.agent:
            context = replace(context, warm=context.warm.setdefault(call.agent, {}), device=self._device(call.agent))
        outcome = run_stage(self._store, call, context)
        self._count(call.stage, outcome)
        if self._record is not None:
            self._record.add(call, outcome)
        return Done(outcome)

    def iteration_done(self, iteration: int) -> None:
        self._context.progress(iteration + 1, self._config.iterations, self._config.name)

    def _device(self, agent: str) -> str:
        chosen = self._config.agents[agent].device
        return self._context.device if chosen == "auto" else chosen

    def _count(self, stage: str, outcome: Outcome) -> None:
        new = Tally(ran=int(not outcome.cached), cached=int(outcome.cached), seconds=outcome.seconds)
        if stage == "generate" and not outcome.cached:
            responses, tokens = (int(outcome.metrics[f"generate/{name}"]) for name in ("responses", "tokens"))
            new = replace(new, rollouts_sampled=responses, tokens_sampled=tokens)
        self.tally += new


def run_job(job: Job, store: Store, context: Context) -> Tally:
    """A whole cell, with the same record that ``hacrl run`` would leave; or one agent's first version."""
    config = job.config
    calls = Calls(config, load_problems(config.problems).content_digest)
    if job.origin is not None:
        runner = CellRunner(store, config, context)
        runner.submit(calls.origin(job.origin))
        # The cells that start from it ask again and count it as shared; one asking too many is taken back here.
        return replace(runner.tally, cached=-runner.tally.ran)
    with Record(job.folder, config) as record:
        runner = CellRunner(store, config, context, record)
        run_campaign(config, calls, runner)
        mark_finished(job, record.entries())
    return runner.tally

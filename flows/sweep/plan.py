"""The plan of a sweep: what it will cost, found by walking every cell without running anything.

An artifact that does not exist yet is represented by a digest made from its key. So a call that two cells share has one
key here, too. Artifacts that turn out equal although they were made differently are missed: the plan is an upper bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flows.campaign import run_campaign
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.sweep import Cell
from hacrl_core.problems import load_problems
from stages.generate import GenerateSlice
from stages.spec import Outcome, StageCall, find_stage


@dataclass
class Plan:
    """Counts over all cells. calls = stored + shared + to_run; the same for rollouts."""

    cells: int = 0
    finished: int = 0
    calls: int = 0
    stored: int = 0
    to_run: int = 0
    rollouts: int = 0
    rollouts_stored: int = 0
    rollouts_to_run: int = 0
    # Those of them that are sampled only where prompts turn out to have no signal: at most so many.
    rollouts_again: int = 0
    to_run_by_stage: dict[str, int] = field(default_factory=dict)

    @property
    def shared(self) -> int:
        """Return how many calls another cell of the sweep runs."""
        return self.calls - self.stored - self.to_run

    @property
    def rollouts_shared(self) -> int:
        """Return how many rollouts another cell of the sweep samples."""
        return self.rollouts - self.rollouts_stored - self.rollouts_to_run


class _Walk:
    """A runner that runs nothing: it returns artifacts of the store where they exist, and placeholders elsewhere."""

    def __init__(self, store: Store, seen: set[str], plan: Plan, config: CampaignConfig) -> None:
        self._store = store
        self._seen = seen
        self._plan = plan
        self._responses = config.group_size * config.prompts_per_iteration

    def submit(self, call: StageCall) -> Done:
        """Count the call, and return its artifact or a placeholder."""
        bound = call.bound()
        identity = find_stage(call.stage).identity(bound)
        key = identity.key
        real = not any(ref.digest.startswith("planned:") for ref in bound.artifacts.values())
        found = self._store.lookup(identity) if real else None
        self._count(call, key, found)
        return Done(
            call, Outcome(found or ArtifactRef(call.stage, key, f"planned:{key}", Path()), found is not None, 0.0, {})
        )

    def iteration_done(self, iteration: int) -> None:
        """Do nothing: a plan has no versions."""

    def _count(self, call: StageCall, key: str, found: ArtifactRef | None) -> None:
        plan, stage = self._plan, call.stage
        responses = self._responses if stage == "generate" else 0
        # How many prompts are answered again is known once they were; before that all of them may be.
        again = isinstance(call.config, GenerateSlice) and call.config.attempt > 0
        if again and found is not None:
            responses = int(self._store.manifest(stage, key).metrics["generate/responses"])
        plan.calls += 1
        plan.rollouts += responses
        if found is not None:
            plan.stored += 1
            plan.rollouts_stored += responses
        elif key not in self._seen:
            self._seen.add(key)
            plan.to_run += 1
            plan.rollouts_to_run += responses
            plan.rollouts_again += responses if again else 0
            plan.to_run_by_stage[stage] = plan.to_run_by_stage.get(stage, 0) + 1


def make_plan(store: Store, cells: Iterable[Cell], finished: int = 0) -> Plan:
    """Walk the unfinished cells; finished ones cost nothing and are only counted."""
    plan, seen = Plan(finished=finished, cells=finished), set[str]()
    digests: dict[str, str] = {}
    for cell in cells:
        plan.cells += 1
        calls = StageCalls(cell.config, problems_digest(cell.config, digests))
        run_campaign(cell.config, calls, _Walk(store, seen, plan, cell.config))
    return plan


def problems_digest(config: CampaignConfig, known: dict[str, str]) -> str:
    """Return the digest of the cell's problems, which are read once for all cells that have the same."""
    asked = config.problems.model_dump_json() + "".join(policy.model_dump_json() for policy in config.withheld)
    if asked not in known:
        known[asked] = load_problems(config.problems, config.withheld).content_digest
    return known[asked]

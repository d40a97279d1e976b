"""``hacrl eval``: any agent on any benchmark, in this process, through the same stages and the same store as a
campaign.

The agent is a version that a campaign made, or a checkpoint from elsewhere, which the adopt stage imports first. A
result that is in the store is shown and not computed again, even if a campaign computed it.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from flows.agents.find import (
    Changes,
    Subject,
    change_benchmark,
    change_generation,
    change_verification,
    find_agent,
    find_benchmarks,
    problems_digest,
)
from flows.home import Home
from flows.record.lines import sealed_line
from flows.record.record import evaluations_log
from flows.run.events import Listener
from flows.run.executors import InProcessExecutor
from flows.run.placement import Placement
from flows.run.runner import InlineRunner
from flows.run.session import open_session
from flows.store.bucket import uploading
from flows.views.text import can_redraw
from hacrl_core.artifacts import ArtifactRef, Store, open_store
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.instructions import settle_instructions
from hacrl_core.seeding import derive_seed
from hacrl_core.verification.verifiers import resolve_verifier, verifier_source
from stages.evaluate import EvaluateSlice
from stages.spec import Context, Handle, Outcome, StageCall

# Without a terminal: a line at least so often while responses are sampled or checked.
_QUIET_SECONDS = 30.0


@dataclass(frozen=True)
class Evaluation:
    """One benchmark's result."""

    benchmark: BenchmarkConfig
    outcome: Outcome

    @property
    def table(self) -> Path:
        return self.outcome.ref.path / "evaluation.parquet"


def evaluate_agent(
    agent: str, benchmarks: Sequence[str | BenchmarkConfig], changes: Changes, home: Home, console: Console
) -> tuple[str, list[Evaluation]]:
    """Return the agent's full name and one result per benchmark; everything is checked before anything runs."""
    listener = _EvaluationListener(console)
    store = open_store(home.store, on_problem=listener.warn)
    subject = find_agent(store, home, agent)
    chosen = [change_benchmark(found, changes) for found in find_benchmarks(subject, benchmarks)]
    calls = [_evaluate_call(subject, benchmark, changes) for benchmark in chosen]
    results = []
    with uploading(store, listener.warn, home), _inline_session(store, listener, subject) as runner:
        version: ArtifactRef | Handle
        if isinstance(subject.version, StageCall):
            version = runner.submit(subject.version)
            _log_artifact(home, subject.name, version.outcome().ref)
        else:
            version = subject.version
            _log_artifact(home, subject.name, version)
        for benchmark, call in zip(chosen, calls, strict=True):
            outcome = runner.submit(replace(call, inputs={"agent": version})).outcome()
            _log_artifact(home, subject.name, outcome.ref)
            results.append(Evaluation(benchmark, outcome))
    return subject.name, results


def _evaluate_call(subject: Subject, benchmark: BenchmarkConfig, changes: Changes) -> StageCall:
    verify = change_verification(resolve_verifier(subject.verify, benchmark.problems, benchmark=True), changes)
    config = EvaluateSlice(
        benchmark=benchmark,
        content_digest=problems_digest(benchmark),
        generate=change_generation(subject.generate, changes),
        verify=verify,
        verifier_source=verifier_source(verify.verifier),
        chat_template=subject.chat_template,
        template_options=subject.template_options,
    )
    seed = derive_seed(subject.seed, "evaluate")
    return StageCall("evaluate", config, {}, seed, subject.name, None, benchmark.name)


def _log_artifact(home: Home, agent: str, ref: ArtifactRef) -> None:
    """Remember an artifact that no campaign records, so that clean-up does not take it for garbage."""
    if ref.stage in ("update", "warmstart"):
        return
    with evaluations_log(home).open("a") as log:
        log.write(sealed_line({"agent": agent, "stage": ref.stage, "key": ref.key, "at": time.time()}))


@contextmanager
def _inline_session(store: Store, listener: "_EvaluationListener", subject: Subject) -> Iterator[InlineRunner]:
    """Run calls in this process. Results that are in the store are returned before torch is imported."""
    context = Context()
    executor = InProcessExecutor(store, context, {subject.name: Placement(own_code=subject.own_code)})
    try:
        with open_session(InlineRunner(store, executor, listener), executor) as runner:
            yield runner
    finally:
        listener.close()
        if listener.ran:
            from hacrl_core.verification import close_pool

            context.warm.close()
            close_pool()


class _EvaluationListener(Listener):
    """Shows a bar in a terminal while a stage runs; elsewhere a line for each quarter of its responses.

    Between quarters there is a line every half minute, because no response may end for long while tokens are written.
    """

    def __init__(self, console: Console) -> None:
        self.ran = False
        self._console = console
        self._doing = ""
        self._quarters: set[int] = set()
        self._told = 0.0
        self._bars: Progress | None = None

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        self.ran = True
        if line := settle_instructions():
            self.warn(line)
        _prepare_torch()
        self._doing = f"importing {call.agent}" if call.stage == "adopt" else f"evaluating on {call.variant}"
        self._quarters.clear()
        if not can_redraw(self._console):
            self._console.print(self._doing, highlight=False)
            return
        note = TextColumn("{task.fields[note]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._bars.add_task(self._doing, total=None, note="")
        self._bars.start()

    def progress(self, call: StageCall, done: int, total: int, note: str) -> None:
        quarter = 4 * done // max(total, 1)
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=done, total=total, note=note)
        elif quarter not in self._quarters or time.monotonic() - self._told > _QUIET_SECONDS:
            self._quarters.add(quarter)
            self._told = time.monotonic()
            count = f"{done}/{total} responses"
            text = f"checked {count}" if note == "checked" else f"{count}, {note}"
            self._console.print(f"{self._doing}: {text}", highlight=False)

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        self.close()

    def waiting(self, call: StageCall, holder: str) -> None:
        self._console.print(f"{call.title}: {holder} is computing the same artifact; waiting for it", highlight=False)

    def warn(self, message: str) -> None:
        self._console.print(Text(f"! {message}", style="yellow"))

    def close(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _prepare_torch() -> None:
    """Give torch every core unless the user says how many: nothing else computes in this process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The libraries' bars; ours is enough.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

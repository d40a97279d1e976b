"""``hacrl eval``: any agent on any benchmark, in this process, through the same stages and the same store as a campaign.

The agent is a version that a campaign made, or a checkpoint from elsewhere, which the adopt stage takes in first. A result that is in the store
is shown, not computed; also one that the campaign itself computed.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from flows.agents.find import Changes, change_benchmark, change_generation, find_agent, find_benchmarks, problems_digest
from flows.home import Home
from flows.record.record import evaluations_log
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.evaluation import BenchmarkConfig
from hacrl_core.errors import InputGoneError
from hacrl_core.seeding import derive_seed
from hacrl_core.verification.verifiers import verifier_source
from stages.runner import Outcome, lookup, run_stage
from stages.spec import Context, StageCall


@dataclass(frozen=True)
class Evaluation:
    """One benchmark's result."""

    benchmark: BenchmarkConfig
    outcome: Outcome

    @property
    def table(self) -> Path:
        return self.outcome.ref.path / "evaluation.parquet"


def evaluate_agent(
    agent: str, benchmarks: Sequence[str], changes: Changes, home: Home, console: Console
) -> tuple[str, list[Evaluation]]:
    """The agent's full name and its results, one for each benchmark; everything is checked before anything runs."""
    store = Store(home.store, on_problem=lambda message: console.print(Text(f"! {message}", style="yellow")))
    subject = find_agent(store, home, agent)
    chosen = [change_benchmark(found, changes) for found in find_benchmarks(subject, benchmarks)]
    generate = change_generation(subject.generate, changes)
    digests = [problems_digest(benchmark) for benchmark in chosen]
    with _runner(store, console) as run:
        version = (
            subject.version if isinstance(subject.version, ArtifactRef) else run(subject.version, subject.name).ref
        )
        _note(home, subject.name, version)
        results = []
        for benchmark, digest in zip(chosen, digests, strict=True):
            slice_ = {
                "benchmark": benchmark.model_dump(mode="json"),
                "content_digest": digest,
                "generate": generate.model_dump(mode="json"),
                "verify": subject.verify.model_dump(mode="json"),
                "verifier_source": verifier_source(subject.verify.verifier),
                "chat_template": subject.chat_template,
            }
            seed = derive_seed(subject.seed, "evaluate")
            call = StageCall("evaluate", slice_, {"agent": version}, seed, subject.name, None, benchmark.name)
            try:
                outcome = run(call, benchmark.name)
            except InputGoneError:
                if isinstance(subject.version, ArtifactRef):
                    raise
                run(replace(subject.version, restore=True), subject.name)  # taken in before, and cleaned away since
                outcome = run(call, benchmark.name)
            _note(home, subject.name, outcome.ref)
            results.append(Evaluation(benchmark, outcome))
    return subject.name, results


def _note(home: Home, agent: str, ref: ArtifactRef) -> None:
    if ref.stage == "update" or ref.stage == "warmstart":
        return  # a campaign's own
    with evaluations_log(home).open("a") as log:
        log.write(json.dumps({"agent": agent, "stage": ref.stage, "key": ref.key, "at": time.time()}) + "\n")


# -- running ----------------------------------------------------------------------------------------------------------


@contextmanager
def _runner(store: Store, console: Console) -> Iterator[Callable[[StageCall, str], Outcome]]:
    """Runs stage calls here, with a bar; what is in the store is returned before torch is imported."""
    context = Context(warn=lambda message: console.print(Text(f"! {message}", style="yellow")))
    used = False

    def run(call: StageCall, title: str) -> Outcome:
        nonlocal used
        if found := lookup(store, call):
            return found
        used = True
        _prepare_torch()
        doing = f"{'taking in' if call.stage == 'adopt' else 'evaluating on'} {title}"
        with _progress(console, doing) as progress:
            waiting = f"{call.label}: {{}} is computing the same artifact; waiting for it"
            return run_stage(
                store, call, replace(context, progress=progress), lambda holder: context.warn(waiting.format(holder))
            )

    try:
        yield run
    finally:
        if used:
            from hacrl_core.verification import close_pool

            context.warm.close()
            close_pool()


@contextmanager
def _progress(console: Console, doing: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar in a terminal; elsewhere a line for each quarter."""
    if not console.is_terminal:
        told: set[int] = set()

        def say(done: int, total: int, note: str) -> None:
            quarter = 4 * done // max(total, 1)
            if quarter not in told:
                told.add(quarter)
                console.print(f"{doing}: {done}/{total} responses, {note}", highlight=False)

        console.print(doing, highlight=False)
        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        bar = bars.add_task(doing, total=None, note="")
        yield lambda done, total, note: bars.update(bar, completed=done, total=total, note=note)


def _prepare_torch() -> None:
    """Nothing else computes here, so torch gets every core, unless the user says how many."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars; ours says what goes on
    import torch
    import transformers

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

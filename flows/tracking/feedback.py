"""``hacrl feedback``: read what people said about traces in MLflow, and keep it with the campaign."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.home import Home
from flows.record.feedback import RIGHT, WRONG, Label, by_rollout, counted, read_labels, write_labels
from flows.record.record import Entry, find_campaign, read_campaign, read_entries
from flows.tracking.feed import ServerAway, first_line, probe
from flows.tracking.projection import Projection, quiet_environment, tracking_uri
from flows.tracking.traces import ROLLOUT, VERDICT, all_traces, stored_table
from hacrl_core.artifacts import Store, open_store
from hacrl_core.config.addresses import without_userinfo
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.tables import PROMPTS, ROLLOUTS
from hacrl_core.errors import ArtifactError, ConfigError
from hacrl_core.printable import printable

# What people write for the two verdicts, in lower case.
_MEANINGS = {
    RIGHT: ("correct", "right", "true", "yes", "pass", "1", "1.0"),
    WRONG: ("incorrect", "wrong", "false", "no", "fail", "0", "0.0", "unparseable"),
}
_NAMES = (VERDICT, "correct", "correctness", "is_correct")


def show_feedback(console: Console, home: Home, campaign: str | None, out: Path | None) -> None:
    """Bring the campaign's list of human verdicts up to date with MLflow, print it, and write the cases to a file."""
    quiet_environment()
    folder = find_campaign(home, campaign)
    config = read_campaign(folder)
    before = read_labels(folder)
    if config.tracking.enabled:
        found, unread = _read(config, home, before)
        if found != before:
            write_labels(folder, found)
    else:
        found, unread = before, []
    for line in unread:
        console.print(Text(f"! {line}", style="yellow"), soft_wrap=True)
    if not found:
        console.print(
            f"{config.name}: no human verdict yet. Open a trace in MLflow and add the assessment {VERDICT} with the "
            f"value {RIGHT} or {WRONG}; then run this command again.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return
    console.print(_table(found))
    console.print(Text(f"{config.name}: {counted(found)}"), soft_wrap=True)
    console.print(f"kept in {folder / 'feedback.json'}; past verdicts and what was learned from them stay as they are",
                  highlight=False, soft_wrap=True)  # fmt: skip
    if out is not None:
        written = write_cases(open_store(home.store), read_entries(folder), found, out)
        console.print(f"{written} cases in {out}", highlight=False, soft_wrap=True)


def _read(config: CampaignConfig, home: Home, before: Sequence[Label]) -> tuple[list[Label], list[str]]:
    """Return the labels and what could not be understood.

    A label whose trace MLflow has lost is kept; one that was deleted from its trace is gone.
    """
    from mlflow.tracing.client import TracingClient

    uri = tracking_uri(config, home)
    try:
        probe(uri)
        runs, experiment = Projection.find(config, uri, home)
        client: Any = TracingClient(uri)
        traces = {t.info.trace_id: t.info for t in all_traces(client, experiment, runs.values())} if experiment else {}
    except ServerAway:
        raise
    except Exception as problem:
        raise ServerAway(
            f"MLflow at {without_userinfo(uri)}: {first_line(problem)}; try again when it answers"
        ) from problem
    labels = [label for label in before if label.trace not in traces]
    unread = []
    for info in traces.values():
        for assessment in info.assessments:
            if assessment.source.source_type != "HUMAN" or assessment.valid is False or assessment.feedback is None:
                continue
            verdict = meaning(assessment.name, assessment.feedback.value)
            if verdict is None:
                unread.append(
                    f"trace {info.trace_id}: {assessment.name} = {assessment.feedback.value!r} by "
                    f"{assessment.source.source_id} is no verdict; name it {VERDICT} and give {RIGHT} or {WRONG}"
                )
                continue
            labels.append(_label(info, assessment, verdict))
    labels.sort(key=lambda label: (label.iteration, label.agent, label.rollout))
    return labels, unread


def meaning(name: str, value: Any) -> str | None:
    """Return the verdict that an assessment means; None if it means none."""
    if name.lower() not in _NAMES:
        return None
    return next((verdict for verdict, words in _MEANINGS.items() if str(value).strip().lower() in words), None)


def _label(info: Any, assessment: Any, verdict: str) -> Label:
    said = next(
        (a.feedback.value for a in info.assessments if a.name == VERDICT and a.source.source_type == "CODE"), ""
    )
    return Label(
        rollout=info.tags[ROLLOUT],
        agent=info.tags["hacrl.agent"],
        iteration=int(info.tags["hacrl.iteration"]),
        said=str(said),
        verdict=verdict,
        who=str(assessment.source.source_id),
        at=(assessment.last_update_time_ms or 0) / 1000,
        rationale=assessment.rationale or "",
        trace=info.trace_id,
        id=str(assessment.assessment_id),
    )


def _table(labels: Sequence[Label]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("iteration", "agent", "verifier", "person", "who", "why"):
        table.add_column(title, overflow="fold")
    for label in labels:
        style = "yellow" if label.is_miss else ""
        table.add_row(
            str(label.iteration), label.agent, label.said, Text(label.verdict, style=style), printable(label.who),
            printable(label.rationale),
        )  # fmt: skip
    return table


# -- the cases -----------------------------------------------------------------------------------------------------


def write_cases(store: Store, entries: Iterable[Entry], labels: Sequence[Label], path: Path) -> int:
    """Write labelled responses as JSONL: prompt, right answer, response, the verifier's verdict and the person's.

    They are test cases for a verifier. Return how many were written; responses that are no longer in the store are left
    out.
    """
    if path.is_dir():
        raise ConfigError(f"--out {path}: is a folder; give the name of a file")
    places = {(e.stage, e.agent, e.iteration): e for e in entries if not e.variant}
    lines = [case for label in by_rollout(labels).values() if (case := _case(store, places, label)) is not None]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def _case(store: Store, places: Mapping[Any, Entry], label: Label) -> dict[str, Any] | None:
    number = label.iteration - 1
    written, asked = places.get(("generate", label.agent, number)), places.get(("sample", "", number))
    if written is None or asked is None:
        return None
    try:
        rollouts = stored_table(store, written, ROLLOUTS).to_pylist()
        row = next((row for row in rollouts if row["rollout_id"] == label.rollout), None)
        if row is None:
            return None
        prompts = {prompt["prompt_id"]: prompt for prompt in stored_table(store, asked, PROMPTS).to_pylist()}
    except ArtifactError:
        return None
    prompt = prompts[row["prompt_id"]]
    return {
        "messages": prompt["messages"],
        "gold": prompt["answer"],
        "response": row["response_text"],
        "verifier": label.said,
        "label": label.verdict,
        "who": label.who,
        "why": label.rationale,
        "agent": label.agent,
        "iteration": label.iteration,
        "rollout_id": label.rollout,
    }

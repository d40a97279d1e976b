"""Sampled rollouts as MLflow traces, linked to their agent's run, with verdict, reward and advantages as assessments.

A trace's id is a digest of the campaign, the artifact and the rollout. A replay finds it again, so it adds nothing, and
a database that was lost gets the same traces. The sample is drawn by the prompts' digests: every agent's traces of an
iteration answer the same prompts, and neither the verdict nor the length of a response decides.

A trace costs MLflow's database more than a short iteration should pay. So the first iterations all have traces, and
later ones as often as there are some seconds of generation behind them, by the manifests: a replay chooses the same.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flows.record.feedback import Label
from flows.record.history import History
from flows.record.record import Entry
from hacrl_core.artifacts import Store
from hacrl_core.contracts.manifest import Manifest
from hacrl_core.contracts.tables import CREDIT, PROMPTS, ROLLOUTS, VERDICTS, TableSchema, read_table
from hacrl_core.errors import ArtifactError

VERDICT = "verdict"
ROLLOUT = "hacrl.rollout"
# MLflow lists at most so many traces at a time.
_PAGE = 500
# Characters of prompt and response in the list of traces.
_PREVIEW = 1000
# So many iterations have traces, however short they are.
FIRST = 5
# After those, so many seconds of generation lie between two iterations with traces.
SECONDS_APART = 15.0


@dataclass(frozen=True)
class Sampled:
    """One rollout that becomes a trace."""

    trace: str
    agent: str
    iteration: int
    row: Mapping[str, Any]
    prompt: Mapping[str, Any]
    verdict: Mapping[str, Any]
    # Learner → advantage.
    advantages: Mapping[str, float]
    generated: Manifest
    verified: Manifest


class Traces:
    """The traces of one campaign. It starts with the campaign's history and is fed with new entries."""

    def __init__(
        self,
        uri: str,
        history: History,
        experiment: str,
        runs: Mapping[str, str],
        digest: str,
        labels: Sequence[Label] = (),
    ) -> None:
        """``digest`` tells campaigns of one name apart; ``labels`` is the human feedback that was read back."""
        self._uri = uri
        self._experiment = experiment
        self._runs = runs
        self._digest = digest
        self._config = history.config
        self._store = history.store
        self._labels: dict[str, list[Label]] = {}
        for label in labels:
            self._labels.setdefault(label.trace, []).append(label)
        # Of iterations whose traces are not sent yet.
        self._entries: dict[tuple[str, str, int | None], Entry] = {}
        # Iteration → agent → seconds of generation.
        self._generated: dict[int, dict[str, float]] = {}
        for finished in history.finished:
            self._note(finished.entry, finished.manifest)
        self._sent: set[int] = set()
        self._known: set[str] | None = None

    def log(self, entries: Iterable[Entry]) -> None:
        """Send the traces of the iterations that these entries complete."""
        if not self._config.tracking.traces:
            return
        touched = set()
        for entry in entries:
            if entry.iteration is not None and entry.iteration not in self._sent:
                self._note(entry, None)
                touched.add(entry.iteration)
        ready = [iteration for iteration in sorted(touched) if self._is_ready(iteration)]
        found = [one for iteration in ready if self._is_shown(iteration) for one in self._sampled(iteration)]
        if found:
            self._send(found)
        self._sent.update(ready)
        self._entries = {place: entry for place, entry in self._entries.items() if place[2] not in self._sent}

    def _note(self, entry: Entry, manifest: Manifest | None) -> None:
        """Remember an entry, and how long the responses took."""
        if entry.iteration is None or entry.variant:
            return
        self._entries[_place(entry)] = entry
        if entry.stage == "generate":
            try:
                seconds = (manifest or self._store.manifest(entry.stage, entry.key)).provenance.seconds
            except ArtifactError:
                seconds = 0.0
            self._generated.setdefault(entry.iteration, {})[entry.agent] = seconds

    def _is_shown(self, iteration: int) -> bool:
        """Whether an iteration has traces: a multiple of the seconds between two passes during it."""
        if iteration < FIRST:
            return True
        before = sum(sum(each.values()) for i, each in self._generated.items() if i < iteration)
        after = before + sum(self._generated.get(iteration, {}).values())
        return after // SECONDS_APART > before // SECONDS_APART

    def _is_ready(self, iteration: int) -> bool:
        agents = self._config.present(iteration)
        wanted = [(stage, agent, iteration) for stage in ("generate", "verify", "credit") for agent in agents]
        return ("sample", "", iteration) in self._entries and all(place in self._entries for place in wanted)

    # -- which rollouts --------------------------------------------------------------------------------------------

    def _sampled(self, iteration: int) -> list[Sampled]:
        """Return the rollouts of an iteration that are shown; none where a table is gone."""
        agents = self._config.present(iteration)
        try:
            prompts = self._table("sample", "", iteration, PROMPTS)
            order = sorted(prompts["prompt_id"].to_pylist(), key=lambda prompt: _digest(str(iteration), prompt))
            chosen = order[: self._config.tracking.traces]
            asked = {row["prompt_id"]: row for row in _rows(prompts, "prompt_id", chosen)}
            credits = {learner: self._table("credit", learner, iteration, CREDIT) for learner in agents}
            return [
                one for agent in agents for one in self._of_agent(agent, iteration, [asked[c] for c in chosen], credits)
            ]
        except ArtifactError:
            # Deleted by a clean-up.
            return []

    def _of_agent(
        self, agent: str, iteration: int, asked: Sequence[Mapping[str, Any]], credits: Mapping[str, pa.Table]
    ) -> Iterable[Sampled]:
        generated, verified = self._manifest("generate", agent, iteration), self._manifest("verify", agent, iteration)
        rollouts = self._table("generate", agent, iteration, ROLLOUTS)
        first: dict[str, dict[str, Any]] = {}
        for row in _rows(rollouts, "prompt_id", [prompt["prompt_id"] for prompt in asked]):
            if row["sample_index"] <= first.setdefault(row["prompt_id"], row)["sample_index"]:
                first[row["prompt_id"]] = row
        ids = [row["rollout_id"] for row in first.values()]
        verdicts = {
            v["rollout_id"]: v for v in _rows(self._table("verify", agent, iteration, VERDICTS), "rollout_id", ids)
        }
        worth = {who: {c["rollout_id"]: c for c in _rows(table, "rollout_id", ids)} for who, table in credits.items()}
        for prompt in asked:
            if prompt["prompt_id"] not in first or first[prompt["prompt_id"]]["rollout_id"] not in verdicts:
                continue
            row = first[prompt["prompt_id"]]
            name = row["rollout_id"]
            yield Sampled(
                trace="tr-" + _digest(self._config.name, self._digest, generated.key, name)[:32],
                agent=agent,
                iteration=iteration,
                row=row,
                prompt=prompt,
                verdict=verdicts[name],
                advantages={who: found[name]["advantage"] for who, found in worth.items() if name in found},
                generated=generated,
                verified=verified,
            )

    def _manifest(self, stage: str, agent: str, iteration: int) -> Manifest:
        return self._store.manifest(stage, self._entries[stage, agent, iteration].key)

    def _table(self, stage: str, agent: str, iteration: int, schema: TableSchema) -> pa.Table:
        entry = self._entries[stage, agent, iteration]
        return stored_table(self._store, entry, schema)

    # -- sending ---------------------------------------------------------------------------------------------------

    def _send(self, found: Sequence[Sampled]) -> None:
        """Send those that MLflow does not have: each trace, then the spans of all of them in one call."""
        from mlflow.tracing.client import TracingClient

        client: Any = TracingClient(self._uri)
        fresh = [one for one in found if one.trace not in self._those_sent(client)]
        if not fresh:
            return
        for one in fresh:
            client.start_trace(self._info(one))
        client.log_spans(self._experiment, [span for one in fresh for span in _spans(one)])
        self._those_sent(client).update(one.trace for one in fresh)

    def _those_sent(self, client: Any) -> set[str]:
        """Return the ids of the traces that are complete in MLflow; they are asked for once."""
        if self._known is None:
            # MLflow sets this tag with the spans, which come last.
            self._known = {
                trace.info.trace_id
                for trace in all_traces(client, self._experiment, self._runs.values())
                if "mlflow.trace.spansLocation" in trace.info.tags
            }
        return self._known

    def _info(self, one: Sampled) -> Any:
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        began, ended = _times(one.generated)[0], _times(one.verified)[1]
        return TraceInfo(
            trace_id=one.trace,
            trace_location=TraceLocation.from_experiment_id(self._experiment),
            request_time=began // 1_000_000,
            state=TraceState.OK,
            request_preview=_question(one)[:_PREVIEW],
            response_preview=one.row["response_text"][:_PREVIEW],
            client_request_id=one.row["rollout_id"],
            execution_duration=max(0, (ended - began) // 1_000_000),
            trace_metadata={
                "mlflow.sourceRun": self._runs[one.agent],
                "mlflow.trace.session": f"{self._config.name} iteration {one.iteration + 1}",
            },
            tags={
                "mlflow.traceName": f"{one.agent} iteration {one.iteration + 1}",
                "hacrl.campaign": self._config.name,
                "hacrl.agent": one.agent,
                "hacrl.iteration": str(one.iteration + 1),
                ROLLOUT: one.row["rollout_id"],
            },
            assessments=[*_assessments(one), *(_human(label) for label in self._labels.get(one.trace, ()))],
        )


def all_traces(client: Any, experiment: str, runs: Iterable[str]) -> Iterable[Any]:
    """Yield the complete traces of these runs, without their spans."""
    for run in runs:
        token = None
        while True:
            page = client.search_traces(
                locations=[experiment], run_id=run, max_results=_PAGE, page_token=token, include_spans=False
            )
            yield from page
            token = page.token
            if not token:
                break


def stored_table(store: Store, entry: Entry, schema: TableSchema) -> pa.Table:
    """Return a stage's table; raise ArtifactError where its file is gone."""
    store.fetch(entry.stage, entry.key)
    path = store.folder(entry.stage, entry.key) / f"{schema.name}.parquet"
    if not path.exists():
        raise ArtifactError(f"{path}: is gone")
    return read_table(path, schema)


def _place(entry: Entry) -> tuple[str, str, int | None]:
    return entry.stage, entry.agent, entry.iteration


def _rows(table: pa.Table, column: str, wanted: Sequence[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.filter(pc.is_in(table[column], pa.array(wanted, pa.string()))).to_pylist()
    return found


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _question(one: Sampled) -> str:
    return "\n\n".join(message["content"] for message in one.prompt["messages"])


def _times(manifest: Manifest) -> tuple[int, int]:
    """Return when a stage began and ended, in nanoseconds: all responses of a stage are written together."""
    ended = manifest.provenance.finished
    return int((ended - manifest.provenance.seconds) * 1e9), int(ended * 1e9)


def _spans(one: Sampled) -> list[Any]:
    """Return the spans of a trace: the rollout, and in it the stage that wrote it and the one that judged it."""
    messages = list(one.prompt["messages"])
    answer = {"role": "assistant", "content": one.row["response_text"]}
    usage = {"input_tokens": len(one.row["prompt_token_ids"]), "output_tokens": len(one.row["response_token_ids"])}
    usage["total_tokens"] = sum(usage.values())
    (began, written), (_, judged) = _times(one.generated), _times(one.verified)
    root = _span(one, "rollout", "CHAIN", (began, max(written, judged)), {"messages": messages}, answer)
    more = {"mlflow.chat.tokenUsage": usage, "finish_reason": one.row["finish_reason"], "seed": one.row["seed"]}
    chosen = {"choices": [{"message": answer}]}
    generate = _span(one, "generate", "CHAT_MODEL", (began, written), {"messages": messages}, chosen, root, more)
    said = {name: one.verdict[name] for name in ("verdict", "reward", "extracted_answer")}
    asked = {"response": one.row["response_text"], "right answer": one.prompt["answer"]}
    began_judging = max(written, _times(one.verified)[0])
    verify = _span(
        one, "verify", "EVALUATOR", (began_judging, max(began_judging, judged)), asked, said, root,
        {"verifier": one.verdict["verifier"]},
    )  # fmt: skip
    return [root, generate, verify]


def _span(
    one: Sampled,
    name: str,
    kind: str,
    times: tuple[int, int],
    inputs: Any,
    outputs: Any,
    parent: Any = None,
    more: Mapping[str, Any] | None = None,
) -> Any:
    from mlflow.entities import Span

    attributes = {
        "mlflow.traceRequestId": one.trace,
        "mlflow.spanType": kind,
        "mlflow.spanInputs": inputs,
        "mlflow.spanOutputs": outputs,
        **(more or {}),
    }
    return Span.from_dict(
        {
            "trace_id": one.trace,
            "span_id": _digest(one.trace, name)[:16],
            "parent_span_id": None if parent is None else parent.span_id,
            "name": name,
            "start_time_unix_nano": times[0],
            "end_time_unix_nano": times[1],
            "status": {"code": "STATUS_CODE_OK", "message": ""},
            "attributes": {key: json.dumps(value) for key, value in attributes.items()},
            "events": [],
        }
    )


def _assessments(one: Sampled) -> list[Any]:
    """Return the verifier's verdict and reward, each learner's advantage, and the right answer as an expectation."""
    from mlflow.entities import AssessmentSource, Expectation

    at = _times(one.verified)[1] // 1_000_000
    verifier = AssessmentSource("CODE", str(one.verdict["verifier"]))
    learner = AssessmentSource("CODE", "hacrl credit")
    expected = Expectation("right_answer", one.prompt["answer"], AssessmentSource("CODE", one.prompt["source"]))
    expected.assessment_id, expected.trace_id = _assessment_id(one, "right_answer"), one.trace
    expected.create_time_ms = expected.last_update_time_ms = at
    return [
        _feedback(one, VERDICT, one.verdict["verdict"], verifier, at, one.verdict["extracted_answer"]),
        _feedback(one, "reward", one.verdict["reward"], verifier, at),
        *(_feedback(one, f"advantage_{who}", value, learner, at) for who, value in one.advantages.items()),
        expected,
    ]


def _feedback(one: Sampled, name: str, value: Any, source: Any, at: int, extracted: str = "") -> Any:
    from mlflow.entities import Feedback

    made = Feedback(
        name=name,
        value=value,
        source=source,
        trace_id=one.trace,
        rationale=f"answer found: {extracted}" if extracted else None,
        create_time_ms=at,
        last_update_time_ms=at,
    )
    made.assessment_id = _assessment_id(one, name)
    return made


def _assessment_id(one: Sampled, name: str) -> str:
    return "a-" + _digest(one.trace, name)[:32]


def _human(label: Label) -> Any:
    """Return a label as the assessment that it was read from, so that a lost database gets it back."""
    from mlflow.entities import AssessmentSource, Feedback

    made = Feedback(
        name=VERDICT,
        value=label.verdict,
        source=AssessmentSource("HUMAN", label.who),
        trace_id=label.trace,
        rationale=label.rationale or None,
        create_time_ms=int(label.at * 1000),
        last_update_time_ms=int(label.at * 1000),
    )
    made.assessment_id = label.id
    return made

"""What the rules look at: a campaign's metrics, a sample of its responses, its prompts and its evaluations."""

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flows.record.history import FinishedStage, History
from hacrl_core.config.campaign import CampaignConfig

# Iterations whose responses are read: the last ones show what is wrong now.
RECENT = 3
# Responses of one agent and iteration that are read.
RESPONSES = 256


@dataclass(frozen=True)
class Response:
    """One response with its question, its gold answer and its verdict."""

    agent: str
    iteration: int
    rollout: str
    prompt: str
    question: str
    gold: str
    text: str
    cut_off: bool
    verdict: str
    reward: float
    answer: str
    verifier: str
    message: str
    # The first tokens of the prompt, as the agent was asked.
    first_ids: tuple[int, ...]


@dataclass(frozen=True)
class Evaluated:
    """What one evaluation of an agent looks like."""

    agent: str
    benchmark: str
    step: int
    problems: frozenset[str]
    responses: int
    cut_off: float
    unparseable: float
    questions: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Evidence:
    """Everything that the rules read. They read nothing else."""

    config: CampaignConfig
    done: int
    # (stage, agent) → metric → its values in the order of iterations.
    metrics: dict[tuple[str, str], dict[str, list[float]]]
    responses: list[Response]
    # Prompt ids and texts that were trained on.
    trained: dict[str, str]
    evaluated: list[Evaluated]
    # (agent, benchmark) → (step, accuracy, low, high).
    accuracy: dict[tuple[str, str], list[tuple[int, float, float, float]]]
    # Agent → the id of the BOS token that its tokenizer asks for; absent where it asks for none.
    bos: dict[str, int] = field(default_factory=dict)

    @property
    def agents(self) -> list[str]:
        """The agents in the order of the config."""
        return list(self.config.agents)

    @cached_property
    def by_agent(self) -> dict[str, list[Response]]:
        """The sampled responses of each agent."""
        found: dict[str, list[Response]] = {agent: [] for agent in self.agents}
        for response in self.responses:
            found[response.agent].append(response)
        return found

    def values(self, agent: str, name: str) -> list[float]:
        """Return a metric's values in the order of iterations; ``name`` begins with its stage."""
        return self.metrics.get((name.partition("/")[0], agent), {}).get(name, [])

    def recent(self, agent: str, name: str, count: int = RECENT) -> float | None:
        """Return the mean of a metric's last values; None where there are none."""
        found = self.values(agent, name)[-count:]
        return statistics.fmean(found) if found else None

    def first(self, agent: str, name: str, count: int = RECENT) -> float | None:
        """Return the mean of a metric's first values; None where there are none."""
        found = self.values(agent, name)[:count]
        return statistics.fmean(found) if found else None


def read_evidence(history: History) -> Evidence:
    """Read the evidence of a campaign: all manifests, the tables of its last iterations, its prompts."""
    metrics: dict[tuple[str, str], dict[str, list[float]]] = {}
    for stage in ("generate", "verify", "credit", "score", "update"):
        for agent in history.agents:
            found = metrics.setdefault((stage, agent), {})
            for finished in history.stages(stage, agent):
                for name, value in finished.manifest.metrics.items():
                    found.setdefault(name, []).append(value)
    trained, golds = _prompts(history)
    return Evidence(
        history.config,
        history.done,
        metrics,
        list(_responses(history, trained, golds)),
        trained,
        list(_evaluations(history)),
        _accuracies(history),
        dict(_bos(history)),
    )


def _path(history: History, finished: FinishedStage, table: str) -> Path:
    return history.store.folder(finished.entry.stage, finished.entry.key) / f"{table}.parquet"


def _rows(path: Path, columns: list[str], limit: int | None = None) -> list[dict[str, Any]]:
    """Return some columns of a table; none where its files are gone."""
    try:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=[c for c in columns if c in file.schema_arrow.names], use_threads=False)
    except OSError:
        return []
    rows: list[dict[str, Any]] = (table if limit is None else table.slice(0, limit)).to_pylist()
    return rows


def _prompts(history: History) -> tuple[dict[str, str], dict[str, str]]:
    return read_prompts(_path(history, finished, "prompts") for finished in history.stages("sample"))


def read_prompts(tables: Iterable[Path]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the questions and the gold answers of prompts, by their ids."""
    texts: dict[str, str] = {}
    golds: dict[str, str] = {}
    for path in tables:
        for row in _rows(path, ["prompt_id", "messages", "answer"]):
            asked = [m["content"] for m in row["messages"] if m["role"] == "user"]
            texts[row["prompt_id"]] = asked[-1] if asked else ""
            golds[row["prompt_id"]] = row["answer"]
    return texts, golds


def _responses(history: History, texts: dict[str, str], golds: dict[str, str]) -> Iterator[Response]:
    for agent in history.agents:
        judged = {f.entry.iteration: f for f in history.stages("verify", agent)}
        for sampled in history.stages("generate", agent)[-RECENT:]:
            iteration = sampled.entry.iteration
            if iteration is None or iteration not in judged:
                continue
            places = _path(history, sampled, "rollouts"), _path(history, judged[iteration], "verdicts")
            yield from read_responses(agent, iteration, *places, texts, golds)


def read_responses(
    agent: str, iteration: int, rollouts: Path, verdicts: Path, texts: dict[str, str], golds: dict[str, str]
) -> Iterator[Response]:
    """Yield an agent's responses in one iteration with their verdicts."""
    columns = ["rollout_id", "prompt_id", "response_text", "finish_reason", "prompt_token_ids"]
    wanted = ["rollout_id", "verdict", "reward", "extracted_answer", "verifier", "message"]
    judged = {row["rollout_id"]: row for row in _rows(verdicts, wanted)}
    for row in _rows(rollouts, columns, RESPONSES):
        verdict = judged.get(row["rollout_id"])
        if verdict is None:
            continue
        yield Response(
            agent,
            iteration,
            row["rollout_id"],
            row["prompt_id"],
            texts.get(row["prompt_id"], ""),
            golds.get(row["prompt_id"], ""),
            row["response_text"],
            row["finish_reason"] == "length",
            verdict["verdict"],
            verdict["reward"],
            verdict["extracted_answer"],
            verdict["verifier"],
            verdict.get("message", ""),
            tuple(row["prompt_token_ids"][:4]),
        )


def _evaluations(history: History) -> Iterator[Evaluated]:
    """Yield the last evaluation of every agent on every benchmark."""
    for agent in history.agents:
        for benchmark in history.config.evaluate.benchmarks:
            finished = history.stages("evaluate", agent, benchmark.name)[-1:]
            for last in finished:
                rows = _rows(_path(history, last, "evaluation"), ["problem_id", "truncated", "verdict"])
                if not rows:
                    continue
                yield Evaluated(
                    agent,
                    benchmark.name,
                    last.step,
                    frozenset(row["problem_id"] for row in rows),
                    len(rows),
                    statistics.fmean(row["truncated"] for row in rows),
                    statistics.fmean(row["verdict"] == "unparseable" for row in rows),
                    _questions(benchmark.problems),
                )


def _questions(problems: Any) -> frozenset[str]:
    """Return the questions of a benchmark that is a local file: its rows may have other names than in training."""
    if getattr(problems, "path", None) is None:
        return frozenset()
    from hacrl_core.errors import HacrlError
    from hacrl_core.problems import load_problems

    try:
        found = load_problems(problems).problems
    except HacrlError:
        return frozenset()
    return frozenset(m["content"] for problem in found for m in problem.messages if m["role"] == "user")


def _accuracies(history: History) -> dict[tuple[str, str], list[tuple[int, float, float, float]]]:
    found = {}
    for agent in history.agents:
        for benchmark in history.benchmarks:
            low, high = (dict(history.accuracy(agent, benchmark, f"accuracy_{end}")) for end in ("low", "high"))
            points = history.accuracy(agent, benchmark)
            found[agent, benchmark] = [(int(s), a, low.get(s, a), high.get(s, a)) for s, a in points]
    return found


def _bos(history: History) -> Iterator[tuple[str, int]]:
    """Yield the BOS tokens of adopted checkpoints whose tokenizers say that every prompt begins with it."""
    for agent in history.agents:
        for origin in history.stages("adopt", agent)[-1:]:
            folder = history.store.folder("adopt", origin.entry.key)
            try:
                settings = json.loads((folder / "tokenizer_config.json").read_text())
                added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
            except (OSError, ValueError, KeyError):
                continue
            token = settings.get("bos_token")
            token = token.get("content") if isinstance(token, dict) else token
            for each in added:
                if settings.get("add_bos_token") and each["content"] == token:
                    yield agent, int(each["id"])

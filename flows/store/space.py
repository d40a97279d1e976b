"""How much disk a campaign will still need, said before it starts: versions by the size of the models and the keep policy, tables by the number
of responses. Where the campaign has made some already, by what those took."""

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from flows.home import Home
from flows.record.history import History
from flows.record.record import Entry
from flows.stage_calls import StageCalls
from flows.views.text import size_text
from hacrl_core.artifacts import Store
from hacrl_core.config.agents import CheckpointConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.warmstart import WarmstartConfig
from hacrl_core.errors import ArtifactError
from stages.spec import find_stage

FLOAT = 4  # bytes: weights and AdamW's two moments are float32
BYTES_PER_TOKEN = 6.0  # of a table with token ids and log-probs, measured: 3.0 kB for 500 tokens (docs/architecture.md)
SMALL_FILES = 20_000  # configs and a small tokenizer
AGENTS = ("warmstart", "adopt", "update")  # stages whose artifact is a version


@dataclass(frozen=True)
class Need:
    """Bytes still to come."""

    versions: dict[str, tuple[int, int]]  # agent → (bytes of one, how many more at the same time)
    tables: int
    unknown: tuple[str, ...]  # agents whose size nobody knows yet

    @property
    def bytes(self) -> int:
        return self.tables + sum(size * count for size, count in self.versions.values())

    def text(self, free: int) -> str:
        parts = [f"{agent} {count} × {size_text(size)}" for agent, (size, count) in self.versions.items() if count]
        missing = f", {', '.join(self.unknown)} not counted: not here yet" if self.unknown else ""
        return f"disk: needs about {size_text(self.bytes)} more ({'; '.join([*parts, f'tables {size_text(self.tables)}'])}{missing}), {size_text(free)} free"


def estimate(config: CampaignConfig, store: Store, entries: list[Entry], calls: StageCalls) -> Need:
    history = History(config, store, entries)
    versions, unknown = {}, []
    for agent in config.agents:
        size, first = _version_bytes(config, store, history, calls, agent)
        if size is None:
            unknown.append(agent)
            continue
        settings = config.agents[agent]
        to_come = min(settings.leaves or config.iterations, config.iterations) - settings.joins
        kept = to_come if config.keep is None else config.keep.count(to_come) - 1
        there = [v for v in history.versions[agent][1:] if not store.is_collected(v.stage, v.key)]
        passing = 1 if len(history.versions[agent]) <= to_come else 0  # one that is written before an old one goes
        versions[agent] = (size, max(0, kept - len(there)) + passing + (0 if first else 1))
    left = config.iterations - history.done
    return Need(versions, int(left * _table_bytes(config, history)), tuple(unknown))


def tell_need(
    config: CampaignConfig, home: Home, store: Store, entries: list[Entry], calls: StageCalls
) -> tuple[str, str | None]:
    """A line for everybody, and a warning where the disk is smaller."""
    need, free = estimate(config, store, entries, calls), shutil.disk_usage(home.root).free
    if need.bytes <= free:
        return need.text(free), None
    remedy = "" if config.keep is not None else "give the campaign a keep policy (--set keep.last=2), "
    return need.text(free), (
        f"{home.root}: {size_text(free)} free, and the campaign needs about {size_text(need.bytes)}; {remedy}see what may go with hacrl store "
        "gc, or take another --home. It starts all the same, and a full disk loses nothing"
    )


def _version_bytes(
    config: CampaignConfig, store: Store, history: History, calls: StageCalls, agent: str
) -> tuple[int | None, bool]:
    """Of one version with its optimizer, and whether the first version is there: measured where there is one, else by parameters."""
    for version in reversed(history.versions[agent][1:]):
        try:
            return store.manifest(version.stage, version.key).bytes, True
        except ArtifactError:
            continue
    parameters, there = _parameters(config, store, calls, agent)
    if parameters is None:
        return None, there
    moments = 0 if config.training(agent).lora else 2
    return FLOAT * parameters * (1 + moments) + SMALL_FILES, there


def _parameters(config: CampaignConfig, store: Store, calls: StageCalls, agent: str) -> tuple[int | None, bool]:
    planned = calls.origin(agent)
    identity = find_stage(planned.stage).identity(planned)
    try:
        weights = [o for o in store.manifest(planned.stage, identity.key).outputs if o.path.endswith(".safetensors")]
        return sum(o.bytes for o in weights) // FLOAT, True
    except ArtifactError:
        pass
    settings = config.agents[agent]
    if settings.warmstart is not None:
        return warmstart_parameters(settings.warmstart), False
    assert settings.checkpoint is not None
    return checkpoint_parameters(settings.checkpoint), False


def warmstart_parameters(settings: WarmstartConfig) -> int:
    """Embedding, head, and per layer attention, gated MLP and norms; biases and the like are too few to count."""
    model = settings.model
    vocabulary = settings.tokenizer.vocab_size if settings.tokenizer.kind == "bpe" else 260
    width, keys = model.hidden_size, model.hidden_size * model.kv_heads // model.heads
    layer = 2 * width * width + 2 * width * keys + 3 * width * model.intermediate_size + 2 * width
    return vocabulary * width * (1 if model.tie_word_embeddings else 2) + model.layers * layer + width


def checkpoint_parameters(checkpoint: CheckpointConfig) -> int | None:
    """From the headers of safetensors files, without reading a weight; None where they are not on this machine."""
    folder = Path(checkpoint.path)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() and not checkpoint.gguf_file else []
    try:
        return sum(_header_parameters(path) for path in files) or None
    except (OSError, ValueError, struct.error):
        return None


def _header_parameters(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for side in tensor["shape"]:
                size *= side
            total += size
    return total


def _table_bytes(config: CampaignConfig, history: History) -> float:
    """Of one iteration: as measured, else as if every response had its full length."""
    made = [h.manifest.bytes for h in history.finished if h.entry.stage not in AGENTS and h.entry.iteration is not None]
    if history.done and made:
        return sum(made) / history.done
    tokens = fmean(config.generation(agent).max_tokens for agent in config.agents)
    responses = config.prompts_per_iteration * config.group_size * len(config.agents)
    scored = sum(len(config.agents) if config.objective(a).share_rollouts else 1 for a in config.agents) / len(
        config.agents
    )
    return responses * tokens * BYTES_PER_TOKEN * (1 + scored)

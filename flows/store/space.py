"""An estimate of the disk space that a campaign still needs, shown before it starts.

Versions count by the size of the models and the keep policy, tables by the number of responses. Where the campaign has
already made some, their real size counts.
"""

import json
import math
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

# Weights and AdamW's two moments are float32.
FLOAT_BYTES = 4
# Of a table with token ids and log-probs, measured: 3.0 kB for 500 tokens (docs/architecture.md).
BYTES_PER_TOKEN = 6.0
# Configs and a small tokenizer.
SMALL_FILES_BYTES = 20_000
# The stages whose artifact is a version.
VERSION_STAGES = ("warmstart", "adopt", "update")


@dataclass(frozen=True)
class DiskNeed:
    """The bytes that a campaign will still write and keep."""

    # Agent → (bytes of one version, how many more at the same time).
    versions: dict[str, tuple[int, int]]
    tables: int
    # Agents whose size is not known yet.
    unknown: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """All of it together."""
        return self.tables + sum(size * count for size, count in self.versions.values())

    def text(self, free: int) -> str:
        """Return a line for the user."""
        parts = [f"{agent} {count} × {size_text(size)}" for agent, (size, count) in self.versions.items() if count]
        parts.append(f"tables {size_text(self.tables)}")
        missing = f", {', '.join(self.unknown)} not counted: not here yet" if self.unknown else ""
        return f"disk: needs about {size_text(self.bytes)} more ({'; '.join(parts)}{missing}), {size_text(free)} free"


def estimate(config: CampaignConfig, store: Store, entries: list[Entry], calls: StageCalls) -> DiskNeed:
    """Return how much disk the rest of the campaign needs."""
    history = History(config, store, entries)
    versions = {}
    unknown = []
    for agent in config.agents:
        size, first = _version_bytes(config, store, history, calls, agent)
        if size is None:
            unknown.append(agent)
            continue
        settings = config.agents[agent]
        to_come = min(settings.leaves or config.iterations, config.iterations) - settings.joins
        kept = to_come if config.keep is None else config.keep.count(to_come) - 1
        there = [v for v in history.versions[agent][1:] if not store.is_collected(v.stage, v.key)]
        # A new version is written before an old one goes.
        passing = 1 if len(history.versions[agent]) <= to_come else 0
        versions[agent] = (size, max(0, kept - len(there)) + passing + (0 if first else 1))
    left = config.iterations - history.done
    return DiskNeed(versions, int(left * _table_bytes(config, history)), tuple(unknown))


def disk_estimate(
    config: CampaignConfig, home: Home, store: Store, entries: list[Entry], calls: StageCalls
) -> tuple[str, str | None]:
    """Return a line with the estimate, and a warning if the disk has less room."""
    need = estimate(config, store, entries, calls)
    free = shutil.disk_usage(home.root).free
    if need.bytes <= free:
        return need.text(free), None
    remedy = "" if config.keep is not None else "give the campaign a keep policy (--set keep.last=2), "
    return need.text(free), (
        f"{home.root}: {size_text(free)} free, and the campaign needs about {size_text(need.bytes)}; {remedy}see what "
        "may go with hacrl store gc, or take another --home. It starts all the same, and a full disk loses nothing"
    )


def _version_bytes(
    config: CampaignConfig, store: Store, history: History, calls: StageCalls, agent: str
) -> tuple[int | None, bool]:
    """Return the bytes of one version with its optimizer, and whether the first version exists.

    The size is measured where there is a version, else estimated from the number of parameters.
    """
    for version in reversed(history.versions[agent][1:]):
        try:
            return store.manifest(version.stage, version.key).bytes, True
        except ArtifactError:
            continue
    parameters, there = _parameters(config, store, calls, agent)
    if parameters is None:
        return None, there
    moments = 0 if config.training(agent).lora else 2
    return FLOAT_BYTES * parameters * (1 + moments) + SMALL_FILES_BYTES, there


def _parameters(config: CampaignConfig, store: Store, calls: StageCalls, agent: str) -> tuple[int | None, bool]:
    call = calls.origin(agent)
    identity = find_stage(call.stage).identity(call)
    try:
        weights = [o for o in store.manifest(call.stage, identity.key).outputs if o.path.endswith(".safetensors")]
        return sum(o.bytes for o in weights) // FLOAT_BYTES, True
    except ArtifactError:
        pass
    settings = config.agents[agent]
    if settings.warmstart is not None:
        return warmstart_parameters(settings.warmstart), False
    assert settings.checkpoint is not None
    return checkpoint_parameters(settings.checkpoint), False


def warmstart_parameters(settings: WarmstartConfig) -> int:
    """Return the parameters of a model to be pre-trained.

    Embedding, head, and per layer attention, gated MLP and norms; biases and the like are too few to count.
    """
    model = settings.model
    vocabulary = settings.tokenizer.vocab_size if settings.tokenizer.kind == "bpe" else 260
    width = model.hidden_size
    keys = model.hidden_size * model.kv_heads // model.heads
    layer = 2 * width * width + 2 * width * keys + 3 * width * model.intermediate_size + 2 * width
    return vocabulary * width * (1 if model.tie_word_embeddings else 2) + model.layers * layer + width


def checkpoint_parameters(checkpoint: CheckpointConfig) -> int | None:
    """Return the parameters by the headers of the safetensors files; None where these are not on this machine."""
    folder = Path(checkpoint.path)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() and not checkpoint.gguf_file else []
    try:
        return sum(_header_parameters(path) for path in files) or None
    except (OSError, ValueError, struct.error):
        return None


def _header_parameters(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _table_bytes(config: CampaignConfig, history: History) -> float:
    """Return the bytes of one iteration's tables: measured, else as if every response had its full length."""
    made = [
        h.manifest.bytes
        for h in history.finished
        if h.entry.stage not in VERSION_STAGES and h.entry.iteration is not None
    ]
    if history.done and made:
        return sum(made) / history.done
    tokens = fmean(config.generation(agent).max_tokens for agent in config.agents)
    responses = config.prompts_per_iteration * config.group_size * len(config.agents)
    scored = fmean(len(config.agents) if config.objective(a).share_rollouts else 1 for a in config.agents)
    return responses * tokens * BYTES_PER_TOKEN * (1 + scored)

"""An estimate of the disk space that a campaign still needs, shown before it starts.

It counts what will be written from now on and stays: versions by the size of the models and the keep policy, the
adopted checkpoints that are not in the store yet, tables by the number of responses. Where the campaign has already
made some, their real size counts.
"""

import shutil
from dataclasses import dataclass
from statistics import fmean

from flows.home import Home
from flows.record.history import History
from flows.record.record import Entry
from flows.stage_calls import StageCalls
from flows.store.checkpoint_sizes import checkpoint_parameters
from flows.views.text import size_text
from hacrl_core.artifacts import Store
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
# A manifest, measured; that of a version stays when its files go.
MANIFEST_BYTES = 3_000
# The stages whose artifact is a version.
VERSION_STAGES = ("warmstart", "adopt", "update")


@dataclass(frozen=True)
class DiskNeed:
    """The bytes that a campaign will still write and keep."""

    # Agent → (bytes of one version, how many more at the same time).
    versions: dict[str, tuple[int, int]]
    # Agent → bytes of its first version, where that is not in the store yet.
    origins: dict[str, int]
    tables: int
    # Agents whose size is not known yet.
    unknown: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """All of it together."""
        return self.tables + sum(self.origins.values()) + sum(size * count for size, count in self.versions.values())

    def text(self, free: int) -> str:
        """Return a line for the user."""
        parts = [f"first version of {agent} {size_text(size)}" for agent, size in self.origins.items()]
        parts += [
            f"{count} versions of {agent} of {size_text(size)} each"
            if count > 1
            else f"a version of {agent} {size_text(size)}"
            for agent, (size, count) in self.versions.items()
            if count
        ]
        parts.append(f"tables {size_text(self.tables)}")
        names = ", ".join(self.unknown)
        missing = f"; {names} not counted: the size is not known before the download" if self.unknown else ""
        return f"disk: needs about {size_text(self.bytes)} more ({'; '.join(parts)}{missing}), {size_text(free)} free"


def estimate(config: CampaignConfig, store: Store, entries: list[Entry], calls: StageCalls) -> DiskNeed:
    """Return how much disk the rest of the campaign needs."""
    history = History(config, store, entries)
    versions, origins, unknown = {}, {}, []
    for agent, settings in config.agents.items():
        if not config.has_weights_of(agent):
            continue  # of another party's agent nothing but tables is ever here
        parameters, there = _parameters(config, store, calls, agent)
        size = _version_bytes(config, store, history, agent, parameters)
        if size is None:
            unknown.append(agent)
            continue
        if not there and parameters is not None:
            origins[agent] = FLOAT_BYTES * parameters + SMALL_FILES_BYTES
        made = min(settings.leaves or config.iterations, config.iterations) - settings.joins
        kept = made if config.keep is None else config.keep.count(made) - 1
        present = [v for v in history.versions[agent][1:] if not store.is_collected(v.stage, v.key)]
        # A new version is written before an old one goes.
        passing = 1 if len(history.versions[agent]) <= made and config.keep is not None else 0
        versions[agent] = (size, max(0, kept - len(present)) + passing)
    left = config.iterations - history.done
    return DiskNeed(versions, origins, int(left * _table_bytes(config, history)), tuple(unknown))


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
    config: CampaignConfig, store: Store, history: History, agent: str, parameters: int | None
) -> int | None:
    """Return the bytes of one trained version with its optimizer: measured where there is one, else estimated."""
    for version in reversed(history.versions[agent][1:]):
        try:
            return store.manifest(version.stage, version.key).bytes
        except ArtifactError:
            continue
    if parameters is None:
        return None
    moments = 0 if config.training(agent).lora else 2
    return FLOAT_BYTES * parameters * (1 + moments) + SMALL_FILES_BYTES


def _parameters(config: CampaignConfig, store: Store, calls: StageCalls, agent: str) -> tuple[int | None, bool]:
    """Return an agent's parameters, and whether its first version is in the store."""
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


def _table_bytes(config: CampaignConfig, history: History) -> float:
    """Return the bytes of one iteration's tables: measured, else as if every response had its full length."""
    made = [h for h in history.finished if h.entry.iteration is not None]
    if history.done and made:
        tables = sum(h.manifest.bytes for h in made if h.entry.stage not in VERSION_STAGES)
        return (tables + MANIFEST_BYTES * len(made)) / history.done
    tokens = fmean(config.generation(agent).max_tokens for agent in config.agents)
    responses = config.prompts_per_iteration * config.group_size * len(config.agents)
    scored = fmean(len(config.agents) if config.objective(a).share_rollouts else 1 for a in config.agents)
    return responses * tokens * BYTES_PER_TOKEN * (1 + scored)

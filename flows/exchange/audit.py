"""hacrl exchange audit: an auditor with access to a version samples its answers again and compares them.

A party commits itself to a version's digest and to the key of its generate call before it samples. The key fixes
prompts, settings and seeds, so on the built-in engine in float32 the answers follow from the version alone.
"""

import tempfile
from pathlib import Path

from rich.console import Console

from flows.exchange.receiving import check_size, read_answers_of
from flows.exchange.status import mailbox_of
from flows.home import Home
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import ArtifactRef, Store, open_store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.tables import read_answers
from hacrl_core.errors import ConfigError
from hacrl_core.exchange.messages import Refused
from stages.runner import run_stage
from stages.spec import Context, Outcome, find_stage


def audit_answers(console: Console, config: CampaignConfig, home: Home, agent: str, iteration: int) -> int:
    """Print how many published answers are what the committed version samples; return 0 if all of them are.

    ``iteration`` counts from 0, as in stored labels; people read it counted from 1.
    """
    if agent not in config.agents:
        raise ConfigError(f"--agent {agent}: the campaign's agents are {', '.join(config.agents)}")
    mailbox = mailbox_of(config, home)
    commit = mailbox.find("commit", agent, iteration)
    message = mailbox.find("answers", agent, iteration)
    if commit is None or message is None:
        raise ConfigError(
            f"--iteration {iteration + 1}: {agent} has published no answers in this round that can be read"
        )
    store = open_store(home.store)
    version = _version(store, commit.policy, agent)
    again, key = _sample_again(config, store, version, agent, iteration)
    try:
        check_size(message, "answers.parquet", len(again), config)
        table = mailbox.fetch(message, "answers.parquet")
        told = read_answers_of(table, message, list(dict.fromkeys(str(r["prompt_id"]) for r in again)), config)
    except Refused as refused:
        console.print(f"round {iteration + 1}, {refused}", style="red", markup=False, soft_wrap=True)
        return 1
    if key != commit.key:
        console.print(f"{agent} committed itself to other prompts, settings or seeds than the campaign's", style="red")
        return 1
    right = sum(mine == theirs for mine, theirs in zip(again, told, strict=False))
    total = max(len(again), len(told))
    first = next((t["rollout_id"] for m, t in zip(again, told, strict=False) if m != t), None)
    rest = "all of them are what it samples" if right == total else f"the first that is not: {first}"
    console.print(
        f"round {iteration + 1}, {agent}, version {commit.policy[:12]}: {right} of {total} published answers equal "
        f"those sampled again; {rest}",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if right == total else 1


def _version(store: Store, digest: str, agent: str) -> ArtifactRef:
    """Find the version with a digest in a store that has its files."""
    for stage in ("update", "warmstart", "adopt"):
        for folder in sorted((store.root / "objects" / stage).glob("*")):
            ref = ArtifactRef(stage, folder.name, store.manifest(stage, folder.name).content_digest, folder)
            if ref.digest == digest and store.is_whole(ref):
                return ref
    raise ConfigError(
        f"--agent {agent}: this home has no version {digest[:12]}; audit in a home that has the agent's versions"
    )


def _sample_again(
    config: CampaignConfig, store: Store, version: ArtifactRef, agent: str, iteration: int
) -> tuple[list[dict[str, object]], str]:
    """Return the answers that a version gives in a round, sampled in a store of their own, and their call's key."""
    calls = StageCalls(config)
    with tempfile.TemporaryDirectory() as folder:
        fresh = _Beside(Path(folder), store)
        asked = calls.sample({}, iteration)
        prompts = Done(asked, run_stage(fresh, asked, Context()))
        known = Done(calls.origin(agent), Outcome(version, True, 0.0, {}))
        call = calls.generate(agent, known, prompts, iteration).bound()
        ref = run_stage(fresh, call, Context()).ref
        rows: list[dict[str, object]] = read_answers(ref.path).to_pylist()
        return rows, find_stage("generate").identity(call).key


class _Beside(Store):
    """Publishes in a folder of its own and reads versions where they are."""

    def __init__(self, root: Path, versions: Store) -> None:
        super().__init__(root)
        self._versions = versions

    def folder(self, stage: str, key: str) -> Path:
        own = super().folder(stage, key)
        other = self._versions.folder(stage, key)
        return other if stage in ("update", "warmstart", "adopt") and other.exists() else own

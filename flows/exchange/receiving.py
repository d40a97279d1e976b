"""What a party makes of another party's message: an artifact of its own store, or a refusal."""

import io
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.manifest import Provenance
from hacrl_core.contracts.tables import ANSWERS, CLAIMS, VERDICTS, TableSchema, read_table
from hacrl_core.errors import ContractError
from hacrl_core.exchange.messages import Message, Refused
from hacrl_core.exchange.trial import TrialFailed, try_table
from stages.spec import StageCall, find_stage

# What no two machines need to agree on: how long a verifier was allowed to take.
_UNDECIDED = ("timeout", "error")
_BYTES_PER_CHARACTER = 4
_OVERHEAD = 1 << 20


def largest(rows: int, config: CampaignConfig) -> int:
    """Return how many bytes a table of a round can have."""
    return rows * (config.exchange.max_characters * _BYTES_PER_CHARACTER + 1024) + _OVERHEAD


def check_size(message: Message, path: str, rows: int, config: CampaignConfig) -> None:
    """Raise Refused for a table that is larger than a round's can be, before it is downloaded."""
    most = largest(rows, config)
    size = next((table.bytes for table in message.tables if table.path == path), 0)
    if size > most:
        raise Refused(message.party, "spam", f"{path} of {message.label} has {size} bytes, a round has at most {most}")


def read_answers_of(data: bytes, message: Message, prompts: Sequence[str], config: CampaignConfig) -> list[Any]:
    """Return the rows of an answers table; raise Refused unless they answer exactly this round's prompts."""
    agent, samples = message.agent, config.group_size
    wanted = [f"{message.iteration:06d}/{agent}/{prompt}/{g:02d}" for prompt in prompts for g in range(samples)]
    rows = _rows(data, ANSWERS, message, len(wanted), largest(len(wanted), config))
    if [row["rollout_id"] for row in rows] != wanted or any(
        row["rollout_id"] != f"{message.iteration:06d}/{agent}/{row['prompt_id']}/{row['sample_index']:02d}"
        for row in rows
    ):
        raise Refused(message.party, "unfounded", f"{message.label} does not answer the round's prompts one by one")
    longest = max(len(row["response_text"]) for row in rows)
    if longest > config.exchange.max_characters:
        raise Refused(
            message.party,
            "spam",
            f"{message.label} has a text of {longest} characters, more than {config.exchange.max_characters}",
        )
    limit = config.generation(agent).max_tokens
    # Even an empty text has the token that ended it, and so a claim that a learner needs.
    odd = [r for r in rows if not 1 <= r["tokens"] <= limit or r["finish_reason"] not in ("stop", "length")]
    if odd:
        raise Refused(
            message.party, "unfounded", f"{odd[0]['rollout_id']} claims {odd[0]['tokens']} tokens of 1 to {limit}"
        )
    return rows


def check_claims(data: bytes, message: Message, answers: Sequence[Any], config: CampaignConfig) -> None:
    """Raise Refused unless a claims table claims a possible log-prob for each answer, and for nothing else."""
    rows = _rows(data, CLAIMS, message, len(answers), largest(len(answers), config))
    if len({row["rollout_id"] for row in rows}) != len(rows):
        raise Refused(message.party, "unfounded", f"{message.label} claims several log-probs for one answer")
    tokens = {row["rollout_id"]: row["tokens"] for row in answers}
    for row in rows:
        claimed = row["mean_logprob"]
        if tokens.get(row["rollout_id"]) != row["tokens"]:
            raise Refused(message.party, "unfounded", f"{message.label} is about {row['rollout_id']}, no such answer")
        if not math.isfinite(claimed) or claimed > 1e-6:
            raise Refused(
                message.party, "lie", f"{row['rollout_id']}: a log-prob of {claimed:g} is no log of a probability"
            )
    missing = tokens.keys() - {row["rollout_id"] for row in rows}
    if missing:
        raise Refused(message.party, "unfounded", f"{message.label} has no claim for {min(missing)}")


def check_errors(message: Message, verdicts: Sequence[str], config: CampaignConfig) -> None:
    """Raise Refused for answers at which the verifier fails: their author's own verification fails at them too."""
    errors, most = verdicts.count("error"), config.verify.max_error_share
    if errors > 1 and errors > most * len(verdicts):
        what = f"the verifier fails at {errors} of {len(verdicts)} answers in {message.label}, more than {most:.0%}"
        raise Refused(message.party, "spam", what)


def compare_verdicts(data: bytes, message: Message, own: ArtifactRef, config: CampaignConfig) -> None:
    """Raise Refused where a party's verdicts differ from those that this process computed of the same answers.

    Verdicts that ran out of time say nothing about who is right.
    """
    ours = read_table(own.path / "verdicts.parquet", VERDICTS).to_pylist()
    told_rows = _rows(data, VERDICTS, message, len(ours), largest(len(ours), config))
    theirs = {row["rollout_id"]: row for row in told_rows}
    lies = []
    for row in ours:
        told = theirs.get(row["rollout_id"])
        if told is None:
            raise Refused(message.party, "unfounded", f"{message.label} has no verdict for {row['rollout_id']}")
        if row["verdict"] in _UNDECIDED or told["verdict"] in _UNDECIDED:
            continue
        if (row["verdict"], row["reward"]) != (told["verdict"], told["reward"]):
            lies.append((row, told))
    if lies:
        row, told = lies[0]
        raise Refused(
            message.party,
            "lie",
            f"{len(lies)} of {len(ours)} rewards in {message.label} are wrong, the first that of {row['rollout_id']}: "
            f"{told['verdict']} {told['reward']:g} was published, {row['verdict']} {row['reward']:g} is right",
        )


def import_table(store: Store, call: StageCall, path: str, tag: str, rows: int, data: bytes) -> ArtifactRef:
    """Publish a checked table in this store as the artifact of the other party's share stage, under the same key."""
    identity = find_stage(call.stage).identity(call)
    with store.lock(identity.key):
        if found := store.lookup(identity):
            return found
        staged = store.stage_folder(identity.key)
        (staged / path).write_bytes(data)
        return store.publish(
            staged,
            identity,
            {path: (tag, rows, False)},
            {},
            {"received": True},
            Provenance(started=0.0, finished=0.0, seconds=0.0),
        )


def _rows(data: bytes, schema: TableSchema, message: Message, most_rows: int, most_bytes: int) -> list[Any]:
    """Read a table from another party: exactly the schema's columns and types, or Refused.

    A child reads it first, so that a table that is made to harm its reader harms nobody.
    """
    what = f"{schema.name} of {message.label}"
    try:
        try_table(data, most_rows, most_bytes)
    except TrialFailed as failed:
        raise Refused(message.party, "spam" if failed.too_much else "unfounded", f"{what} {failed}") from None
    try:
        table = pq.ParquetFile(io.BytesIO(data)).read(use_threads=False)
        tag = (table.schema.metadata or {}).get(b"hacrl.schema", b"").decode()
        if not tag.startswith(f"{schema.name}/"):
            raise ContractError(f"it is a table {tag or 'without a schema'}")
        known = table.select(schema.fields.names)
        # A later version may have further columns, never other ones.
        if known.schema.remove_metadata() != schema.fields or (tag == schema.tag and known.shape != table.shape):
            raise ContractError(f"its columns are {', '.join(table.column_names)}")
        rows: list[Any] = known.to_pylist()
    except (ContractError, ValueError, KeyError, OSError, pa.ArrowException) as problem:
        raise Refused(message.party, "unfounded", f"{what} cannot be read ({' '.join(str(problem).split())})") from None
    return rows

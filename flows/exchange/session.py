"""Opens a party's end of the exchange for a campaign: mailbox, outbox, and what stands before runner and executor."""

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from flows.exchange.mailbox import Mailbox, table_of
from flows.exchange.party import PartyRun
from flows.exchange.tokenizers import VOCABULARY, shares_tokenizer
from flows.record.record import Record
from flows.run.events import Listener
from flows.run.executors import Executor
from flows.run.session import Party
from hacrl_core.artifacts import Store
from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.exchange import overlap
from hacrl_core.contracts.tables import VERDICTS, read_table, write_table
from hacrl_core.errors import ConfigError
from hacrl_core.exchange.footers import remove_writer
from hacrl_core.exchange.messages import Kind
from hacrl_core.exchange.signing import public_key_of, read_key
from hacrl_core.problems import load_problems
from stages.spec import Outcome, StageCall, find_stage


@dataclass(frozen=True)
class Exchange:
    """A party's end of the exchange."""

    config: CampaignConfig
    mailbox: Mailbox
    stopped: threading.Event

    def party_run(self, store: Store, record: Record | None, *, local: bool = False) -> PartyRun:
        """Return what stands between the campaign and its runner."""
        return PartyRun(self.config, self.mailbox, store, record, self.stopped, local=local)

    def party(self, store: Store, record: Record) -> Party:
        """Return what a session needs of this end of the exchange."""

        def known() -> Party:
            past = self.party_run(store, None, local=True)
            return Party(past.over, past)

        run = self.party_run(store, record)
        return Party(run.over, run, known)


def open_exchange(config: CampaignConfig, folder: Path, store: Store, warn: Callable[[str], None]) -> Exchange | None:
    """Open the exchange of a campaign that names its party, else None; raise ConfigError where the key does not fit."""
    if config.party is None or config.exchange.bucket is None:
        return None
    private = read_key(config.party.key)
    if public_key_of(private) != config.parties[config.party.name].public_key:
        raise ConfigError(
            f"party.key: it belongs to {public_key_of(private)}, and parties.{config.party.name}.public_key is "
            f"{config.parties[config.party.name].public_key}; use the key of this party"
        )
    behind = getattr(store, "bucket_name", None) or getattr(getattr(store, "bucket", None), "name", None)
    if behind is not None and overlap(behind, config.exchange.bucket.bucket):
        raise ConfigError(
            f"exchange.bucket {config.exchange.bucket.bucket}: it is the bucket behind this home's store, {behind}, "
            "which holds weights, or one lies inside the other; unset HACRL_BUCKET or give the exchange a bucket of "
            "its own"
        )
    _check_policy(config, config.party.name)
    mailbox = Mailbox(config, Bucket(config.exchange.bucket), folder / "exchange", private, warn)
    for party, since in sorted(mailbox.quarantined().items()):
        warn(f"exchange: {party} is in quarantine since round {since + 1}; hacrl exchange status says why")
    return Exchange(config, mailbox, threading.Event())


def _check_policy(config: CampaignConfig, me: str) -> None:
    """Raise ConfigError where this party's own policy withholds nothing: it may be misspelt."""
    policy = config.parties[me].withhold
    if policy is None or load_problems(config.problems, (policy,)).left_out.get("withheld"):
        return
    patterns = [*policy.ids, *(f"{name}: {value}" for name, values in policy.tags.items() for value in values)]
    raise ConfigError(
        f"parties.{me}.withhold: {', '.join(patterns) or 'no pattern'} matches none of this party's problems; "
        "correct it or leave withhold out"
    )


class Outbox(Listener):
    """Sends what others wait for as soon as it is there: a commitment, the answers with their verdicts, the claims.

    Before all of them goes a tokenizer, where the party shares it.
    """

    def __init__(self, exchange: Exchange, store: Store) -> None:
        self._mailbox, self._store, self._config = exchange.mailbox, store, exchange.config
        self._own = exchange.config.parties[exchange.mailbox.me].agents

    def stage_started(self, call: StageCall, why: list[str]) -> None:
        """Commit to a version, prompts and seeds before anything is sampled."""
        if call.stage == "generate" and call.agent in self._own:
            self._commit(call)

    def stage_finished(self, call: StageCall, outcome: Outcome) -> None:
        """Send what this stage completes."""
        if shares_tokenizer(self._config, call):
            self._send_tokenizer(call.agent, outcome.ref.path)
        if call.agent not in self._own or call.iteration is None:
            return
        if call.stage == "generate":
            self._commit(call)
        elif call.stage == "verify":
            answers = call.artifacts["rollouts"]
            tables = {
                "answers.parquet": (answers.path / "answers.parquet").read_bytes(),
                "verdicts.parquet": _verdicts_to_share(outcome.ref.path / "verdicts.parquet"),
            }
            source = self._store.manifest(answers.stage, answers.key).identity.inputs["rollouts"]
            self._send("answers", call, source, tables)
        elif call.stage == "share" and call.variant == "claims":
            claims = (outcome.ref.path / "claims.parquet").read_bytes()
            self._send("claims", call, call.artifacts["scores"].digest, {"claims.parquet": claims})

    def _send_tokenizer(self, agent: str, version: Path) -> None:
        """Send the vocabulary of an agent's first version; later versions have the same."""
        joined = self._config.agents[agent].joins
        if self._mailbox.was_sent("tokenizer", agent, joined):
            return
        tables = {VOCABULARY: (version / "tokenizer.json").read_bytes()}
        described = tuple(table_of(path, data) for path, data in tables.items())
        self._mailbox.send(self._mailbox.message("tokenizer", agent, joined, tables=described), tables)

    def _commit(self, call: StageCall) -> None:
        agent, iteration = call.agent, call.iteration or 0
        if not self._mailbox.was_sent("commit", agent, iteration):
            policy, key = call.artifacts["agent"].digest, find_stage("generate").identity(call).key
            self._mailbox.send(self._mailbox.message("commit", agent, iteration, policy=policy, key=key), {})

    def _send(self, kind: Kind, call: StageCall, source: str, tables: dict[str, bytes]) -> None:
        agent, iteration = call.agent, call.iteration or 0
        if self._mailbox.was_sent(kind, agent, iteration):
            return
        commit = self._mailbox.sent("commit", agent, iteration)
        policy, key = commit.policy, commit.key
        described = tuple(table_of(path, data) for path, data in tables.items())
        message = self._mailbox.message(kind, agent, iteration, policy=policy, key=key, source=source, tables=described)
        self._mailbox.send(message, tables)


def _verdicts_to_share(path: Path) -> bytes:
    """Return the columns of a table of verdicts that may leave: a verifier's own notes and measurements may not."""
    table = read_table(path, VERDICTS)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path.name
        write_table(made, VERDICTS, {name: table[name].to_pylist() for name in VERDICTS.fields.names})
        remove_writer(made)
        return made.read_bytes()


class PartyExecutor:
    """Runs own stages as before, and checks of other parties' answers in the place of an own agent."""

    def __init__(self, inner: Executor, exchange: Exchange) -> None:
        self._inner, self._stopped = inner, exchange.stopped
        self._own = exchange.config.parties[exchange.mailbox.me].agents
        stopped = exchange.stopped
        stopped.clear()

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        """Run the call."""
        if call.agent and call.agent not in self._own:
            return self._inner.run(replace(call, agent=self._own[0]), listener)
        return self._inner.run(call, listener)

    def close(self, *, now: bool) -> None:
        """Stop waiting for other parties, and end what was started."""
        self._stopped.set()
        self._inner.close(now=now)

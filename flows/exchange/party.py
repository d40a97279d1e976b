"""One party's part of a campaign: its own agents' stages run here, all others' are answered by messages.

``PartyRun`` stands between the campaign and a runner. The campaign submits the calls of all agents, as always. Calls of
own agents and the light shared ones go on to the runner. A call of another party's agent becomes a handle that knows
what the party has told: nothing for weights, a digest for rollouts and scores, a table for what it shares.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from flows.exchange.mailbox import Mailbox
from flows.exchange.receiving import (
    check_claims,
    check_errors,
    check_size,
    compare_verdicts,
    import_table,
    read_answers_of,
)
from flows.exchange.rounds import Rounds
from flows.exchange.tokenizers import shares_tokenizer
from flows.exchange.trust import inspect
from flows.record.record import Record
from flows.rounds import Asked, Offered, Runner
from flows.run.runner import CacheMiss, Done
from hacrl_core.artifacts import ArtifactRef, Store
from hacrl_core.config.base import StrictConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.tables import ANSWERS, CLAIMS, PROMPTS, VERDICTS, read_table
from hacrl_core.errors import StageError
from hacrl_core.exchange.messages import Kind, Message, Refused
from stages.runner import lookup
from stages.spec import Handle, Outcome, StageCall, find_stage
from stages.verify import VerifySlice

# Which message tells the digest of a stage's artifact.
_TOLD_BY: dict[str, Kind] = {"generate": "answers", "score": "claims"}


@dataclass
class Elsewhere:
    """A call of another party's agent. Nobody waits for it who does not ask for its outcome."""

    call: StageCall
    resolve: Callable[[StageCall], Outcome]
    _found: Outcome | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def outcome(self) -> Outcome:
        """Return what the other party has told; waits for its message, and raises Refused where it cannot be used."""
        with self._lock:
            self._found = self._found or self.resolve(self.call)
            return self._found

    def done(self) -> bool:
        """Always: a campaign does not wait for other parties' versions."""
        return True

    def failed(self) -> bool:
        """Never."""
        return False


class PartyRun:
    """Submits own calls to a runner, answers others', and says whose answers count (a ``Membership``)."""

    def __init__(
        self,
        config: CampaignConfig,
        mailbox: Mailbox,
        store: Store,
        record: Record | None,
        stopped: threading.Event,
        *,
        local: bool = False,
    ) -> None:
        """``local``: nothing is asked of the bucket, and what is not known here is a CacheMiss."""
        self.config, self.mailbox, self.store, self.record, self.local = config, mailbox, store, record, local
        self.own = config.parties[mailbox.me].agents
        self.rounds = Rounds(config, mailbox, stopped, local=local)
        self.runner: Runner | None = None
        self._stopped = stopped

    # -- the runner ------------------------------------------------------------------------------------------------

    def over(self, runner: Runner) -> "PartyRun":
        """Submit own calls to this runner from now on."""
        self.runner = runner
        return self

    def submit(self, call: StageCall) -> Handle:
        """Pass on what runs here; return a handle for what another party does."""
        assert self.runner is not None
        if call.agent and call.agent not in self.own and call.stage != "verify":
            # Only a shared table is made of something that is told here. Other calls would hold on to all before them.
            known_inputs = call.inputs if call.stage == "share" else {}
            return Elsewhere(replace(call, inputs=known_inputs), self._resolve)
        known = {role: _settled(item) for role, item in call.inputs.items()}
        if call.agent and call.agent not in self.own:
            call = replace(call, config=_forgiving(call.config))
        handle = self.runner.submit(replace(call, inputs=known))
        self._check_sent(call)
        return handle

    def iteration_done(self, iteration: int) -> None:
        """Pass it on, and forget the round: what is needed of it again is on the disk."""
        assert self.runner is not None
        self.rounds.forget(iteration)
        self.mailbox.forget(iteration)
        self.runner.iteration_done(iteration)

    def _check_sent(self, call: StageCall) -> None:
        """In a replay: what others wait for must have been sent."""
        kind: Kind | None = {"verify": "answers", "share": "claims"}.get(call.stage)  # type: ignore[assignment]
        round_ = call.iteration or 0
        if shares_tokenizer(self.config, call):
            kind, round_ = "tokenizer", self.config.agents[call.agent].joins
        if not self.local or kind is None or call.agent not in self.own or call.variant == "answers":
            return
        if not self.mailbox.was_sent(kind, call.agent, round_):
            raise CacheMiss(call.title)

    # -- what others tell --------------------------------------------------------------------------------------------

    def _resolve(self, call: StageCall) -> Outcome:
        if call.stage == "share":
            return self._import(call)
        kind = _TOLD_BY.get(call.stage)
        if kind is None:
            # A version of another party: there is one, and that is all this party ever knows of it.
            return Outcome(ArtifactRef(call.stage, "", "", Path()), True, 0.0, {})
        message = self._await(kind, call.agent, call.iteration or 0)
        key = message.key if call.stage == "generate" else ""
        return Outcome(ArtifactRef(call.stage, key, message.source, Path()), True, 0.0, {})

    def _await(self, kind: Kind, agent: str, iteration: int) -> Message:
        def find() -> Message | None:
            return self.mailbox.find(kind, agent, iteration, local=self.local)

        return self.rounds.wait(find, f"{kind} {agent} round {iteration + 1}", self.config.party_of(agent))

    def _import(self, call: StageCall) -> Outcome:
        """Return the table another party shares as an artifact of this store; raise Refused where it is not sound."""
        bound = call.bound()
        if found := lookup(self.store, bound):
            self._add(bound, found)
            return found
        if self.local:
            raise CacheMiss(call.label)
        kind: Kind = "answers" if call.variant == "answers" else "claims"
        message = self._await(kind, call.agent, call.iteration or 0)
        path = f"{kind}.parquet"
        prompts = self._prompts(call)
        data = b""
        try:
            check_size(message, path, len(prompts) * self.config.group_size, self.config)
            data = self.mailbox.fetch(message, path)
            if kind == "answers":
                self._check_commitment(call, message)
                rows = len(read_answers_of(data, message, prompts, self.config))
                tag = ANSWERS.tag
            else:
                answers = self._answers_of(call.agent, call.iteration or 0)
                check_claims(data, message, answers, self.config)
                rows, tag = len(answers), CLAIMS.tag
        except Refused as refused:
            evidence = {"message.json": self.mailbox.sealed(message), path: data}
            self.mailbox.refuse(refused, evidence, message.iteration)
            raise
        ref = import_table(self.store, bound, path, tag, rows, data)
        outcome = Outcome(ref, False, 0.0, {})
        self._add(bound, outcome)
        return outcome

    def _add(self, call: StageCall, outcome: Outcome) -> None:
        if self.record is not None:
            self.record.add(call, outcome)

    def _prompts(self, call: StageCall) -> list[str]:
        ref = self.rounds.prompts[call.iteration or 0]
        ids: list[str] = read_table(ref.path / "prompts.parquet", PROMPTS)["prompt_id"].to_pylist()
        return ids

    def _answers_of(self, agent: str, iteration: int) -> list[dict[str, object]]:
        ref = self.rounds.answers[agent, iteration]
        rows: list[dict[str, object]] = read_table(ref.path / "answers.parquet", ANSWERS).to_pylist()
        return rows

    def _check_commitment(self, call: StageCall, message: Message) -> None:
        """Raise Refused unless the answers are of the version and call that the party committed itself to before."""
        commit = self.mailbox.find("commit", message.agent, message.iteration)
        if commit is None:
            # Whoever can write to the bucket can have removed it: no reason for a quarantine.
            raise Refused(message.party, "altered", f"the commitment before the {message.label} is missing")
        if (commit.policy, commit.key) != (message.policy, message.key):
            raise Refused(message.party, "unfounded", f"{message.label} is not what the party committed itself to")
        source = call.inputs["rollouts"]
        assert not isinstance(source, ArtifactRef)
        generate = replace(
            source.call,
            inputs={
                "agent": ArtifactRef("update", "", message.policy, Path()),
                "prompts": self.rounds.prompts[message.iteration],
            },
        )
        if find_stage("generate").identity(generate).key != message.key:
            raise Refused(
                message.party, "unfounded", f"{message.label} was made with other prompts, settings or seed than agreed"
            )

    # -- membership --------------------------------------------------------------------------------------------------

    def answered(self, iteration: int, asked: Asked) -> Sequence[str]:
        """Return the agents whose answers are in the round and sound."""
        self.rounds.prompts[iteration] = asked.prompts.outcome().ref
        agents = list(asked.answers)
        members = self.rounds.answered[iteration] = self.rounds.members("answers", iteration, agents)
        found = []
        for agent in agents:
            if agent in self.own:
                found += [agent] if agent in members else []
            elif agent in members and not self._is_quarantined(agent, iteration):
                try:
                    self.rounds.answers[agent, iteration] = asked.answers[agent].outcome().ref
                    found.append(agent)
                except Refused:
                    continue
        return found

    def trusted(self, iteration: int, learner: str, heard: Sequence[str], offered: Offered) -> Sequence[str]:
        """Return the samplers that a learner of this party learns from, once everything that can be checked was."""
        if learner not in self.own:
            return heard
        foreign = [s for s in heard if s not in self.own]
        claims = self.config.objective(learner).foreign_treatment != "as_own"
        members: Sequence[str] = heard
        if claims and foreign:
            offered.scores[learner].outcome()
            # Nobody waits for the claims of who was late with the answers.
            asked = [a for a in offered.claims if a in self.rounds.answered[iteration]]
            members = self.rounds.members("claims", iteration, asked)
        kept = [s for s in heard if s in self.own]
        for sampler in foreign:
            if sampler in members and not self._is_quarantined(sampler, iteration):
                try:
                    self._check(iteration, learner, sampler, offered, claims=claims)
                    kept.append(sampler)
                except Refused as refused:
                    self.mailbox.refuse(refused, self._shared_by(sampler, iteration, offered), iteration)
        return [s for s in heard if s in kept]

    def _shared_by(self, sampler: str, iteration: int, offered: Offered) -> dict[str, bytes]:
        """What a sampler has shared in a round, as evidence."""
        found = {"answers.parquet": (self.rounds.answers[sampler, iteration].path / "answers.parquet").read_bytes()}
        for kind in ("answers", "claims"):
            message = self.mailbox.find(kind, sampler, iteration, local=self.local)
            if message is not None:
                found[f"{kind}.message.json"] = self.mailbox.sealed(message)
        with suppress(Refused, CacheMiss):
            if sampler in offered.claims:
                claims = offered.claims[sampler].outcome().ref
                found["claims.parquet"] = (claims.path / "claims.parquet").read_bytes()
        return found

    def _check(self, iteration: int, learner: str, sampler: str, offered: Offered, *, claims: bool) -> None:
        """Raise Refused where a sampler's verdicts are wrong or its answers cannot be what it says they are."""
        message = self._await("answers", sampler, iteration)
        own = offered.verdicts[sampler].outcome().ref
        proof = self.mailbox.folder / "checked" / f"{iteration:06d}-{sampler}-{own.digest[:16]}"
        if not proof.exists():
            if self.local:
                raise CacheMiss(f"verdicts of {sampler} in round {iteration + 1}")
            told = b""
            try:
                judged = read_table(own.path / "verdicts.parquet", VERDICTS)
                check_errors(message, judged["verdict"].to_pylist(), self.config)
                check_size(message, "verdicts.parquet", judged.num_rows, self.config)
                told = self.mailbox.fetch(message, "verdicts.parquet")
                compare_verdicts(told, message, own, self.config)
            except Refused as refused:
                mine = (own.path / "verdicts.parquet").read_bytes()
                answers = (self.rounds.answers[sampler, iteration].path / "answers.parquet").read_bytes()
                evidence = {"published-verdicts.parquet": told, "right-verdicts.parquet": mine}
                signed = self.mailbox.sealed(message)
                self.mailbox.refuse(
                    refused, {**evidence, "answers.parquet": answers, "message.json": signed}, iteration
                )
                raise
            proof.parent.mkdir(parents=True, exist_ok=True)
            proof.touch()
        claimed = offered.claims[sampler].outcome().ref if claims else None
        inspect(
            self.config,
            learner,
            message,
            self.rounds.answers[sampler, iteration],
            claimed,
            offered.scores[learner].outcome().ref,
            offered.asked.rollouts[learner].outcome().ref,
            own,
        )

    def _is_quarantined(self, agent: str, iteration: int) -> bool:
        caught = self.mailbox.quarantined().get(self.config.party_of(agent))
        return caught is not None and iteration >= caught


def _forgiving(verify: StrictConfig) -> StrictConfig:
    """Settings of a verification that does not fail where the verifier does: another party must not end this campaign.

    ``check_errors`` looks at the verdicts instead.
    """
    assert isinstance(verify, VerifySlice)
    return verify.model_copy(update={"verify": verify.verify.model_copy(update={"max_error_share": 1.0})})


def _settled(item: "ArtifactRef | Handle") -> "ArtifactRef | Handle":
    """Another party's table that is known counts as done, so that the runner can look the call up at once."""
    if not isinstance(item, Elsewhere):
        return item
    outcome = item.outcome()
    if not outcome.ref.digest:
        raise StageError(f"{item.call.title}: it belongs to another party, which does not share it")
    return Done(item.call, outcome)

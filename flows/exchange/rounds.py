"""Who is in a round: everyone, or whoever is there when the round closes.

The bucket's clock decides. The first party that finds everyone there, or the deadline past, writes the closing; it is
created once, so that all parties read the same one.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Literal

from flows.exchange.mailbox import Closing, Mailbox
from flows.run.runner import CacheMiss
from flows.run.worker import Stopped
from hacrl_core.artifacts import ArtifactRef
from hacrl_core.artifacts.leases import ServerClock
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.exchange.messages import PROVEN, Message, Refused

Phase = Literal["answers", "claims"]
# Objects have times in whole seconds.
_ROUNDING = 2.0


class Rounds:
    """The rounds of one campaign as one party sees them."""

    def __init__(self, config: CampaignConfig, mailbox: Mailbox, stopped: threading.Event, *, local: bool) -> None:
        self.prompts: dict[int, ArtifactRef] = {}
        self.answers: dict[tuple[str, int], ArtifactRef] = {}
        # Who was in a round when its answers were closed.
        self.answered: dict[int, Sequence[str]] = {}
        self._config, self._mailbox, self._stopped, self._local = config, mailbox, stopped, local
        self._clock = ServerClock(mailbox.bucket)

    def forget(self, iteration: int) -> None:
        """Let go of the rounds up to this one."""
        self.prompts = {i: ref for i, ref in self.prompts.items() if i > iteration}
        self.answers = {place: ref for place, ref in self.answers.items() if place[1] > iteration}
        self.answered = {i: agents for i, agents in self.answered.items() if i > iteration}

    def wait(self, find: Callable[[], Message | None], what: str, party: str) -> Message:
        """Ask until there is a message; a campaign that ends stops waiting."""
        while (found := find()) is None:
            if self._local:
                raise CacheMiss(what)
            self.pause(what, party)
        return found

    def pause(self, what: str, party: str) -> None:
        """Wait a moment for another party; raise Stopped where the campaign ends."""
        if self._stopped.wait(self._config.exchange.poll_seconds):
            raise Stopped(f"{what}: the campaign ended while waiting for {party}")

    def members(self, phase: Phase, iteration: int, agents: Sequence[str]) -> Sequence[str]:
        """Return who is in a round; waits for everyone, or for the round to close."""
        if self._config.exchange.round_seconds is None:
            return self._everyone(phase, iteration, agents)
        found = self._closed(phase, iteration, agents, self._config.exchange.round_seconds)
        absent = [a for a in agents if a not in found]
        for agent in absent:
            party = self._config.party_of(agent)
            when = f"round {iteration + 1} closed without the {phase} of {agent}"
            self._mailbox.refuse(Refused(party, "late", when), {}, iteration)
        return found

    def _everyone(self, phase: Phase, iteration: int, agents: Sequence[str]) -> list[str]:
        present = []
        for agent in agents:
            party = self._config.party_of(agent)
            if party == self._mailbox.me:
                present.append(agent)
                continue
            caught = self._mailbox.quarantined().get(party)
            if caught is not None and iteration >= caught:
                continue
            try:
                self.wait(
                    lambda a=agent: self._mailbox.find(phase, a, iteration, local=self._local),  # type: ignore[misc]
                    f"{phase} {agent} round {iteration + 1}",
                    party,
                )
                present.append(agent)
            except Refused:
                continue
        return present

    def _closed(self, phase: Phase, iteration: int, agents: Sequence[str], seconds: float) -> Sequence[str]:
        """Return the members of a closed round; close it where everyone is there or the time is up."""
        kept = self._mailbox.kept_closing(phase, iteration)
        if kept is not None:
            return [a for a in agents if a in kept.members]
        if self._local:
            raise CacheMiss(f"closing of round {iteration + 1}")
        ends = self._began(iteration) + seconds * (1 if phase == "answers" else 2)
        while True:
            known = self._closing(phase, iteration, agents, ends)
            if known is not None:
                return known
            present = tuple(a for a in agents if self._is_there(phase, a, iteration))
            if len(present) == len(agents) or self._clock.now() > ends + _ROUNDING:
                self._mailbox.close_round(phase, iteration, present)
                known = self._closing(phase, iteration, agents, ends)
                if known is None:
                    # The closing that stands is false. All who find that decide by the same times.
                    known = tuple(a for a in present if self._sent_by(phase, a, iteration, ends))
                    self._mailbox.decide_round(phase, iteration, known)
                return known
            else:
                self.pause(f"{phase} round {iteration + 1}", "other parties")

    def _began(self, iteration: int) -> float:
        """Return when a round began: when it was opened, and not before the round before it was closed.

        So nobody shortens a round by opening it ahead of time.
        """
        # Everyone waits for the closing of answers before going on. A late party may write one of claims long after
        # that, and later closings would then look early.
        before = self._mailbox.closed_at("answers", iteration - 1) if iteration else 0.0
        return max(self._mailbox.opened(iteration), before)

    def _closing(self, phase: Phase, iteration: int, agents: Sequence[str], ends: float) -> Sequence[str] | None:
        """Return the members of a round that somebody has closed as it must be; None where nobody has."""
        found: Closing | None = None
        try:
            found = self._mailbox.closing(phase, iteration)
            if found is None:
                return None
            self._check_absent(found, phase, agents, ends)
        except Refused as refused:
            evidence = {} if found is None else {"message.json": found.raw}
            self._mailbox.refuse(refused, evidence, iteration)
            return None
        members = [a for a in agents if a in found.message.members]
        by = found.at + _ROUNDING
        unheard = [
            a for a in members if not (self._is_there(phase, a, iteration) and self._sent_by(phase, a, iteration, by))
        ]
        if unheard:
            # Its author lies, or somebody removed the answers since: nobody can tell. Others must not wait for them.
            # Where they came after the closing, who looked before that has found it false.
            what = f"the closing of round {iteration + 1} names {', '.join(unheard)}, whose {phase} were not there"
            self._mailbox.refuse(Refused(found.message.party, "altered", what), {"message.json": found.raw}, iteration)
            return None
        self._mailbox.keep_closing(phase, iteration, found)
        return members

    def _check_absent(self, closing: Closing, phase: Phase, agents: Sequence[str], ends: float) -> None:
        """Raise Refused where a closing leaves somebody out before the time is up, or who was there in time.

        Nobody is quarantined for it: whoever can write to the bucket can move a round's beginning.
        """
        message = closing.message
        missing = [a for a in agents if a not in message.members]
        if missing and closing.at < ends - _ROUNDING:
            what = f"round {message.iteration + 1} was closed {ends - closing.at:.0f} s early, without "
            raise Refused(message.party, "early", what + ", ".join(missing))
        for agent in missing:
            # Who closes honestly looks after the time is up, and so sees everything that was written before.
            in_time = self._sent_by(phase, agent, message.iteration, ends - _ROUNDING)
            if in_time and self._is_there(phase, agent, message.iteration):
                what = (
                    f"the closing of round {message.iteration + 1} leaves out {agent}, whose {phase} were there in time"
                )
                raise Refused(message.party, "altered", what)

    def _sent_by(self, phase: Phase, agent: str, iteration: int, time: float) -> bool:
        """Whether the message in an agent's place was written by this time of the bucket's clock."""
        sent = self._mailbox.sent_at(phase, agent, iteration)
        return sent is not None and sent <= time

    def _is_there(self, phase: Phase, agent: str, iteration: int) -> bool:
        # A message of our own is in the bucket a moment before this home notes that it was sent, and others may have
        # closed the round with it in that moment: so the bucket is asked here too.
        own = self._config.party_of(agent) == self._mailbox.me
        if own and self._mailbox.was_sent(phase, agent, iteration):
            return True
        try:
            return self._mailbox.find(phase, agent, iteration) is not None
        except Refused as refused:
            return refused.reason not in PROVEN

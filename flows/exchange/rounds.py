"""Who is in a round: everyone, or whoever is there when the round closes.

The bucket's clock decides. The first party that finds everyone there, or the deadline past, writes the closing; it is
created once, so that all parties read the same one.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Literal

from flows.exchange.mailbox import Mailbox
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
        self._config, self._mailbox, self._stopped, self._local = config, mailbox, stopped, local
        self._clock = ServerClock(mailbox.bucket)

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
            when = f"round {iteration} closed without the {phase} of {agent}"
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
                    f"{phase} {agent} #{iteration}",
                    party,
                )
                present.append(agent)
            except Refused:
                continue
        return present

    def _closed(self, phase: Phase, iteration: int, agents: Sequence[str], seconds: float) -> Sequence[str]:
        """Return the members of a closed round; close it where everyone is there or the time is up."""
        known = self._closing(phase, iteration, agents, None)
        if known is not None:
            return known
        if self._local:
            raise CacheMiss(f"closing of round {iteration}")
        ends = self._mailbox.opened(iteration) + seconds * (1 if phase == "answers" else 2)
        while True:
            known = self._closing(phase, iteration, agents, ends)
            if known is not None:
                return known
            present = tuple(a for a in agents if self._is_there(phase, a, iteration))
            if len(present) == len(agents) or self._clock.now() > ends + _ROUNDING:
                self._mailbox.close_round(phase, iteration, present)
                if self._early(phase, iteration, agents, ends) is not None:
                    self._mailbox.decide_round(phase, iteration, present)
                    return present
            else:
                self.pause(f"{phase} #{iteration}", "other parties")

    def _closing(self, phase: Phase, iteration: int, agents: Sequence[str], ends: float | None) -> Sequence[str] | None:
        try:
            found = self._mailbox.closing(phase, iteration)
        except Refused as refused:
            self._mailbox.refuse(refused, {}, iteration)
            return None
        if found is None or (ends is None and found[1]):
            return None
        if ends is not None and self._early(phase, iteration, agents, ends) is not None:
            return None
        self._mailbox.keep_closing(phase, iteration)
        return [a for a in agents if a in found[0].members]

    def _early(self, phase: Phase, iteration: int, agents: Sequence[str], ends: float) -> Refused | None:
        """Return why a closing does not count: it leaves somebody out before the time is up."""
        try:
            found = self._mailbox.closing(phase, iteration)
        except Refused as refused:
            return refused
        if found is None:
            return None
        message, at = found
        missing = [a for a in agents if a not in message.members]
        if not missing or at == 0.0 or at >= ends - _ROUNDING:
            return None
        early = Refused(
            message.party, "lie", f"round {iteration} was closed {ends - at:.0f} s early, without {', '.join(missing)}"
        )
        self._mailbox.refuse(early, {"message.json": message.model_dump_json().encode()}, iteration)
        return early

    def _is_there(self, phase: Phase, agent: str, iteration: int) -> bool:
        if self._config.party_of(agent) == self._mailbox.me:
            return self._mailbox.was_sent(phase, agent, iteration)
        try:
            return self._mailbox.find(phase, agent, iteration) is not None
        except Refused as refused:
            return refused.reason not in PROVEN

"""The messages of an exchange in its bucket: ``exchange/<campaign>/<party>/<round>/<agent>.<kind>.json`` and tables
beside them.

A party writes below its own name only, each message once. What it has read and found right is kept in the campaign's
folder, so that a campaign that is run again asks the bucket for nothing it knows.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hacrl_core.artifacts.bucket import Bucket, Stat
from hacrl_core.artifacts.files import replace_synced
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.manifest import digest_of
from hacrl_core.errors import BucketError, ConfigError
from hacrl_core.exchange.messages import PROVEN, QUARANTINE, Kind, Message, Refused, Table, check_place, seal, unseal

T = TypeVar("T")
# Settings of one machine: parties may differ in them.
_OWN_BUSINESS = {
    *("party", "store", "runtime", "tracking", "schedule", "keep", "exchange", "parties", "agents"),
    *("iterations", "evaluate"),
}
_OWN_OF_AGENTS = {"checkpoint", "device", "gpus", "attention", "node", "joins", "leaves"}
# A bucket that is away is asked again so often, in seconds.
_PATIENCE = 5.0
# A message has a few hundred bytes. Nothing larger is downloaded.
_LARGEST_MESSAGE = 1 << 16
_MOST_EVIDENCE = 8


def campaign_digest(config: CampaignConfig, iteration: int) -> str:
    """Return the digest of the settings that all parties of a round must share: no message of another campaign fits.

    Only who takes part in the round counts, so that an agent that joins or leaves later changes nothing before that.
    """
    present = config.present(iteration)
    # Without defaults: a setting that a later version adds must not part the parties that have not set it.
    shared = config.model_dump(mode="json", exclude=_OWN_BUSINESS, exclude_defaults=True)
    shared["agents"] = {
        name: agent.model_dump(mode="json", exclude=_OWN_OF_AGENTS, exclude_defaults=True)
        for name, agent in config.agents.items()
        if name in present
    }
    shared["parties"] = {
        name: {**party.model_dump(mode="json", exclude_defaults=True), "agents": here}
        for name, party in config.parties.items()
        if (here := [agent for agent in party.agents if agent in present])
    }
    shared["staleness"] = config.exchange.staleness
    return digest_of(shared)


@dataclass(frozen=True)
class Closing:
    """Who is in a round as somebody signed it, and when it was written by the bucket's clock."""

    message: Message
    at: float
    raw: bytes


class Mailbox:
    """Reads and writes the messages of one campaign as one party."""

    def __init__(
        self, config: CampaignConfig, bucket: Bucket, folder: Path, private: str, warn: Callable[[str], None]
    ) -> None:
        self.config, self.bucket, self.folder = config, bucket, folder
        self.me = config.party.name if config.party is not None else ""
        self._campaigns: dict[tuple[str, ...], str] = {}
        self.keys = {name: party.public_key for name, party in config.parties.items()}
        self.sent_bytes = self.received_bytes = 0
        self._private, self._warn = private, warn
        self._away = False
        # What was read of rounds that are not over; by its place.
        self._known: dict[str, Message] = {}
        self._lock = threading.Lock()
        # How often somebody was refused for a reason in a round.
        self._told: Counter[tuple[str, str, int]] = Counter()

    def forget(self, iteration: int) -> None:
        """Let go of what was read of rounds up to this one; it is on the disk."""
        with self._lock:
            self._known = {place: m for place, m in self._known.items() if m.iteration > iteration}

    def campaign(self, iteration: int) -> str:
        """Return the digest of what all parties of a round must share."""
        present = tuple(self.config.present(iteration))
        if present not in self._campaigns:
            self._campaigns[present] = campaign_digest(self.config, iteration)
        return self._campaigns[present]

    # -- write -----------------------------------------------------------------------------------------------------

    def message(self, kind: Kind, agent: str, iteration: int, **fields: object) -> Message:
        """Return a message of this party."""
        plain = {
            "campaign": self.campaign(iteration),
            "kind": kind,
            "party": self.me,
            "agent": agent,
            "iteration": iteration,
        }
        return Message.model_validate({**plain, **fields})

    def was_sent(self, kind: Kind, agent: str, iteration: int) -> bool:
        """Whether this party knows that its message is in the bucket."""
        return (self.folder / "sent" / path_of(self.me, kind, agent, iteration)).exists()

    def sent(self, kind: Kind, agent: str, iteration: int) -> Message:
        """Return a message that this party has sent."""
        raw = (self.folder / "sent" / path_of(self.me, kind, agent, iteration)).read_bytes()
        return Message.model_validate(json.loads(raw)["message"])

    def send(self, message: Message, tables: Mapping[str, bytes]) -> None:
        """Write tables, then the message that names them; waits while the bucket is away. A message stands once sent.

        What somebody else wrote in our place is overwritten. So is a message of our own that says something else: it is
        one of an earlier attempt, or was brought here from one, and its tables are no longer there.
        """
        place = path_of(self.me, message.kind, message.agent, message.iteration)
        raw = seal(message, self._private)
        for path, data in tables.items():
            self._patiently(lambda p=path, d=data: self.bucket.write(self.table_path(message, p), d))  # type: ignore[misc]
        if not self._patiently(lambda: self.bucket.create(self.object_path(place), raw)):
            try:
                found = unseal(self._read(place, self.me, _LARGEST_MESSAGE) or b"", self.me, self.keys, place)
                check_place(found, message, self.config.parties[self.me].agents, place)
                if found != message:
                    raise Refused(self.me, "replayed", f"{place} is an earlier message of this party")
            except Refused as refused:
                self._warn(f"exchange: {refused}; it stood in our place and was replaced")
                self._patiently(lambda: self.bucket.write(self.object_path(place), raw))
        self._keep("sent", place, raw)
        self.sent_bytes += len(raw) + sum(map(len, tables.values()))

    def close_round(self, phase: str, iteration: int, members: tuple[str, ...]) -> None:
        """Close a round with these agents, unless somebody has closed it."""
        raw = self._closing_of(phase, iteration, members)
        self._patiently(lambda: self.bucket.create(self.object_path(round_path(phase, iteration)), raw))

    def decide_round(self, phase: str, iteration: int, members: tuple[str, ...]) -> None:
        """Remember who was there where the closing in the bucket cannot be used."""
        self._keep("received", round_path(phase, iteration), self._closing_of(phase, iteration, members))

    def _closing_of(self, phase: str, iteration: int, members: tuple[str, ...]) -> bytes:
        return seal(self.message("closing", "", iteration, members=members, source=phase), self._private)

    # -- read ------------------------------------------------------------------------------------------------------

    def find(self, kind: Kind, agent: str, iteration: int, *, local: bool = False) -> Message | None:
        """Return another party's message, or None where there is none (yet) that can be used.

        A message that is refused counts as absent, and the campaign is told once whose it is and why. A reason that
        only the party itself can have caused is raised. Where one that was read before does not fit the config any
        more, ConfigError.
        """
        party = self.config.party_of(agent)
        place = path_of(party, kind, agent, iteration)
        if place in self._known:
            return self._known[place]
        try:
            raw = (self.folder / "received" / place).read_bytes()
        except FileNotFoundError:
            raw = b""
        from_disk = bool(raw)
        try:
            if not raw and not local:
                raw = self._read(place, party, _LARGEST_MESSAGE) or b""
            if not raw:
                return None
            message = unseal(raw, party, self.keys, place)
            expected = Message(
                campaign=self.campaign(iteration), kind=kind, party=party, agent=agent, iteration=iteration
            )
            check_place(message, expected, self.config.parties[party].agents, place)
        except Refused as refused:
            if from_disk:
                # It was found right once and stands in the home since: the config is another one now.
                raise ConfigError(
                    f"round {iteration + 1}: {refused}, by this config; a campaign goes on with the keys and settings "
                    "that its rounds were signed for: restore them, or give the campaign another name"
                ) from None
            self.refuse(refused, {"message.json": raw}, iteration)
            if refused.reason in PROVEN:
                raise
            return None
        if not from_disk:
            self._keep("received", place, raw)
            self.received_bytes += len(raw)
        with self._lock:
            self._known[place] = message
        return message

    def peek(self, place: str, party: str | None) -> Message | None:
        """Return what a party, or any of them, has signed in a place of the bucket now; nothing is kept."""
        raw = self._read(place, party or "somebody", _LARGEST_MESSAGE)
        signer = party or _signer(raw or b"")
        if raw is None or signer not in self.keys:
            return None
        return unseal(raw, signer, self.keys, place)

    def fetch(self, message: Message, path: str) -> bytes:
        """Return a table that travels with a message; raise Refused where it is not what was signed.

        No more bytes are downloaded than the message says; whether it may say so many is ``check_size``'s business.
        """
        table = next((t for t in message.tables if t.path == path), None)
        if table is None:
            raise Refused(message.party, "unfounded", f"{message.label} comes without {path}")
        place = f"{message.party}/{message.iteration:06d}/{message.agent}.{path}"
        data: bytes | None = None
        for attempt in range(3):
            with suppress(Refused):
                data = self._read(place, message.party, table.bytes)
            if data is not None and hashlib.sha256(data).hexdigest() == table.sha256:
                self.received_bytes += len(data)
                return data
            time.sleep(self.config.exchange.poll_seconds * attempt)
        refused = Refused(message.party, "altered", f"{path} of {message.label} is not what was signed, or missing")
        self.refuse(refused, {"message.json": self.sealed(message), path: data or b""}, message.iteration)
        raise refused

    def kept_closing(self, phase: str, iteration: int) -> Message | None:
        """Return the closing of a round that this party has found right or has decided on itself."""
        kept = self.folder / "received" / round_path(phase, iteration)
        return Message.model_validate(json.loads(kept.read_bytes())["message"]) if kept.exists() else None

    def closing(self, phase: str, iteration: int) -> Closing | None:
        """Return how a round was closed; raise Refused where no party signed that."""
        place = round_path(phase, iteration)
        raw = self._read(place, "somebody", _LARGEST_MESSAGE)
        stat = self._stat(self.object_path(place))
        if raw is None or stat is None:
            return None
        signer = _signer(raw)
        if signer not in self.keys:
            raise Refused("somebody", "unsigned", f"{place} names no party as its author")
        message = unseal(raw, signer, self.keys, place)
        if (message.campaign, message.kind, message.iteration, message.source) != (
            self.campaign(iteration),
            "closing",
            iteration,
            phase,
        ):
            raise Refused(signer, "replayed", f"{place} was signed for another round")
        return Closing(message, stat.modified, raw)

    def keep_closing(self, phase: str, iteration: int, closing: Closing) -> None:
        """Keep a closing that was found right; what stands in the bucket by now may be another one."""
        self._keep("received", round_path(phase, iteration), closing.raw)

    def sent_at(self, kind: Kind, agent: str, iteration: int) -> float | None:
        """Return when the message that stands in an agent's place was written, by the bucket's clock."""
        stat = self._stat(self.object_path(path_of(self.config.party_of(agent), kind, agent, iteration)))
        return None if stat is None else stat.modified

    def closed_at(self, phase: str, iteration: int) -> float:
        """Return when somebody closed a round, by the bucket's clock, whatever the closing says; 0 if nobody did."""
        stat = self._stat(self.object_path(round_path(phase, iteration)))
        return stat.modified if stat is not None else 0.0

    def opened(self, iteration: int) -> float:
        """Return when a round was opened, by the bucket's clock; the first who asks opens it."""
        path = self.object_path(f"rounds/{iteration:06d}/open")
        stat = self._stat(path)
        if stat is None:
            self._patiently(lambda: self.bucket.create(path, b""))
            stat = self._stat(path)
        return stat.modified if stat is not None else time.time()

    # -- refusals --------------------------------------------------------------------------------------------------

    def refuse(self, refused: Refused, evidence: Mapping[str, bytes], iteration: int = 0) -> None:
        """Say once what was refused, and keep the evidence: what has evidence was told before.

        Of one party and reason in a round only the first few are kept: words that change with every look must fill no
        disk.
        """
        who = refused.party if refused.party in self.keys else "somebody"
        name = hashlib.sha256(f"{iteration}: {refused}".encode()).hexdigest()[:12]
        folder = self.folder / "evidence" / f"{who}-{refused.reason}-{name}"
        if (folder / "why.json").exists() or self._told[who, refused.reason, iteration] >= _MOST_EVIDENCE:
            return
        self._told[who, refused.reason, iteration] += 1
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in evidence.items():
            (folder / Path(path).name).write_bytes(data)
        about = {"party": who, "reason": refused.reason, "what": refused.what, "iteration": iteration}
        replace_synced(folder / "why.json", json.dumps(about, indent=1))
        self._warn(f"exchange: {refused}; the evidence is in {folder}")

    def sealed(self, message: Message) -> bytes:
        """Return the bytes in which another party's message came, with its signature: evidence for others."""
        kept = self.folder / "received" / path_of(message.party, message.kind, message.agent, message.iteration)
        return kept.read_bytes() if kept.exists() else message.model_dump_json().encode()

    def quarantined(self) -> dict[str, int]:
        """Return the parties that were caught, and the round of each: from then on nothing of theirs is used."""
        caught: dict[str, int] = {}
        for path in (self.folder / "evidence").glob("*/why.json"):
            about = json.loads(path.read_text())
            if about["reason"] in QUARANTINE:
                caught[about["party"]] = min(about["iteration"], caught.get(about["party"], about["iteration"]))
        return caught

    def object_path(self, place: str) -> str:
        """Return the name of an object in the bucket."""
        return f"exchange/{self.config.name}/{place}"

    def table_path(self, message: Message, path: str) -> str:
        """Return the name of a table in the bucket."""
        return self.object_path(f"{message.party}/{message.iteration:06d}/{message.agent}.{path}")

    def _keep(self, where: str, place: str, raw: bytes) -> None:
        path = self.folder / where / place
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_synced(path, raw.decode())

    def _read(self, place: str, party: str, most: int) -> bytes | None:
        """Return an object's bytes, or None where there is none; raise Refused for one that is too large."""
        path = self.object_path(place)
        stat = self._stat(path)
        if stat is not None and stat.size > most:
            raise Refused(party, "altered", f"{place} has {stat.size} bytes, and at most {most} can be right")
        return None if stat is None else self._unlocked(path, lambda: self.bucket.read(path, most))

    def _stat(self, path: str) -> Stat | None:
        return self._unlocked(path, lambda: self.bucket.stat(path))

    def _unlocked(self, path: str, request: Callable[[], T | None]) -> T | None:
        """Ask about an object that whoever wrote it may have locked: it counts as absent, and ends no campaign."""
        try:
            return self._patiently(request)
        except ConfigError:
            # Where the rights of this party itself are too few, this is refused as well.
            self._patiently(lambda: self.bucket.stat(self.object_path(f"{self.me}/rights")))
            self.refuse(Refused("somebody", "altered", f"{path} cannot be read with the rights of this party"), {})
            return None

    def _patiently(self, request: Callable[[], T]) -> T:
        """Ask the bucket, again and again while it is away; say so once each time it goes away."""
        while True:
            try:
                answer = request()
                self._away = False
                return answer
            except BucketError as problem:
                new, self._away = not self._away, True
                if new:
                    self._warn(f"exchange: {problem}; trying again every {_PATIENCE:g} s")
                time.sleep(_PATIENCE)


def path_of(party: str, kind: Kind, agent: str, iteration: int) -> str:
    """Return where a message stands, below the campaign."""
    return f"{party}/{iteration:06d}/{agent}.{kind}.json"


def round_path(phase: str, iteration: int) -> str:
    """Return where the closing of a round stands, below the campaign."""
    return f"rounds/{iteration:06d}/{phase}.json"


def table_of(path: str, data: bytes) -> Table:
    """Describe a table that travels with a message."""
    return Table(path=path, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def _signer(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["message"]["party"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""

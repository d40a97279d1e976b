"""A message of a party: what it says about one agent in one round, signed.

An object in the bucket is ``{"message": {...}, "signature": "..."}``; the signature is over the canonical JSON of the
message. Tables travel beside it, and the message has their digests. Reading one ends in a message that is what it
claims to be, or in a refusal with a name.
"""

import json
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from hacrl_core.config.base import StrictModel
from hacrl_core.contracts.manifest import canonical_json
from hacrl_core.errors import HacrlError
from hacrl_core.exchange.signing import is_signed_by, sign

Kind = Literal["commit", "answers", "claims", "closing", "tokenizer"]
Reason = Literal[
    "unsigned",
    "altered",
    "replayed",
    "foreign-named",
    "late",
    "early",
    "alien",
    "unfounded",
    "spam",
    "lie",
    "implausible",
]
# Reasons that only the holder of the key can have caused: whoever sees one of these knows who lied. A replay is none of
# them, since whoever can write to the bucket can copy a signed message to another place.
PROVEN: tuple[Reason, ...] = ("unfounded", "spam", "lie")
# Reasons for which nothing of a party is used any more.
QUARANTINE: tuple[Reason, ...] = (*PROVEN, "implausible")
# A refusal repeats words of whoever is refused, on terminals and in file names.
_LONGEST = 400


class Table(StrictModel):
    """A file that travels with a message."""

    path: str
    sha256: str
    bytes: int = Field(ge=0)


class Message(StrictModel):
    """What a party says. It has no field for metrics, packages, hardware or weights."""

    version: Literal[1] = 1
    # Digest of the settings that all parties must share.
    campaign: str
    kind: Kind
    party: str
    agent: str = ""
    iteration: int = Field(ge=0, lt=10**6)
    # Content digest of the version that answers; the weights themselves stay where they are.
    policy: str = ""
    # Key of the generate stage: prompts, sampling settings, seed and policy in one digest.
    key: str = ""
    # Content digest of the artifact that the tables were made of.
    source: str = ""
    tables: tuple[Table, ...] = ()
    # Of a closing: the agents that are in the round.
    members: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name that people read."""
        return f"{self.kind} of {self.agent or self.party} in round {self.iteration + 1}"


class Refused(HacrlError):
    """A message that is not used, and why."""

    def __init__(self, party: str, reason: Reason, what: str) -> None:
        what = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in what[:_LONGEST])
        super().__init__(f"{party}: {reason}: {what}")
        self.party, self.reason, self.what = party, reason, what

    def __reduce__(self) -> "tuple[type[Refused], tuple[str, Reason, str]]":
        return type(self), (self.party, self.reason, self.what)


def seal(message: Message, private: str) -> bytes:
    """Return a message's bytes with its signature."""
    body = message.model_dump(mode="json")
    return canonical_json({"message": body, "signature": sign(private, canonical_json(body).encode())}).encode()


def unseal(raw: bytes, party: str, keys: Mapping[str, str], where: str) -> Message:
    """Return a message that ``party`` has signed; raise Refused with the reason where it has not.

    ``keys`` are the public keys of all parties: a message of one under the name of another is told from a damaged one.
    A message has one text only. The same words in another encoding or order, or with further ones, are no message.
    """
    try:
        found = json.loads(raw)
        body, signature = found["message"], found.get("signature", "")
        text = canonical_json(body).encode()
        is_plain = raw == canonical_json({"message": body, "signature": signature}).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Refused(party, "altered", f"{where} is not a message") from None
    if not isinstance(signature, str) or not signature:
        raise Refused(party, "unsigned", f"{where} has no signature")
    if not is_signed_by(keys[party], text, signature):
        signer = next((name for name, key in keys.items() if is_signed_by(key, text, signature)), None)
        if signer is not None:
            raise Refused(signer, "foreign-named", f"{where} stands under the name of {party}, and {signer} signed it")
        raise Refused(party, "altered", f"{where} does not fit its signature")
    if not is_plain:
        raise Refused(party, "altered", f"{where} has the words of a signed message in another form")
    try:
        return Message.model_validate(body)
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise Refused(party, "unfounded", f"{where} has a field that cannot be read: {field}: {first['msg']}") from None


def check_place(message: Message, expected: Message, owned: tuple[str, ...], where: str) -> None:
    """Raise Refused unless a signed message belongs where it was found.

    ``expected`` has the campaign, kind, party, agent and iteration of the place.
    """
    # What the message says about its author is a claim of whoever signed it: only the place's own party is named.
    if message.party != expected.party:
        raise Refused(
            expected.party, "foreign-named", f"{where} speaks for {message.party}, and another party signed it"
        )
    if message.agent and message.agent not in owned:
        raise Refused(expected.party, "foreign-named", f"{where} is about {message.agent}, no agent of this party")
    for field in ("campaign", "kind", "agent", "iteration"):
        is_, should = getattr(message, field), getattr(expected, field)
        if is_ != should:
            # People count rounds from 1.
            name = "round" if field == "iteration" else field
            found, wanted = (x + 1 if isinstance(x, int) else x[:16] for x in (is_, should))
            what = f"{where} was signed for another place: {name} {found}, not {wanted}"
            raise Refused(expected.party, "replayed", what)

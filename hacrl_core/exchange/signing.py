"""Keys and signatures of parties: ed25519 over a message's bytes."""

import base64
import binascii
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hacrl_core.config.exchange import KEY_PREFIX
from hacrl_core.errors import ConfigError

# The private key itself, where a process has no file of it.
VARIABLE = "HACRL_PARTY_KEY"
# Signed together with the message: a signature made for another purpose never fits.
_PURPOSE = b"hacrl exchange 1\n"


def make_key() -> str:
    """Return a new private key as text."""
    return base64.b64encode(Ed25519PrivateKey.generate().private_bytes_raw()).decode()


def write_key(path: Path) -> str:
    """Make a private key in a file that only its owner can read; return the public key. Never overwrites a file."""
    private = make_key()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path}: exists already; whoever has a party's key is the party, so choose another file"
        ) from None
    except OSError as problem:
        raise ConfigError(f"{path}: {problem.strerror}; give a file in a folder that exists") from None
    with os.fdopen(handle, "w") as file:
        file.write(private + "\n")
    return public_key_of(private)


def read_key(path: Path | None) -> str:
    """Return the private key in a file, or in HACRL_PARTY_KEY where no file is named."""
    if path is None:
        text, where = os.environ.get(VARIABLE, ""), VARIABLE
        if not text:
            raise ConfigError(
                f"party.key: no file is named and {VARIABLE} is empty; make a key with hacrl exchange keygen"
            )
    else:
        where = f"party.key {path}"
        try:
            text = path.expanduser().read_text()
            if path.expanduser().stat().st_mode & 0o077:
                raise ConfigError(f"{where}: other users can read it; run chmod 600 {path}")
        except OSError as problem:
            raise ConfigError(f"{where}: {problem.strerror}; make a key with hacrl exchange keygen") from None
    try:
        _private(text)
    except ValueError:
        raise ConfigError(f"{where}: not a private key; make one with hacrl exchange keygen") from None
    return text.strip()


def public_key_of(private: str) -> str:
    """Return the public key that belongs to a private one."""
    return KEY_PREFIX + base64.b64encode(_private(private).public_key().public_bytes_raw()).decode()


def sign(private: str, message: bytes) -> str:
    """Return the signature of a message."""
    return base64.b64encode(_private(private).sign(_PURPOSE + message)).decode()


def is_signed_by(public: str, message: bytes, signature: str) -> bool:
    """Whether a signature of a message was made with the private key that belongs to this public one."""
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public.removeprefix(KEY_PREFIX)))
        raw = base64.b64decode(signature, validate=True)
        key.verify(raw, _PURPOSE + message)
    except (InvalidSignature, ValueError, binascii.Error):
        return False
    # The last letters have bits to spare: of sixteen texts for the same signature one counts.
    return base64.b64encode(raw).decode() == signature


def _private(text: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(base64.b64decode(text.strip(), validate=True))

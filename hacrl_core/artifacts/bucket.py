"""A bucket: objects by path behind one small interface, for S3, GCS, Azure and local folders.

The library obstore does the work; it is imported when a bucket is opened. Credentials come from the environment only
(``AWS_ACCESS_KEY_ID``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_KEY``, … as the clouds define them).
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from hacrl_core.config.operation import StoreConfig
from hacrl_core.errors import BucketError, ConfigError

T = TypeVar("T")
_CHUNK = 8 << 20
# S3 takes at most 10,000 parts of an object.
_PARTS = 5000
_DOWNLOAD_ATTEMPTS = 3
# What S3 and Azure say about a request whose signature has a time that is far from theirs.
_CLOCK_IS_WRONG = ("RequestTimeTooSkewed", "Request date header too old")
_KEYLESS = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")


@dataclass(frozen=True)
class Stat:
    """What a bucket says about an object. ``modified`` is seconds by the server's clock."""

    path: str
    size: int
    modified: float
    etag: str | None


class Bucket:
    """Objects by path. A request that the server does not answer after a few retries raises ``BucketError``."""

    def __init__(self, settings: StoreConfig) -> None:
        """Open the bucket; nothing is sent yet."""
        self.name = settings.bucket
        self.endpoint = settings.endpoint
        self._library = _import_obstore()
        self._store = _connect(settings)
        # Local folders cannot replace an object on a condition; see ``replace``.
        self._swaps = not settings.bucket.startswith("file:")

    def read(self, path: str, most: int | None = None) -> bytes | None:
        """Return an object's bytes, or None if it does not exist or has more bytes than ``most``."""
        try:
            return self._ask(path, lambda: self._get(path, most))
        except FileNotFoundError:
            return None

    def stat(self, path: str) -> Stat | None:
        """Return an object's size, time and tag, or None if it does not exist."""
        try:
            return _stat(self._ask(path, lambda: self._library.head(self._store, path)))
        except FileNotFoundError:
            return None

    def create(self, path: str, data: bytes) -> bool:
        """Write an object that must not exist; return False if it does. Of several writers one succeeds."""
        exists = self._library.exceptions.AlreadyExistsError
        try:
            self._ask(path, lambda: self._library.put(self._store, path, data, mode="create", use_multipart=False))
        except exists:
            return False
        except FileNotFoundError as problem:
            raise self._no_bucket() from problem
        return True

    def replace(self, path: str, data: bytes, etag: str | None) -> bool:
        """Overwrite an object if it still has this tag; return False if it does not.

        A local folder has no such condition and overwrites, which is enough for leases: results rest on ``create``.
        """
        changed = self._library.exceptions.PreconditionError
        mode = {"e_tag": etag} if self._swaps and etag is not None else "overwrite"
        try:
            self._ask(path, lambda: self._library.put(self._store, path, data, mode=mode, use_multipart=False))
        except (changed, FileNotFoundError):
            return False
        return True

    def write(self, path: str, data: bytes | Path) -> None:
        """Write an object, in several parts if it is large; one that exists is overwritten."""
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        chunk = max(_CHUNK, -(-size // _PARTS))
        try:
            self._ask(
                path,
                lambda: self._library.put(
                    self._store, path, data, mode="overwrite", use_multipart=size > chunk, chunk_size=chunk
                ),
            )
        except FileNotFoundError as problem:
            if isinstance(data, Path) and not data.exists():
                raise
            raise self._no_bucket() from problem

    def download(self, path: str, target: Path) -> str | None:
        """Write an object into a file and return the sha256 of what was written, or None if it does not exist."""
        for attempt in range(_DOWNLOAD_ATTEMPTS):
            try:
                return self._ask(path, lambda: self._stream(path, target))
            except FileNotFoundError:
                return None
            except BucketError:
                if attempt + 1 == _DOWNLOAD_ATTEMPTS:
                    raise
        return None

    def hash(self, path: str) -> str | None:
        """Read an object and return its sha256, or None if it does not exist."""
        return self.download(path, Path(os.devnull))

    def list(self, prefix: str) -> Iterator[Stat]:
        """Yield what the bucket says about every object below a prefix."""
        pages = self._ask(prefix, lambda: iter(self._library.list(self._store, prefix)))
        while True:
            page = self._ask(prefix, lambda: next(pages, None))
            if page is None:
                return
            yield from map(_stat, page)

    def delete(self, path: str) -> None:
        """Delete an object; one that does not exist is no error."""
        try:
            self._ask(path, lambda: self._library.delete(self._store, path))
        except FileNotFoundError:
            return

    def probe(self) -> None:
        """Raise ConfigError if the bucket overwrites objects that must not exist, or refuses us.

        Without conditional writes two machines would overwrite one another's results in silence.
        """
        path = f"probe/{secrets.token_hex(8)}"
        try:
            first = self.create(path, b"first")
        except BucketError as problem:
            if "Header missing" not in str(problem):
                raise
            raise ConfigError(
                f"{problem}; without tags a lost race cannot be told from a won one; use a server that sends them"
            ) from problem
        again = self.create(path, b"second")
        stands = self.read(path)
        with suppress(BucketError):
            self.delete(path)
        if not first or again or stands != b"first":
            at = f" at {self.endpoint}" if self.endpoint else ""
            raise ConfigError(
                f"bucket {self.name}{at}: it overwrites an object that must not exist (no conditional PUT with "
                "If-None-Match), so machines would overwrite one another's results; use a server that supports it, "
                "such as AWS S3, GCS, Azure, MinIO or SeaweedFS"
            )

    def _no_bucket(self) -> ConfigError:
        at = f" at {self.endpoint}" if self.endpoint else ""
        return ConfigError(f"bucket {self.name}{at}: there is no such bucket; create it, or correct store.bucket")

    def _get(self, path: str, most: int | None) -> bytes | None:
        found = self._library.get(self._store, path)
        return None if most is not None and found.meta["size"] > most else bytes(found.bytes())

    def _stream(self, path: str, target: Path) -> str:
        digest = hashlib.sha256()
        with target.open("wb") as file:
            for chunk in self._library.get(self._store, path).stream(min_chunk_size=_CHUNK):
                piece = memoryview(chunk)
                digest.update(piece)
                file.write(piece)
        return digest.hexdigest()

    def _ask(self, path: str, request: Callable[[], T]) -> T:
        """Send a request; what the library raises becomes one of our errors, except for what is an answer."""
        errors = self._library.exceptions
        try:
            return request()
        except (FileNotFoundError, errors.AlreadyExistsError, errors.PreconditionError):
            raise
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as problem:
            if any(sign in str(problem) for sign in _CLOCK_IS_WRONG):
                # It answers again once the clock is right: nothing has to end for that.
                raise BucketError(
                    f"bucket {self.name}: this machine's clock differs from the server's by more than it allows; set "
                    "the clock, e.g. with NTP"
                ) from problem
            raise ConfigError(
                f"bucket {self.name}: it refuses these credentials ({path}); set them in the environment, e.g. "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from problem
        except (errors.BaseError, OSError) as problem:
            if isinstance(problem, OSError) and problem.errno is not None and problem.filename is not None:
                raise
            raise BucketError(f"bucket {self.name}: {path}: {_first_line(problem)}") from problem


def _import_obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
    except ImportError as problem:
        raise ConfigError(
            "a bucket needs the package obstore; install it with: pip install 'hacrl[bucket]'"
        ) from problem
    return obstore


def _connect(settings: StoreConfig) -> Any:
    from obstore.store import LocalStore, from_url

    url = settings.bucket
    if url.startswith("file:"):
        return LocalStore(unquote(urlsplit(url).path), mkdir=True)
    options: dict[str, Any] = {}
    if url.startswith("s3:") and settings.endpoint is not None:
        if not any(name in os.environ for name in _KEYLESS):
            raise ConfigError(
                f"bucket {url}: no credentials in the environment; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        options["region"] = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        options["virtual_hosted_style_request"] = False
    if settings.endpoint is not None:
        options["base_url" if url.startswith("gs:") else "endpoint"] = settings.endpoint
    try:
        return from_url(
            url,
            client_options={
                "allow_http": (settings.endpoint or "").startswith("http:"),
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(minutes=10),
            },
            retry_config={
                "max_retries": 6,
                "retry_timeout": timedelta(seconds=20),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=3),
                    "base": 2,
                },
            },
            **options,
        )
    except Exception as problem:
        raise ConfigError(f"bucket {url}: {_first_line(problem)}") from problem


def _stat(meta: Any) -> Stat:
    return Stat(meta["path"], meta["size"], meta["last_modified"].timestamp(), meta["e_tag"])


def _first_line(problem: BaseException) -> str:
    text = str(problem).strip()
    return text.splitlines()[0][:300] if text else type(problem).__name__

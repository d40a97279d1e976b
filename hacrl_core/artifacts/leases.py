"""Leases: who of several machines computes a key, so that it is computed once.

A lease is an object in the bucket that its holder writes again every few seconds. One that has not been written for a
while, by the server's clock, belongs to nobody. Leases only save work: results are right without them, because a
manifest is created once.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from hacrl_core.artifacts.bucket import Bucket
from hacrl_core.errors import HacrlError

SECONDS = 60.0
_POLL_SECONDS = 1.0


class ServerClock:
    """The server's time, asked once; a machine's own clock may be wrong by any amount."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._ahead: float | None = None

    def now(self) -> float:
        """Return the server's time in seconds."""
        if self._ahead is None:
            path = f"probe/clock-{secrets.token_hex(6)}"
            self._bucket.write(path, b"")
            found = self._bucket.stat(path)
            self._bucket.delete(path)
            # Times of objects have whole seconds.
            self._ahead = (found.modified if found is not None else time.time()) - time.monotonic()
        return time.monotonic() + self._ahead


class Leases:
    """The leases that this process holds; a thread renews them."""

    def __init__(self, bucket: Bucket, clock: ServerClock, seconds: float = SECONDS) -> None:
        self._bucket = bucket
        self._clock = clock
        self._seconds = seconds
        self._held: dict[str, Callable[[], bool]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}

    def acquire(self, key: str, is_done: Callable[[], bool], on_wait: Callable[[str], None] | None = None) -> bool:
        """Wait until nobody else computes the key, and return True; return False as soon as ``is_done()``.

        A bucket that does not answer is no reason to wait: then everybody computes for himself.
        """
        told = ""
        try:
            while not self._take(key):
                if is_done():
                    return False
                holder = self.holder(key)
                if holder is not None and on_wait is not None and holder != told:
                    on_wait(holder)
                    told = holder
                time.sleep(_POLL_SECONDS)
        except HacrlError:
            return True
        with self._changed:
            self._held[key] = lambda: True
            self._ensure_thread()
        return True

    def release(self, key: str, still_needed: Callable[[], bool]) -> None:
        """Give a lease back; while ``still_needed()``, the thread goes on renewing it."""
        with self._changed:
            if key not in self._held:
                return
            self._held[key] = still_needed
        if not still_needed():
            self._drop(key)

    def is_alive(self, key: str) -> bool:
        """Return whether somebody computes or uploads this key."""
        return self.holder(key) is not None

    def holder(self, key: str) -> str | None:
        """Return who holds a lease that has not expired, as text for people."""
        found = self._bucket.stat(_path(key))
        if found is None or self._clock.now() - found.modified > self._seconds:
            return None
        owner = _owner(self._bucket.read(_path(key)))
        return f"{owner.get('host', 'another machine')}, process {owner.get('pid', '?')}"

    def _take(self, key: str) -> bool:
        text = json.dumps(self._owner).encode()
        if self._bucket.create(_path(key), text):
            return True
        found = self._bucket.stat(_path(key))
        if found is None:
            return False
        if _owner(self._bucket.read(_path(key))).get("token") == self._owner["token"]:
            # Our own: the answer to the first attempt was lost on the way.
            return True
        expired = self._clock.now() - found.modified > self._seconds
        return expired and self._bucket.replace(_path(key), text, found.etag)

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
            self._thread.start()

    def _renew(self) -> None:
        text = json.dumps(self._owner).encode()
        while True:
            time.sleep(self._seconds / 4)
            with self._changed:
                held = dict(self._held)
                if not held:
                    self._thread = None
                    return
            for key, needed in held.items():
                try:
                    if not needed():
                        self._drop(key)
                        continue
                    found = self._bucket.stat(_path(key))
                    ours = _owner(self._bucket.read(_path(key))).get("token") == self._owner["token"]
                    if found is None or not ours or not self._bucket.replace(_path(key), text, found.etag):
                        # Somebody took it over while this process did not answer.
                        self._forget(key)
                except HacrlError:
                    continue

    def _drop(self, key: str) -> None:
        self._forget(key)
        try:
            self._bucket.delete(_path(key))
        except HacrlError:
            # It expires by itself.
            return

    def _forget(self, key: str) -> None:
        with self._changed:
            self._held.pop(key, None)


def _path(key: str) -> str:
    return f"leases/{key}"


def _owner(text: bytes | None) -> dict[str, Any]:
    try:
        owner = json.loads(text or b"{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}

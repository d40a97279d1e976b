"""Slots: what only one campaign may use at a time, such as a GPU.

They are Prefect's global concurrency limits, held by leases. A lease lasts a minute and is renewed every 15 seconds;
when its holder dies, however it dies, the server takes the slot back. We renew leases ourselves, because Prefect gives
up for good after three attempts within seconds: a server that restarts would cost the slot.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError

from flows.run.placement import seats_of
from hacrl_core.config.campaign import CampaignConfig

# The shortest lease that Prefect grants.
LEASE_SECONDS = 60.0
_LOCKED = 423


def slot_names(config: CampaignConfig) -> list[str]:
    """Return the slots that a campaign needs: those of its config, else one for each GPU that its agents use."""
    if config.runtime.slots is not None:
        return sorted(set(config.runtime.slots))
    gpus = set().union(*(seat.gpus for seat in seats_of(config).values()))
    return [f"gpu {socket.gethostname()} cuda:{gpu}" for gpu in sorted(gpus)]


@contextmanager
def held_slots(config: CampaignConfig, say: Callable[[str], None], *, shared: bool = True) -> Iterator[None]:
    """Hold the campaign's slots: all of them or none, so that two campaigns never wait for each other.

    On a server that nobody shares (``shared`` is False) there is nothing to hold.
    """
    names = slot_names(config)
    if not names or not shared:
        yield
        return
    with get_client(sync_client=True) as client:
        for name in names:
            _ensure(client, name)
        lease = acquire(client, names, say)
        stop = threading.Event()
        renewal = threading.Thread(target=_renew, args=(lease, names, stop, say), name="slots", daemon=True)
        renewal.start()
        try:
            yield
        finally:
            stop.set()
            renewal.join(timeout=5)
            with suppress(httpx.HTTPError):
                client.release_concurrency_slots_with_lease(lease)


def _ensure(client: SyncPrefectClient, name: str) -> None:
    """Create a limit of one, unless there is one; an operator's own number stays."""
    try:
        client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        # Another campaign may have created it just now.
        with suppress(ObjectAlreadyExists, PrefectHTTPStatusError):
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))


def acquire(client: SyncPrefectClient, names: list[str], say: Callable[[str], None]) -> UUID:
    """Wait until all slots are free, take them, and return the lease."""
    told = False
    while True:
        try:
            answer = client.increment_concurrency_slots_with_lease(names, 1, "concurrency", LEASE_SECONDS)
            return UUID(answer.json()["lease_id"])
        except (PrefectHTTPStatusError, httpx.HTTPStatusError) as problem:
            if problem.response.status_code != _LOCKED:
                raise
        if not told:
            say(
                f"waiting for {', '.join(names)}: another campaign has it (if that one died, it is free within two "
                "minutes)"
            )
            told = True
        time.sleep(2)


def _renew(lease: UUID, names: list[str], stop: threading.Event, say: Callable[[str], None]) -> None:
    told = False
    with get_client(sync_client=True) as client:
        while not stop.wait(LEASE_SECONDS / 4):
            try:
                client.renew_concurrency_lease(lease, LEASE_SECONDS)
                told = False
            except Exception as problem:
                # The campaign goes on; the server may be back for the next attempt.
                if not told:
                    say(
                        f"slots {', '.join(names)}: not renewed ({type(problem).__name__}); another campaign may take "
                        "them"
                    )
                    told = True

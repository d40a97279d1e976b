"""Slots: what only one campaign may use at a time, such as a GPU. They are Prefect's global concurrency limits, held by leases.

A lease lives a minute and is renewed every quarter of one; when its holder dies, however it dies, the server takes the slot back. Our
own renewal, because Prefect's gives up for good after three tries within seconds: a server that restarts would cost the slot.
"""

import os
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

from flows.run.placement import gpus_of
from hacrl_core.config.campaign import CampaignConfig

LEASE_SECONDS = 60.0  # the shortest that Prefect grants
_LOCKED = 423


def slot_names(config: CampaignConfig) -> list[str]:
    """Those of the config, else one for each GPU that its agents use."""
    if config.runtime.slots is not None:
        return sorted(set(config.runtime.slots))
    gpus = {gpu for name, agent in config.agents.items() for gpu in gpus_of(agent, config.generation(name).engine)}
    return [f"gpu {socket.gethostname()} cuda:{gpu}" for gpu in sorted(gpus)]


@contextmanager
def held_slots(config: CampaignConfig, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, the campaign has its slots: all of them or none, so two campaigns never wait for each other."""
    names = slot_names(config)
    if not names or os.environ.get("HACRL_PREFECT") == "temporary":  # nobody shares a temporary server
        yield
        return
    with get_client(sync_client=True) as client:
        for name in names:
            _ensure(client, name)
        lease, stop = acquire(client, names, say), threading.Event()
        keeper = threading.Thread(target=_keep, args=(lease, names, stop, say), name="slots", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            stop.set()
            keeper.join(timeout=5)
            with suppress(httpx.HTTPError):
                client.release_concurrency_slots_with_lease(lease)


def _ensure(client: SyncPrefectClient, name: str) -> None:
    """A limit of one where there is none; what an operator made of it stays."""
    try:
        client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        with suppress(ObjectAlreadyExists, PrefectHTTPStatusError):  # somebody else made it just now
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))


def acquire(client: SyncPrefectClient, names: list[str], say: Callable[[str], None]) -> UUID:
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
                f"waiting for {', '.join(names)}: another campaign has it (one that died gives it back within two minutes)"
            )
            told = True
        time.sleep(2)


def _keep(lease: UUID, names: list[str], stop: threading.Event, say: Callable[[str], None]) -> None:
    told = False
    with get_client(sync_client=True) as client:
        while not stop.wait(LEASE_SECONDS / 4):
            try:
                client.renew_concurrency_lease(lease, LEASE_SECONDS)
                told = False
            except Exception as problem:  # the campaign goes on; the server may be back for the next try
                if not told:
                    say(
                        f"slots {', '.join(names)}: not renewed ({type(problem).__name__}); another campaign may take them"
                    )
                    told = True

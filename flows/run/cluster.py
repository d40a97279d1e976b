"""What a seat asks of a cluster, whether any node could ever give it, and how that is said. No Ray here: plain data."""

from collections.abc import Collection, Mapping, Sequence

from flows.run.placement import Seat
from hacrl_core.config.campaign import CampaignConfig

# Resource → amount: CPU, GPU, and names of the user's own.
Resources = dict[str, float]


def resources_of(seat: Seat, config: CampaignConfig) -> list[Resources]:
    """Return the bundles that a seat needs, each of them on one node; the first is that of the process that leads."""
    bundle: Resources = {"CPU": float(seat.place.threads)}
    if seat.place.needs_torch:
        gpus = len(seat.place.gpus) or (1 if seat.place.device.startswith("cuda") else 0)
        bundle |= {"GPU": float(gpus)} if gpus else {}
        bundle |= config.agents[seat.agent].resources
    return [bundle]


def servable(bundles: Sequence[Resources], nodes: Collection[Mapping[str, float]]) -> bool:
    """Return whether the nodes, all free, could give these bundles at once; large bundles are placed first."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: -sum(b.values())):
        place = next((n for n in free if all(n.get(name, 0.0) >= amount for name, amount in bundle.items())), None)
        if place is None:
            return False
        for name, amount in bundle.items():
            place[name] -= amount
    return True


def asked(bundles: Sequence[Resources]) -> str:
    """Return what is asked for, to be read by people: "4 GPU, 1 CPU on one node"."""
    parts = [", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles]
    return f"{parts[0]} on one node" if len(set(parts)) == 1 and len(parts) == 1 else " and ".join(parts)


def nodes_text(nodes: Mapping[str, Mapping[str, float]]) -> str:
    """Return the nodes with what they have; memory and Ray's own marks are left out."""
    if not nodes:
        return "none"
    hidden = ("memory", "object_store_memory", "node:")
    texts = []
    for name, have in nodes.items():
        shown = ", ".join(f"{amount:g} {what}" for what, amount in sorted(have.items()) if not what.startswith(hidden))
        texts.append(f"{name} ({shown or 'nothing'})")
    return ", ".join(texts)

"""What a seat asks of a cluster, whether any node could ever give it, and how that is said. No Ray here: plain data."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from flows.run.placement import Seat
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.generation import VllmEngineConfig

# Resource → amount: CPU, GPU, and names of the user's own.
Resources = dict[str, float]


def resources_of(seat: Seat, config: CampaignConfig) -> list[Resources]:
    """Return the bundles that a seat needs, each of them on one node; the first is that of the process that leads.

    Ranks of an update and replicas of an engine have a bundle each, which may be on any nodes. Where ranks share their
    GPUs with an engine that is several GPUs wide, all of them stay on one node.
    """
    bundle: Resources = {"CPU": float(seat.place.threads)}
    if not seat.place.needs_torch:
        return [bundle]
    bundle |= config.agents[seat.agent].resources
    gpus = len(seat.place.gpus) or (1 if seat.place.device.startswith("cuda") else 0)
    peers = peers_of(seat, config)
    if gpus:
        bundle["GPU"] = float(gpus if peers == 1 else _width(seat, config))
    # Peers ask for one core each: most of their work is on their GPU.
    return [dict(bundle) if index == 0 else {**bundle, "CPU": 1.0} for index in range(peers)]


def peers_of(seat: Seat, config: CampaignConfig) -> int:
    """Return how many actors share the calls of a seat."""
    if not seat.place.needs_torch:
        return 1
    engine = config.generation(seat.agent).engine
    ranks = config.training(seat.agent).ranks if "learn" in seat.roles else 1
    replicas = engine.replicas if seat.roles & {"sample", "evaluate"} else 1
    return 1 if ranks > 1 and _width(seat, config) > 1 else max(ranks, replicas)


def _width(seat: Seat, config: CampaignConfig) -> int:
    """Return the GPUs of one actor: as many as one copy of the model takes while it samples."""
    engine = config.generation(seat.agent).engine
    samples = bool(seat.roles & {"sample", "evaluate"})
    return engine.tensor_parallel_size if samples and isinstance(engine, VllmEngineConfig) else 1


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
    if len(parts) == 1:
        return f"{parts[0]} on one node"
    return " and ".join(f"{count} × ({part})" if count > 1 else part for part, count in Counter(parts).items())


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

"""Kill actors, raylets, drivers and heads while a campaign runs on a fake cluster: ``make test-cluster KILLS=50``.

The stores of driver and nodes are apart: they share a bucket on a SeaweedFS server and nothing else. What a lost node
had not uploaded is gone. Kills come at random moments and at chosen ones: when a stage has just begun. A killed driver
is started again with the same command; a lost node is replaced; a killed head means a new cluster. A round is one
campaign from an empty home to its end. At the end of a round every digest must be that of a local run, the server must
have accepted each manifest once, nothing may be damaged, and no weight may be on the driver's disk.
"""

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flows.home import Home
from flows.record.log import read_log
from flows.record.record import read_entries
from hacrl_core.config.campaign import CampaignConfig
from tests.bucket.servers import CREDENTIALS, Faults, make_bucket, proxy, seaweedfs
from tests.cluster.fake import FakeCluster
from tests.flow.conftest import tiny
from tests.flow.homes import digests, run_here

ITERATIONS = 4
# A round that lasts longer hangs. A killed head is noticed after half a minute, a new cluster takes as long.
ROUND_SECONDS = 1800.0
KINDS = ("actor", "actor", "actor", "actor", "driver", "driver", "raylet", "raylet", "head")
CHOSEN = ("generate", "verify", "score", "update", "evaluate", "warmstart")


@dataclass
class Round:
    """One campaign under fire."""

    home: Home
    cluster: FakeCluster
    rng: random.Random
    endpoint: str
    bucket: str
    driver: "subprocess.Popen[bytes] | None" = None
    killed: "collections.Counter[str]" = field(default_factory=collections.Counter)
    restarts: int = 0

    def start(self) -> None:
        nodes = self.home.root / "nodes" / "{node}" / "store"
        own = {"executor": "ray", "address": self.cluster.address, "retries": 100, "node_store": str(nodes)}
        store = {"bucket": f"s3://{self.bucket}", "endpoint": self.endpoint}
        config = self.home.root / "campaign.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(tiny(iterations=ITERATIONS, runtime=own, store=store).model_dump_json())
        with (self.home.root / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.driver", str(self.home.root), str(config)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, kind: str) -> bool:
        """Kill one thing of this kind; False where there is none."""
        if kind == "head":
            self.cluster.lose_head()
            assert self.driver is not None
            self.driver.wait(timeout=150)  # it says that the head is gone; it does not hang
            self.cluster.close()
            self.cluster = FakeCluster()
        elif kind == "raylet":
            self.cluster.add()
            psutil.Process(self.rng.choice(self.cluster.raylets()[:-1])).kill()
            self.cluster.forget_dead()
        else:
            found = [self.driver.pid] if kind == "driver" and self.driver else self.actors()
            if not found:
                return False
            psutil.Process(self.rng.choice(found)).kill()
        self.killed[kind] += 1
        return True

    def actors(self) -> list[int]:
        """Process ids of the stages' actors, below the raylets of our own cluster."""
        found = []
        for raylet in self.cluster.raylets():
            try:
                children = psutil.Process(raylet).children()
                found += [child.pid for child in children if "RoleActor" in " ".join(child.cmdline())]
            except psutil.Error:
                continue
        return found

    def wait(self, kind: str) -> None:
        """Wait for a random moment, or for the start of a chosen stage."""
        deadline = time.monotonic() + 60
        seen = len(read_log(self.home.campaign("tiny")))
        stage = self.rng.choice((*CHOSEN, *[""] * 4))
        if not stage:
            time.sleep(self.rng.uniform(0.0, 6.0))
            return
        while time.monotonic() < deadline and self.driver is not None and self.driver.poll() is None:
            lines = read_log(self.home.campaign("tiny"))[seen:]
            if any(line.kind == "start" and line.text.startswith(stage) for line in lines):
                time.sleep(self.rng.uniform(0.0, 0.3))
                return
            time.sleep(0.05)


def run_round(one: Round, kinds: list[str]) -> None:
    """Run a campaign to its end and kill what ``kinds`` says, in this order, while it lasts."""
    deadline = time.monotonic() + ROUND_SECONDS
    one.start()
    while time.monotonic() < deadline:
        assert one.driver is not None
        if kinds:
            one.wait(kinds[0])
        if one.driver.poll() is None:
            if kinds and one.kill(kinds[0]):
                kinds.pop(0)
            time.sleep(0.2)
        elif one.driver.returncode == 0:
            return
        else:
            one.restarts += 1
            one.start()
    raise AssertionError(f"a campaign hangs: {(one.home.root / 'driver.log').read_text()[-2000:]}")


def judge(one: Round, expected: dict[str, str], network: Faults) -> None:
    """Compare the end of a round with the local run, and with what the server was asked to write."""
    assert digests(one.home, "tiny") == expected, "other content than a local run"
    keys = {(entry.stage, entry.key) for entry in read_entries(one.home.campaign("tiny"))}
    wrote = [
        (*request.rpartition(".json")[0].split("/")[-2:],)
        for request, status in network.answers
        if request.startswith(f"PUT /{one.bucket}/manifests/") and status == 200
    ]
    published = collections.Counter(wrote)
    assert set(published) == keys, "an artifact that no stage has, or a stage whose artifact the bucket lacks"
    twice = {key: count for key, count in published.items() if count > 1}
    assert not twice, f"published more than once: {twice}"
    for store in (one.home.store, *(one.home.root / "nodes").glob("*/store")):
        assert not list((store / "damaged").glob("*")), f"damaged artifacts in {store}"
    assert not list((one.home.store / "objects").rglob("*.safetensors")), "the driver downloaded weights"


def main() -> None:
    """Run rounds until so many kills have been made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.update(CREDENTIALS)
    with tempfile.TemporaryDirectory(prefix="hacrl-kills-") as place:
        root, network = Path(place), Faults()
        with seaweedfs(root / "weed") as address, proxy(address, network) as endpoint:
            fire(options.kills, options.seed, root, lambda name: make_bucket(address, name), endpoint, network)


def fire(kills: int, seed: int, root: Path, make: Callable[[str], None], endpoint: str, network: Faults) -> None:
    """Make so many kills, ten in each campaign, and print what was done."""
    rng = random.Random(seed)
    here = Home(root / "local")
    run_here(CampaignConfig.model_validate(tiny(iterations=ITERATIONS).model_dump()), here)
    expected = digests(here, "tiny")
    total: collections.Counter[str] = collections.Counter()
    restarts = rounds = 0
    begun = time.monotonic()
    cluster = FakeCluster()
    try:
        while sum(total.values()) < kills:
            kinds = [rng.choice(KINDS) for _ in range(min(10, kills - sum(total.values())))]
            bucket = f"round-{rounds}"
            make(bucket)
            one = Round(Home(root / bucket), cluster, rng, endpoint, bucket)
            try:
                run_round(one, kinds)
            finally:
                cluster = one.cluster
                if one.driver is not None and one.driver.poll() is None:
                    os.kill(one.driver.pid, 9)
            judge(one, expected, network)
            total += one.killed
            restarts += one.restarts
            rounds += 1
            print(f"round {rounds}: {dict(one.killed)}, driver started again {one.restarts} times", flush=True)
    finally:
        cluster.close()
    minutes = (time.monotonic() - begun) / 60
    summary = {"seed": seed, "kills": sum(total.values()), **total, "rounds": rounds, "artifacts": len(expected)}
    print(json.dumps({**summary, "restarts": restarts, "minutes": round(minutes, 1), "all digests equal": True}))


if __name__ == "__main__":
    main()

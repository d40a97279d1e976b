"""Two campaigns and a sweep at once on one cluster, with stores apart: each ends as it would alone."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from flows.home import Home
from tests.cluster.conftest import ITERATIONS
from tests.flow.conftest import TINY, tiny
from tests.flow.homes import digests, run_here
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900


def start(log: Path, *words: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, "-m", *words], stdout=out, stderr=out, env=environment, cwd=log.parent)


def test_two_campaigns_and_a_sweep_side_by_side_end_as_each_would_alone(tmp_path: Path, cluster, local):
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    own = {
        "runtime": {
            "executor": "ray",
            "address": cluster.address,
            "node_store": str(tmp_path / "nodes" / "{node}" / "store"),
        },
        "store": {"bucket": f"file://{bucket}"},
    }
    for name, seed in (("one", 0), ("two", 7)):
        config = tiny(iterations=ITERATIONS, seed=seed, **own)
        (tmp_path / f"{name}.json").write_text(config.model_dump_json())
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump({**TINY, "iterations": 1, **own}))
    variants = {"base": {}, "faster": {"update.learning_rate": 2e-3}}
    sweep = {"name": "beside", "campaign": "campaign.yaml", "variants": variants, "seeds": [0], "concurrency": 2}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    homes = {name: Home(tmp_path / f"home-{name}") for name in ("one", "two", "sweep")}
    running = {
        name: start(
            tmp_path / f"{name}.log", "tests.cluster.driver", str(homes[name].root), str(tmp_path / f"{name}.json")
        )
        for name in ("one", "two")
    }
    path, place = str(tmp_path / "sweep.yaml"), str(homes["sweep"].root)
    running["sweep"] = start(tmp_path / "sweep.log", "flows.cli", "sweep", path, "--home", place)
    try:
        for name, process in running.items():
            assert process.wait(patience(SECONDS)) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
    assert digests(homes["one"], "tiny") == local
    alone = Home(tmp_path / "alone")
    run_here(tiny(iterations=ITERATIONS, seed=7), alone)
    assert digests(homes["two"], "tiny") == digests(alone, "tiny")
    cells = Home(tmp_path / "cells")
    for variant, changes in variants.items():
        update = {**TINY["update"], **{name.partition(".")[2]: value for name, value in changes.items()}}
        run_here(tiny(name=f"beside.{variant}.s0", iterations=1, seed=0, update=update), cells)
        cell = f"beside.{variant}.s0"
        assert digests(homes["sweep"], cell) == digests(cells, cell)

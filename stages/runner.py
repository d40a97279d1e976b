"""Runs a stage call: key ▶ look up ▶ lock ▶ run in a staging folder ▶ validate ▶ manifest last ▶ rename."""

import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hacrl_core.artifacts import Store
from hacrl_core.artifacts.disk import disk_full, is_disk_full
from hacrl_core.artifacts.locks import remove_stale_locks
from hacrl_core.artifacts.manifests import MANIFEST
from hacrl_core.contracts.manifest import TRAINING, Identity, Provenance
from hacrl_core.errors import ContractError, StageError
from hacrl_core.spans import span
from stages import memory as peak
from stages.spec import Context, Metrics, Outcome, OutFolder, StageCall, find_stage


def lookup(store: Store, call: StageCall, identity: Identity | None = None) -> Outcome | None:
    """Return the outcome of a bound call whose artifact exists, else None.

    An artifact whose files were collected counts as existing, unless the call is to restore them. The identity is that
    of the call, for those who know it already.
    """
    identity = identity or find_stage(call.stage).identity(call)
    ref = store.lookup(identity, collected=not call.restore)
    return None if ref is None else Outcome(ref, True, 0.0, store.manifest(ref.stage, ref.key).metrics)


def run_stage(store: Store, call: StageCall, context: Context, on_wait: Callable[[str], None] | None = None) -> Outcome:
    """Return the call's artifact, computing it if nobody has. Only one process computes a key at a time."""
    identity = find_stage(call.stage).identity(call)
    if found := lookup(store, call, identity):
        return found
    try:
        with store.lock(identity.key, on_wait):
            if found := lookup(store, call, identity):  # somebody finished it while we waited
                return found
            return _compute(store, call, identity, context)
    except Exception as problem:
        if is_disk_full(problem):
            raise StageError(f"{call.title}: {disk_full(store.root)}") from problem
        raise


def _compute(store: Store, call: StageCall, identity: Identity, context: Context) -> Outcome:
    stage = find_stage(call.stage)
    key = identity.key  # a hash of everything in it
    partial = store.root / "partial" / key
    staged = store.stage_folder(key)
    out = OutFolder(staged)
    started, clock = time.time(), time.perf_counter()
    peak.begin()
    try:
        # Only an update goes on training: nobody else reads a version's moments, two thirds of its bytes.
        unread = "" if call.stage == "update" else TRAINING
        with ExitStack() as held:
            with span("inputs", "inputs"):
                held.enter_context(store.reading(call.artifacts.values(), apart_from=unread))
            result = stage.run(
                call.artifacts,
                call.config,
                call.seed,
                out,
                replace(context, partial=partial, judgements=store.root / "judgements"),
            )
        _check_metrics(call, result.metrics)
        seconds, highest = time.perf_counter() - clock, peak.end()
        provenance = Provenance(
            started=started,
            finished=time.time(),
            seconds=seconds,
            commit=_commit(),
            packages=package_versions(),
            hardware={**_hardware(), **_fused_path(result.metrics)},
            process=f"{os.getpid()}",
            peak_memory_bytes=highest.host_bytes,
            peak_device_bytes=highest.device_bytes,
        )
        with span("publish", "publish"):
            ref = store.publish(staged, identity, out.tables, result.metrics, result.details, provenance)
    except ContractError as problem:
        shutil.rmtree(staged, ignore_errors=True)
        raise ContractError(f"{call.title}: {problem}") from problem
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    shutil.rmtree(partial, ignore_errors=True)
    # Where somebody else was first with this key, theirs stands, and this process has not seen its bytes.
    if result.published and store.manifest(ref.stage, ref.key).provenance == provenance:
        result.published(ref)
    return Outcome(ref, False, time.perf_counter() - clock, result.metrics)


def remove_leftovers(store: Store) -> None:
    """Remove what killed processes left: staging folders, lock files, and shards of artifacts that exist by now."""
    store.remove_stale_staging()
    for left in (store.root / "partial").glob("*"):
        if next((store.root / "objects").glob(f"*/{left.name}/{MANIFEST}"), None) is not None:
            shutil.rmtree(left, ignore_errors=True)
    remove_stale_locks(store.root / "locks")


def _check_metrics(call: StageCall, metrics: Metrics) -> None:
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if bad:
        raise StageError(f"{call.title}: metrics {bad} are not finite; nothing was published")


def _fused_path(metrics: Metrics) -> dict[str, str]:
    """Which code computed the fused loss on a GPU; on a CPU there is one."""
    paths = [bool(value) for name, value in metrics.items() if name.endswith("/fused_triton")]
    return {"fused_loss": "triton" if all(paths) else "torch"} if paths else {}


@cache
def _commit() -> str:
    try:
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
        return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


@cache
def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that decide numbers."""
    found = {}
    for name in ("hacrl", "torch", "transformers", "pyarrow", "math-verify", "numpy", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def _hardware() -> dict[str, str]:
    return {"machine": platform.machine(), "python": platform.python_version(), "cores": str(os.cpu_count())}

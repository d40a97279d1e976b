"""Kill points: places where a process can be told to kill its whole group, and a log of what ran. Costs the product
nothing.

Nothing in the product knows of them. ``arm`` wraps a few functions when their modules are imported; ``sitecustomize``
beside this file does so in every Python process that has this folder on its path, so also in the workers that a real
``hacrl run`` spawns. What to do is in the environment:

CHAOS_KILL  step, stage and count, as ``renamed verify 2``: kill at the second such moment of one process. ``*`` is any
stage. CHAOS_LOG   a file that gets one line for each stage that begins or ends.
"""

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from functools import wraps

PUBLISH_STEPS = (
    "staged",  # the stage has written its files
    "hashed",  # they are hashed and synced
    "half_manifest",
    "manifest",  # the manifest is whole, in staging
    "renamed",  # the artifact is published
    "published",  # and its worker knows, but nobody else
)
RECORD_STEPS = ("recorded", "half_record")
MLFLOW_STEPS = ("mlflow_created", "mlflow_half", "mlflow_logged")
_seen: dict[str, int] = {}


def reached(step: str, stage: str = "*") -> bool:
    """Whether this is the moment to die at."""
    plan = os.environ.get("CHAOS_KILL", "").split()
    if not plan or plan[0] != step or plan[1] not in ("*", stage):
        return False
    _seen[step] = _seen.get(step, 0) + 1
    return _seen[step] == int(plan[2])


def die(step: str, stage: str = "*") -> None:
    if reached(step, stage):
        kill_group(step, stage)


def kill_group(step: str, stage: str) -> None:
    write("killed", stage, step)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def write(event: str, stage: str, key: str) -> None:
    if path := os.environ.get("CHAOS_LOG"):
        line = json.dumps({"at": time.time(), "pid": os.getpid(), "event": event, "stage": stage, "key": key}) + "\n"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(handle, line.encode())
        os.close(handle)


# -- what is wrapped ---------------------------------------------------------------------------------------------------


def wrap_runner(module) -> None:
    compute = module._compute

    @wraps(compute)
    def logged(store, call, identity, context):
        write("run", call.stage, identity.key)
        outcome = compute(store, call, identity, context)
        write("done", call.stage, identity.key)
        return outcome

    module._compute = logged


def wrap_store(module) -> None:
    publish, write_synced, sync = module.Store.publish, module.write_synced, module.sync
    making = [""]

    @wraps(publish)
    def publish_or_die(self, staged, identity, *rest):
        making[0] = identity.stage
        die("staged", identity.stage)
        ref = publish(self, staged, identity, *rest)
        die("published", identity.stage)
        return ref

    def write_or_die(path, text):
        if path.name != module.MANIFEST:
            return write_synced(path, text)
        die("hashed", making[0])
        if reached("half_manifest", making[0]):
            path.write_text(text[: len(text) // 2])
            kill_group("half_manifest", making[0])
        write_synced(path, text)
        die("manifest", making[0])
        return None

    def sync_or_die(path):
        die("renamed", making[0])
        sync(path)

    module.Store.publish, module.write_synced, module.sync = publish_or_die, write_or_die, sync_or_die


def wrap_records(module) -> None:
    add = module.Record.add

    @wraps(add)
    def add_or_die(self, call, outcome):
        if not outcome.cached and reached("half_record", call.stage):
            self._file.write('{"label": "half a li')
            self._file.flush()
            kill_group("half_record", call.stage)
        entry = add(self, call, outcome)
        if not outcome.cached:
            die("recorded", call.stage)
        return entry

    module.Record.add = add_or_die


def wrap_tracking(module) -> None:
    log, create = module.Projection.log, module.Projection._create

    def then_die(client, name, step):
        function = getattr(client, name)

        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            die(step)
            return result

        setattr(client, name, call)
        return lambda: delattr(client, name)

    @wraps(log)
    def log_or_die(self, entries):
        undo = then_die(self._client, "log_batch", "mlflow_half")
        try:
            log(self, entries)
        finally:
            undo()
        die("mlflow_logged")

    @wraps(create)
    def create_or_die(self, *args):
        undo = then_die(self._client, "create_run", "mlflow_created")
        try:
            return create(self, *args)
        finally:
            undo()

    module.Projection.log, module.Projection._create = log_or_die, create_or_die


def wrap_shards(module) -> None:
    write_shard = module.write_shard

    @wraps(write_shard)
    def write_or_die(path, asked, rows):
        write_shard(path, asked, rows)
        if path is not None:
            write("shard", "*", path.name)
            die("shard")

    module.write_shard = write_or_die


WRAPPERS = {
    "stages.runner": wrap_runner,
    "hacrl_core.artifacts.store": wrap_store,
    "flows.record.record": wrap_records,
    "flows.tracking.projection": wrap_tracking,
    "stages.partial": wrap_shards,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to wrap where they are, and wraps them once they are loaded, before anybody has taken a name
    from them.
    """

    def find_spec(self, name, path=None, target=None):
        if name not in WRAPPERS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def load_and_wrap(module):
            load(module)
            WRAPPERS[name](module)

        spec.loader.exec_module = load_and_wrap
        return spec


def arm() -> None:
    sys.meta_path.insert(0, _Finder())

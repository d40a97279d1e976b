"""The sandbox, tried: what this machine can hold of a verifier and of the programs that agents write."""

import shutil
from collections.abc import Iterator

from hacrl_core.errors import HacrlError
from hacrl_core.verification.jail.layers import EXPLAINED, lacking
from hacrl_core.verification.pool import try_sandbox


def sandbox_checks() -> Iterator[tuple[str, str, str]]:
    """Build a worker's sandbox and yield a line on it, and one per layer: state, what, detail."""
    try:
        layers = try_sandbox()
    except HacrlError as error:
        yield "note", "sandbox", f"cannot be tried: {error}"
        return
    programs, verifiers = lacking(layers, programs=True), lacking(layers, programs=False)
    if not programs and not verifiers:
        yield "ok", "sandbox", "holds verifiers and programs; docs/sandbox.md"
    for what, missing in (("verifiers", verifiers), ("programs, so that code tasks are refused", programs)):
        if missing:
            yield "note", "sandbox", f"does not hold {what}: nothing holds {', '.join(missing)}"
    for name, explained in EXPLAINED.items():
        reason = layers.get(name, "not tried")
        yield ("note", f"  {name}", f"missing: {reason}") if reason else ("ok", f"  {name}", explained)
    if layers.get("namespaces") and shutil.which("bwrap"):
        yield "note", "  bubblewrap", "installed; HACRL makes namespaces itself and does not call it"

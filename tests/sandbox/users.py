"""Run Python as an ordinary user, where the tests run as root and Python may be installed where only root can look."""

import os
import subprocess
import sys
from pathlib import Path

from hacrl_core.verification.jail import kernel

USER = 48_123


def run_as_ordinary_user(arguments: list[str], timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` from the repository's folder as a user who owns nothing."""

    def become() -> None:
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        for place in {sys.prefix, sys.base_prefix, os.getcwd()}:
            _open_the_way(Path(place))
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)

    environment = {"PATH": "/usr/bin:/bin", "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment,
        preexec_fn=become,
    )


def _open_the_way(place: Path) -> None:
    """In this mount namespace, put an open folder over the first closed one on the way, with the place inside."""
    closed = next((parent for parent in reversed(place.parents) if not parent.stat().st_mode & 0o001), None)
    if closed is None:
        return
    handle = os.open(place, os.O_PATH)
    kernel.mount("tmpfs", str(closed), "tmpfs", 0, "mode=755,size=1m")
    place.mkdir(parents=True)
    kernel.mount(f"/proc/self/fd/{handle}", str(place), "", kernel.MS_BIND | kernel.MS_REC)
    os.close(handle)

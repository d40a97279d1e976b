"""What the hostile programs attack, real while they run: files, a port, sockets and a process of this user."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.sandbox.cases import Place

SECRET = "only the user may read this"


@contextlib.contextmanager
def attacked_place(folder: Path) -> Iterator[Place]:
    """Make what is attacked, in a folder that only its user can enter."""
    home = folder / "home"
    (home / "store" / "objects").mkdir(parents=True)
    (home / "secret.txt").write_text(SECRET)
    (home / "store" / "objects" / "secret").write_text(SECRET)
    path = str(folder / "socket")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as local:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        local.bind(path)
        local.listen(64)
        try:
            yield Place(
                secret_file=str(home / "secret.txt"),
                folder=str(home),
                store=str(home / "store"),
                sources=str(Path(__file__).resolve().parents[2]),
                home=str(home),
                port=listener.getsockname()[1],
                socket_path=path,
                victim=victim.pid,
                runner=os.getpid(),
                answer=secrets.randbits(60),
            )
        finally:
            victim.kill()
            victim.wait()


def damage(place: Place, victim_alive: bool) -> list[str]:
    """Return what the programs have done to the place; empty where it is as it was."""
    found = [] if victim_alive else ["the victim was killed"]
    kept = (place.secret_file, f"{place.store}/objects/secret")
    found += [f"{name} was changed" for name in kept if not Path(name).exists() or Path(name).read_text() != SECRET]
    names = {"secret.txt", "store", "objects", "secret"}
    found += [str(path) for path in Path(place.folder).rglob("*") if path.name not in names]
    found += [str(path) for path in Path("/tmp").glob("left-by-a-program*")]
    found += [str(path) for path in (Path("/tmp/copy-of-secret"), Path("/tmp/device")) if path.exists()]
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process exists, runs and is not stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZTt"
    except OSError:
        return False

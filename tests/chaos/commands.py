"""Running the command for real and looking for what it leaves behind; shared by the chaos run and the tests of
stopping.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).with_name("hook")


def environment(home: Path, hook: dict[str, str] | None = None) -> dict[str, str]:
    """Of a command with a home of its own; ``hook`` sets kill points."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HACRL_"))}
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if hook is not None:
        path.insert(0, str(HOOK))
        inherited |= hook
    return inherited | {
        "HACRL_HOME": str(home),
        "HOME": str(home.parent),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def start(words: list[str], environ: dict[str, str], output: object = subprocess.PIPE) -> "subprocess.Popen[str]":
    """``hacrl`` with these words in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *words],
        cwd=ROOT,
        env=environ,
        stdout=output,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_ctrl_c,
    )


def _heed_ctrl_c() -> None:
    """A shell's background job ignores SIGINT, and so would its children; a terminal's foreground job does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """The output up to the first line with ``text`` in it; all of it where that never comes."""
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if text in line:
            break
    return "".join(lines)


def processes_of(home: Path, session: int = 0) -> list[str]:
    """Processes whose environment names this home, or that belong to this session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, leader = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            ours = f"HACRL_HOME={home}\0".encode() in (entry / "environ").read_bytes()
            member = session != 0 and int(leader) == session
            if state != "Z" and (ours or member) and int(entry.name) != os.getpid():
                found.append(f"{entry.name} " + (entry / "cmdline").read_text().replace("\0", " ")[:120])
        except OSError:
            continue
    return found


def wait_until_gone(home: Path, seconds: float, session: int = 0) -> list[str]:
    """What is left of the processes after at most so long."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(home, session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left

"""make demo-exchange: two parties as two processes, a folder as the bucket between them, and a picture at the end."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from hacrl_core.artifacts.locks import holder, try_exclusive

ROOT = Path(__file__).resolve().parent.parent
PLACE = Path(os.environ.get("HACRL_HOME", ".hacrl")).absolute() / "exchange-demo"
PARTIES = {"north": "ada", "south": "ben"}
HACRL = [sys.executable, "-m", "flows.cli"]
# From here on a party's output is only in its log.
LAST_SHOWN = "Time and memory by stage"


def main() -> int:
    """Make keys and a config, run both parties at the same time, and show what came of it."""
    # The parties inherit it: the folder stays theirs where this process ends before they do.
    lock = try_exclusive(PLACE / "running.lock")
    if lock is None:
        who = holder(PLACE / "running.lock")
        print(f"{PLACE}: another run of this demo is under way there ({who}); wait for it or set HACRL_HOME")
        return 2
    (PLACE / "keys").mkdir(exist_ok=True)
    public = {name: _public_key(PLACE / "keys" / f"{name}.key") for name in PARTIES}
    config = PLACE / "campaign.yaml"
    config.write_text(_config(public))
    print(f"Two parties, each with a key, a home and an agent of its own, below {PLACE}.", flush=True)
    print("north trains ada, south trains ben. Between them is the folder bucket, and nothing else.", flush=True)
    codes = _run_parties(config, lock)
    for name, code in codes.items():
        if code:
            print(f"{name} ended with {code}; see {PLACE / name}.log")
    if any(codes.values()):
        return max(codes.values())
    subprocess.run([*HACRL, "exchange", "status", str(config), "--home", str(PLACE / "north")], check=True, cwd=ROOT)
    homes = [part for name in PARTIES for part in ("--of", str(PLACE / name))]
    picture = str(PLACE / "who-learned-from-whom.png")
    subprocess.run([*HACRL, "exchange", "picture", str(config), picture, *homes], check=True, cwd=ROOT)
    weights = sum(path.suffix not in (".json", ".parquet") for path in (PLACE / "bucket").rglob("*") if path.is_file())
    print(f"objects in the bucket that are neither messages nor their tables, such as weights: {weights}")
    return 0


def _run_parties(config: Path, lock: int) -> dict[str, int]:
    """Run both parties, show what they say as they say it, and return their exit codes."""
    codes: dict[str, int] = {}

    def run(name: str) -> None:
        own = ["--set", f"party.name={name}", "--set", f"party.key={PLACE}/keys/{name}.key"]
        command = [*HACRL, "run", str(config), *own, "--home", str(PLACE / name)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            pass_fds=(lock,),
        )
        shown = True
        assert process.stdout is not None
        with (PLACE / f"{name}.log").open("w") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                shown = shown and not line.startswith(LAST_SHOWN)
                if shown and line.strip():
                    print(f"{name} | {line}", end="", flush=True)
        codes[name] = process.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in PARTIES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: codes.get(name, 1) for name in PARTIES}


def _public_key(path: Path) -> str:
    """Make a party's key, or read the public key of one that was made before."""
    note = path.with_suffix(".public")
    if not note.exists():
        path.unlink(missing_ok=True)
        made = subprocess.run([*HACRL, "exchange", "keygen", str(path)], check=True, capture_output=True, text=True)
        note.write_text(made.stdout.strip())
    return note.read_text()


def _config(public: dict[str, str]) -> str:
    parties = "\n".join(
        f"  {name}: {{agents: [{agent}], public_key: '{public[name]}', weight_limit: 2.0}}"
        for name, agent in PARTIES.items()
    )
    return f"""extends: {ROOT}/configs/demo-exchange.yaml
parties:
{parties}
exchange:
  bucket: {{bucket: 'file://{PLACE}/bucket'}}
"""


if __name__ == "__main__":
    sys.exit(main())

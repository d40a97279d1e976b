"""make demo-exchange: two parties as two processes, a folder as the bucket between them, and a picture at the end."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = Path(os.environ.get("HACRL_HOME", ".hacrl")).absolute() / "exchange-demo"
PARTIES = {"north": "ada", "south": "ben"}


def main() -> int:
    """Make keys and a config, run both parties at the same time, and show what came of it."""
    hacrl = [sys.executable, "-m", "flows.cli"]
    (PLACE / "keys").mkdir(parents=True, exist_ok=True)
    public = {name: _public_key(hacrl, PLACE / "keys" / f"{name}.key") for name in PARTIES}
    config = PLACE / "campaign.yaml"
    config.write_text(_config(public))
    print(f"two parties, two homes below {PLACE}, one folder between them; their logs are north.log and south.log")
    running = []
    for name in PARTIES:
        own = [
            "--set",
            f"party.name={name}",
            "--set",
            f"party.key={PLACE}/keys/{name}.key",
            "--home",
            str(PLACE / name),
        ]
        log = (PLACE / f"{name}.log").open("w")
        running.append(subprocess.Popen([*hacrl, "run", str(config), *own], stdout=log, stderr=log, cwd=ROOT))
    codes = [process.wait() for process in running]
    for name, code in zip(PARTIES, codes, strict=True):
        if code:
            print(f"{name} ended with {code}; see {PLACE / name}.log")
            return code
        print("\n".join((PLACE / f"{name}.log").read_text().strip().splitlines()[-12:]))
    subprocess.run([*hacrl, "exchange", "status", str(config), "--home", str(PLACE / "north")], check=True, cwd=ROOT)
    homes = [part for name in PARTIES for part in ("--of", str(PLACE / name))]
    picture = str(PLACE / "who-learned-from-whom.svg")
    subprocess.run([*hacrl, "exchange", "picture", str(config), picture, *homes], check=True, cwd=ROOT)
    weights = {name: len(list((PLACE / "bucket").rglob("*.safetensors"))) for name in PARTIES}
    print(f"weight files in the bucket: {max(weights.values())}")
    return 0


def _public_key(hacrl: list[str], path: Path) -> str:
    """Make a party's key, or read the public key of one that was made before."""
    note = path.with_suffix(".public")
    if not note.exists():
        path.unlink(missing_ok=True)
        made = subprocess.run([*hacrl, "exchange", "keygen", str(path)], check=True, capture_output=True, text=True)
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

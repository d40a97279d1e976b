"""``hacrl plan`` against the clock: run a campaign, calibrate from its first iterations, predict the others.

    python benchmarks/plan.py [SHAPE]        the demo's, or another one of SHAPES

The campaign is the demo's pair in short, with real worker processes. Ends with an error if the predicted wall time of
an iteration, or the predicted sum of stage seconds, is more than 15 % off. Run it on a quiet machine: it compares
seconds with seconds.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ["iterations=14", "name=planned", "tracking.enabled=false", "evaluate.benchmarks=[]"]
KNOWN, LIMIT = 5, 0.15
# Other shapes of work than the demo's: which stage is the longest differs.
SHAPES = {
    "demo": [],
    "few prompts, many samples": ["prompts_per_iteration=24", "samples_per_prompt=16"],
    "several epochs": ["update.epochs=3", "prompts_per_iteration=24"],
    "no sharing": ["algorithm={preset: gspo}"],
}


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from flows.home import Home
    from flows.plan.calibrate import compare
    from flows.plan.graph import workload_of
    from flows.plan.rates import load_rates
    from flows.record.history import read_history
    from hacrl_core.artifacts import Store

    shape = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with tempfile.TemporaryDirectory() as place:
        command = [str(Path(sys.executable).with_name("hacrl")), "run", str(ROOT / "configs" / "demo.yaml")]
        command += ["--home", place, *(part for setting in SETTINGS + SHAPES[shape] for part in ("--set", setting))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        home = Home.find(Path(place))
        history = read_history(Store(home.store), home.campaign("planned"))
        found = compare(history, workload_of(history.config, "CPU", 0), load_rates(), KNOWN)
    load = os.getloadavg()[0]
    print(f"{shape}: calibrated from {KNOWN} iterations, {found.iterations} predicted; load {load:.1f}")
    print(f"{'':24} {'predicted':>10} {'measured':>10} {'off':>8}")
    rows = [
        ("one iteration", found.predicted_iteration, found.measured_iteration, found.iteration_error),
        ("sum of stage seconds", found.predicted_stages, found.measured_stages, found.stage_error),
    ]
    for name, predicted, measured, error in rows:
        print(f"{name:24} {predicted:8.2f} s {measured:8.2f} s {error:+8.1%}")
    worst = max(abs(error) for *_, error in rows)
    print(f"{worst:.1%} off at most, {LIMIT:.0%} wanted")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

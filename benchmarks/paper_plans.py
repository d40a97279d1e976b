"""The plans of the paper's six pairs as a table in docs/gpus.md: computed by ``hacrl plan``, nothing measured."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpus.md"
BEGIN, END = "<!-- plans: written by `make plans` -->\n", "<!-- end of plans -->\n"
CLUSTERS = ("8xH100", "8xA100")
TIMED = ("generate", "verify", "score", "score reference", "update", "evaluate math500")
SECONDS = "Seconds of each stage in a typical iteration, H100 / A100:"
PATHS = "The critical path of an iteration on H100, in seconds:"


def main() -> int:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        print(f"{PAGE}: the lines {BEGIN.strip()} and {END.strip()} are missing")
        return 1
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{after}")
    print(f"{PAGE.relative_to(ROOT)}: written")
    return 0


def tables() -> str:
    sys.path.insert(0, str(ROOT))
    from flows.plan.plan import make_plan, parse_cluster
    from flows.plan.rates import GIGA, load_rates
    from hacrl_core.config.campaign import CampaignConfig
    from hacrl_core.config.loading import load_config

    rates, rows = load_rates(), []
    memory = ["| pair | agent | GPUs | generate | score | update |", "|---|---|---|---|---|---|"]
    times = [
        "| pair | agent | generate | verify | score | reference | update | benchmark math500 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    paths = []
    for path in sorted((ROOT / "configs" / "paper").glob("*.yaml")):
        if path.stem == "common":
            continue
        config = load_config(path, CampaignConfig)
        plans = [make_plan(config, parse_cluster(text, rates), rates) for text in CLUSTERS]
        fast, slow = plans
        idle = [plan.idle_share or 0.0 for plan in plans]
        rows.append(
            f"| {config.name} | {fast.iteration_seconds:.0f} s / {slow.iteration_seconds:.0f} s | "
            f"{fast.campaign_seconds / 3600:.1f} h / {slow.campaign_seconds / 3600:.1f} h | "
            f"{idle[0]:.0%} / {idle[1]:.0%} | {fast.disk_bytes / GIGA:.0f} GB | "
            f"{'fits' if not fast.faults and not slow.faults else 'does not fit'} |"
        )
        for agent, settings in config.agents.items():
            peak = {s.stage: (s.memory or 0) / GIGA for s in fast.stages if s.agent == agent}
            sizes = " | ".join(f"{peak[stage]:.1f}" for stage in ("generate", "score", "update"))
            memory.append(f"| {config.name} | {agent} | {len(settings.gpus)} | {sizes} |")
            took = [{s.stage: s.seconds for s in plan.stages if s.agent == agent} for plan in plans]
            both = " | ".join(f"{took[0].get(stage, 0):.0f} / {took[1].get(stage, 0):.0f}" for stage in TIMED)
            times.append(f"| {config.name} | {agent} | {both} |")
        named = [(title.partition(" iteration ")[0], seconds) for title, seconds in fast.critical_path]
        last = named[-1][0].partition(" ")[2]
        steps = " → ".join(f"{label.replace(f' {last}', '')} {seconds:.0f}" for label, seconds in named)
        paths.append(f"* {config.name}, {last}: {steps}")
    head = [
        "| pair | one iteration, H100 / A100 | 58 iterations | idle GPU time | disk at the end | 80 GB |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(
        [
            *head,
            *rows,
            "",
            "GB on the busiest GPU, of 80:",
            "",
            *memory,
            "",
            SECONDS,
            "",
            *times,
            "",
            PATHS,
            "",
            *paths,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

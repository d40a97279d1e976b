"""The curves of ``make bench-scale``: docs/pictures/scale.png from docs/pictures/scale.json."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
BLUE, ORANGE, GREY = "#2f6db3", "#d9822b", "#8a8a8a"


def main() -> None:
    """Draw four panels: efficiency, the driver, one campaign on more GPUs, the whole paper on more nodes."""
    matplotlib.use("Agg")
    data: dict[str, Any] = json.loads((PICTURES / "scale.json").read_text())
    figure, panels = plt.subplots(1, 4, figsize=(17, 4.2), constrained_layout=True)
    _efficiency(panels[0], data["rows"])
    _driver(panels[1], data["rows"])
    _one_campaign(panels[2], data["one_campaign"])
    _reproduction(panels[3], data["reproduction"])
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%d"))
    figure.savefig(PICTURES / "scale.png", dpi=110)


def _efficiency(panel: Any, rows: list[dict[str, float]]) -> None:
    panel.axhspan(95, 105, color=GREY, alpha=0.2, label="within 5 % of the plan")
    panel.plot(
        [r["gpus"] for r in rows], [100 * r["efficiency"] for r in rows], "o-", color=BLUE, label="the real flow"
    )
    panel.set(title="Time planned / time taken", xlabel="GPUs, one campaign on every eight", ylabel="%", ylim=(80, 108))
    panel.legend(loc="lower left")


def _driver(panel: Any, rows: list[dict[str, float]]) -> None:
    count = [r["campaigns"] for r in rows]
    panel.plot(count, [100 * r["driver_cores"] for r in rows], "o-", color=BLUE, label="one core, in real time")
    panel.plot(count, [100 * r["look_up_share"] for r in rows], "s-", color=ORANGE, label="of the time in look-ups")
    panel.set(title="What driving them costs", xlabel="campaigns in one process", ylabel="%", ylim=(0, None))
    panel.legend(loc="upper left")


def _one_campaign(panel: Any, rows: list[dict[str, float]]) -> None:
    gpus = [r["gpus"] for r in rows]
    first = rows[0]["iteration_seconds"] * rows[0]["gpus"]
    panel.plot(gpus, [100 * first / (r["iteration_seconds"] * r["gpus"]) for r in rows], "o-", color=BLUE)
    panel.set(title="One campaign on more GPUs (plan)", xlabel="GPUs", ylim=(0, 105))
    panel.set_ylabel("work per GPU-second, % of that on eight")
    for row in rows[:4]:
        panel.annotate(
            f"{row['iteration_seconds']:.0f} s an iteration",
            (row["gpus"], 100 * first / (row["iteration_seconds"] * row["gpus"])),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=8,
        )


def _reproduction(panel: Any, days: dict[str, float]) -> None:
    nodes = {int(name.split("_")[2]): value for name, value in days.items() if name.startswith("days_on_")}
    panel.plot(list(nodes), list(nodes.values()), "o-", color=BLUE)
    panel.set_yscale("log")
    panel.set(
        title=f"The whole paper, {days['campaigns']:.0f} campaigns (plan)", xlabel="nodes of 8 H100", ylabel="days"
    )
    for count, value in nodes.items():
        panel.annotate(f"{value:.1f}", (count, value), xytext=(5, 5), textcoords="offset points", fontsize=8)


if __name__ == "__main__":
    main()

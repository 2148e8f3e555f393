"""The chart of `peers.py`: seconds per step and peak memory, a column of panels per size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's palette, which colour-blind readers can tell apart; every bar is labelled as well.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the report's rows; dots are the single measured steps. Memory is the GPU's, or RAM where there is no GPU."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["summary"] if "seconds" in row]
    if not rows:
        return
    sizes = list(dict.fromkeys(row["tokens"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    where, label = "host_bytes", "peak RAM, GB"
    if any(row["device_bytes"] is not None for row in rows):
        where, label = "device_bytes", "peak GPU memory, GB"
    height = 2.4 + 0.84 * len(systems)
    figure, axes = plt.subplots(2, len(sizes), figsize=(4.2 * len(sizes) + 1.5, height), squeeze=False)
    for column, tokens in enumerate(sizes):
        time, memory = axes[0][column], axes[1][column]
        found = {row["system"]: row for row in rows if row["tokens"] == tokens}
        for index, system in enumerate(systems):
            row = found.get(system)
            laps = measured(report, tokens, system)
            bar(time, index, row and row["seconds"], "{:.3g}", max(laps, default=0.0))
            time.plot(laps, [index] * len(laps), ".", color="black", markersize=3)
            bar(memory, index, row and row[where] and row[where] / 1e9, "{:.1f}")
        for panel, name in ((time, "seconds per optimizer step"), (memory, label)):
            panel.set_yticks(range(len(systems)), systems if column == 0 else [""] * len(systems))
            panel.set_ylim(len(systems) - 0.5, -0.5)
            panel.set_xlabel(name)
            panel.margins(x=0.2)
            panel.set_xlim(left=0)
            panel.spines[["top", "right"]].set_visible(False)
        time.set_title(f"{tokens:,} tokens per step")
    device = report.get("machine", {}).get("device", "")
    figure.suptitle(f"{report['parameters'] / 1e6:,.0f} million parameters, AdamW, bf16 autocast; {device}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bar(panel: Any, index: int, value: float | None, form: str, least: float = 0.0) -> None:
    """A bar with its value behind it, no nearer than `least`; words where nothing was measured."""
    if value is None:
        panel.annotate("  not measured", (0, index), va="center", fontsize=8, color="#555555")
        return
    panel.barh(index, value, color=COLOURS[index % len(COLOURS)])
    panel.annotate(
        form.format(value), (max(value, least), index), (5, 0), textcoords="offset points", va="center", fontsize=8
    )


def measured(report: dict[str, Any], tokens: int, system: str) -> list[float]:
    """Seconds of every measured step."""
    runs = [run for run in report["runs"] if "laps" in run and (run["tokens"], run["system"]) == (tokens, system)]
    return [lap for run in runs for lap in run["laps"][run["warm_up"] :]]

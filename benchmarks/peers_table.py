"""From the runs of `peers.py` to one row per system and size, and to text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from feeds import Record
from limits import needed_bytes

LOSSES = 6
REASON_LENGTH = 160
RATES = ("h2d", "d2h", "host")


def summarize(runs: Sequence[Record], limits: dict[str, float | None], parameters: int) -> list[Record]:
    """One row per size and system, in the order of the runs; ratios are to every other system at the same size.

    `seconds` is the median over all measured steps of all rounds, `mean` their mean, `shares` the achieved rates over
    the machine's limits. A row without a single measured step has only a `reason`; a row of which some round failed has
    one beside its figures.
    """
    keys = dict.fromkeys((run["tokens"], run["system"]) for run in runs)
    rows = [row_of([run for run in runs if (run["tokens"], run["system"]) == key], limits, parameters) for key in keys]
    order = list(dict.fromkeys(row["tokens"] for row in rows))
    rows.sort(key=lambda row: order.index(row["tokens"]))
    for row in rows:
        if "seconds" in row:
            others = [other for other in rows if other is not row and other["tokens"] == row["tokens"]]
            row["ratios"] = {
                other["system"]: row["seconds"] / other["seconds"] for other in others if "seconds" in other
            }
    return rows


def row_of(runs: Sequence[Record], limits: dict[str, float | None], parameters: int) -> Record:
    row: Record = {"system": runs[0]["system"], "tokens": runs[0]["tokens"]}
    reasons = [run["reason"] for run in runs if "reason" in run]
    if reasons:
        row["reason"] = reasons[0]
    done = [run for run in runs if "laps" in run]
    if not done:
        return row
    laps = [lap for run in done for lap in run["laps"][run["warm_up"] :]]
    seconds = statistics.median(laps)
    facts = done[0]
    needed = needed_bytes(facts.get("streamed", parameters), facts["batches"], facts.get("moment_bytes", 4))
    rates = {name: needed[name] / seconds for name in RATES} if needed["host"] else {}
    return row | {
        "seconds": seconds,
        "mean": statistics.fmean(laps),
        "fastest": min(laps),
        "slowest": max(laps),
        "measured_steps": len(laps),
        "rounds": len(done),
        "tokens_per_second": row["tokens"] / seconds,
        "device_bytes": max((run["device_bytes"] for run in done if run["device_bytes"] is not None), default=None),
        "host_bytes": max((run["host_bytes"] for run in done if run["host_bytes"] is not None), default=None),
        "rates": rates,
        "shares": {name: rate / limit for name, rate in rates.items() if (limit := limits.get(name)) is not None},
        "losses": done[0]["losses"][:LOSSES],
        "steps_before": done[0]["steps_before"],
    }


def table(report: dict[str, Any]) -> str:
    """Everything in the report that a reader compares."""
    rows: list[Record] = report["summary"]
    sizes = list(dict.fromkeys(row["tokens"] for row in rows))
    parts = [head(report)]
    for tokens in sizes:
        mine = [row for row in rows if row["tokens"] == tokens]
        done = [row for row in mine if "seconds" in row]
        parts.append(f"{tokens} tokens per step")
        if done:
            parts += [aligned(figures(done)), "seconds over those of", aligned(ratios(done)), aligned(losses(done))]
        parts += [f"{row['system']}: {row['reason'][:REASON_LENGTH]}" for row in mine if "reason" in row]
    return "\n\n".join(parts)


def head(report: dict[str, Any]) -> str:
    machine, limits = report.get("machine", {}), report.get("limits", {})
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    rates = ", ".join(f"{name} {giga(limits.get(name))}" for name in ("h2d", "d2h", "duplex", "host"))
    return (
        f"{report['parameters']:,} parameters on {machine.get('device', 'an unknown device')}, "
        f"{machine.get('cores', '?')} cores; {versions}\n"
        f"limits in GB/s: {rates} (duplex: each way while both run). Bus and RAM below: GB/s of the bytes that a step\n"
        f"needs, and their share of the limit. s/step: median, in brackets the mean. GPU and RAM: peaks in GB."
    )


def figures(rows: Sequence[Record]) -> list[list[str]]:
    lines = [["system", "s/step", "(mean)", "tokens/s", "GPU", "RAM", "to device", "to host", "RAM traffic"]]
    for row in rows:
        rates = [rate(row, name) for name in RATES]
        seconds, mean = f"{row['seconds']:.3f}", f"({row['mean']:.3f})"
        memory = [giga(row["device_bytes"]), giga(row["host_bytes"])]
        lines.append([row["system"], seconds, mean, f"{row['tokens_per_second']:,.0f}", *memory, *rates])
    return lines


def rate(row: Record, name: str) -> str:
    if name not in row["rates"]:
        return "-"
    share = f" ({row['shares'][name]:.0%})" if name in row["shares"] else ""
    return giga(row["rates"][name]) + share


def ratios(rows: Sequence[Record]) -> list[list[str]]:
    names = [row["system"] for row in rows]
    cells = [[f"{row['ratios'][name]:.3f}" if name in row["ratios"] else "1" for name in names] for row in rows]
    return [["system", *names], *([name, *line] for name, line in zip(names, cells, strict=True))]


def losses(rows: Sequence[Record]) -> list[list[str]]:
    """Side by side; they can agree only where as many steps went before."""
    longest = max(len(row["losses"]) for row in rows)
    lines = [["loss of step", *(str(index) for index in range(longest)), "steps before"]]
    for row in rows:
        values = [f"{loss:.5f}" for loss in row["losses"]]
        lines.append([row["system"], *values, *([""] * (longest - len(values))), str(row["steps_before"])])
    return lines


def giga(number: float | None) -> str:
    return "-" if number is None else f"{number / 1e9:.1f}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if column == 0 else cell.rjust(w)
            for column, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )

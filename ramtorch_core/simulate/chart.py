"""Timelines and figures for the eye: tables and charts as text, and charts as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.simulate.clock import Kind
from ramtorch_core.simulate.timeline import Cause, Span, Timeline

# Okabe and Ito's palette, which colour-blind readers can tell apart; light and dark alternate along a row.
COLOURS = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD: "#0072B2",
    Kind.INPUT: "#0072B2",
    Kind.WEIGHT: "#009E73",
    Kind.LOSS: "#BBBBBB",
    Kind.TRANSFER: "#E69F00",
    Kind.GRADIENT: "#CC79A7",
    Kind.STATE: "#F0E442",
    Kind.UPDATE: "#D55E00",
    Kind.SEND: "#999999",
    Kind.ISSUE: "#DDDDDD",
}
NAMES = {
    Kind.FORWARD: "F, forward",
    Kind.BACKWARD: "B, backward",
    Kind.INPUT: "I, gradient of the input",
    Kind.WEIGHT: "W, gradient of the weights",
    Kind.LOSS: "L, what is in no chunk",
    Kind.TRANSFER: "t, transfer into a slot",
    Kind.GRADIENT: "g, gradient to the host",
    Kind.STATE: "s, optimizer state",
    Kind.UPDATE: "u, optimizer update",
    Kind.SEND: "send to another GPU",
    Kind.ISSUE: "i, the host is busy",
}
OUTLINED = 0.006
"""Part of the picture's width from which a span has an outline: nothing else would be seen of a narrower one."""
DARK = frozenset({Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.UPDATE})
MARKS = {Cause.STALL: "~", Cause.BUBBLE: "."}


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as text, a column per key, right-aligned."""
    if not rows:
        return ""
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = ["  ".join(key.rjust(width) for key, width in widths.items())]
    lines += ["  ".join(row[key].rjust(width) for key, width in widths.items()) for row in rows]
    return "\n".join(lines)


def text_chart(line: Timeline, width: int = 100) -> str:
    """One row per resource that did something, `width` columns from the window's start to its end.

    A span shows its label where it fits, else one letter; `~` is a stall, `.` a bubble.
    """
    if not line.seconds:
        return "(nothing takes any time)"
    names = [name for name in line.resources if any(span.resource == name and _long(span) for span in line.spans)]
    margin = max(map(len, names), default=0)
    rows = []
    for name in names:
        cells = [" "] * width
        for gap in line.gaps:
            if gap.resource == name:
                first, last = _columns(line, gap.start, gap.end, width)
                cells[first:last] = MARKS[gap.cause] * (last - first)
        for span in line.spans:
            if span.resource == name and _long(span):
                first, last = _columns(line, span.start, span.end, width)
                last = max(last, first + (first < width))
                fits = len(span.label) < last - first
                cells[first:last] = (span.label if fits else span.kind.value).ljust(last - first, "-")[: last - first]
        rows.append(f"{name.rjust(margin)} |{''.join(cells)}|")
    seconds = f"{line.seconds:.4g} s"
    legend = "~ stall: waits for a copy or an update   . bubble: waits for another stage"
    return "\n".join([*rows, f"{'0'.rjust(margin + 3)}{seconds.rjust(width - 1)}", legend])


def plot(line: Timeline, path: str, title: str = "") -> None:
    """Draw the timeline as a PNG at `path`.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigurationError("a chart needs matplotlib: pip install 'ramtorch-lightning[plots]'") from error
    names = [name for name in line.resources if any(span.resource == name and _long(span) for span in line.spans)]
    figure = Figure(figsize=(11, 1.3 + 0.42 * len(names)), dpi=90, layout="constrained")
    axes = figure.add_subplot()
    for row, name in enumerate(names):
        _draw(axes, line, name, len(names) - 1 - row)
    axes.set_yticks(range(len(names)), names[::-1])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(0, line.seconds or 1)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    shown = {span.kind for span in line.spans if _long(span)}
    handles = [
        Patch(facecolor=COLOURS[kind], edgecolor="black", label=NAMES[kind]) for kind in COLOURS if kind in shown
    ]
    causes = {gap.cause for gap in line.gaps}
    handles += [
        Patch(facecolor="white", edgecolor="#777777", hatch=hatch, label=cause.value)
        for cause, hatch in HATCHES.items()
        if cause in causes
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=8, frameon=False)
    try:
        figure.savefig(path, format="png")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"the chart cannot be written to {path}: {reason}") from error


HATCHES = {Cause.STALL: "xxx", Cause.BUBBLE: "..."}


def _draw(axes: Any, line: Timeline, name: str, height: int) -> None:
    for gap in line.gaps:
        if gap.resource == name:
            where = [(gap.start - line.start, gap.end - gap.start)]
            axes.broken_barh(
                where,
                (height - 0.4, 0.8),
                facecolor="white",
                edgecolor="#777777",
                hatch=HATCHES[gap.cause],
                linewidth=0,
            )
    for span in line.spans:
        if span.resource != name or not _long(span):
            continue
        start, end = max(span.start, line.start) - line.start, min(span.end, line.end) - line.start
        part, colour = (end - start) / line.seconds, COLOURS[span.kind]
        edge = {"edgecolor": "black", "linewidth": 0.4} if part > OUTLINED else {"edgecolor": colour, "linewidth": 0.1}
        axes.broken_barh([(start, end - start)], (height - 0.4, 0.8), facecolor=colour, **edge)
        if part > 0.011 * len(span.label):
            colour = "white" if span.kind in DARK else "black"
            axes.text((start + end) / 2, height, span.label, ha="center", va="center", fontsize=7, color=colour)


def _long(span: Span) -> bool:
    return span.end > span.start


def _columns(line: Timeline, start: float, end: float, width: int) -> tuple[int, int]:
    """First and last column; what is shorter than half of one disappears."""
    first, last = (round((moment - line.start) / line.seconds * width) for moment in (start, end))
    return min(max(first, 0), width), min(max(last, 0), width)

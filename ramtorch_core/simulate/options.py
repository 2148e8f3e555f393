"""What the simulators' command lines share: numbers and sweeps, tables and charts, errors."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ramtorch_core.errors import ConfigurationError, PlanError, sized
from ramtorch_core.simulate.chart import plot, table, text_chart
from ramtorch_core.simulate.costs import BOTH_WAYS, HOST_MEMORY
from ramtorch_core.simulate.timeline import Timeline

T = TypeVar("T")
PARTS = frozenset({"GPU", "bubble", "stall", "H2D", "D2H", "host", "link", HOST_MEMORY, BOTH_WAYS})
"""Figures that are parts of time or of a capacity, 0 to 1."""
SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class Row:
    """One simulated combination: knobs, figures (seconds, bytes, and parts of time from 0 to 1), timeline.

    `details` are in the JSON only.
    """

    knobs: dict[str, object]
    figures: dict[str, float]
    line: Timeline
    details: dict[str, object] = field(default_factory=dict)


def number(text: str) -> float:
    """A number, with K, M, G or T for thousands, millions and so on."""
    match = re.fullmatch(r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)([KMGT]?)", text.strip())
    try:
        return float(match[1]) * SUFFIXES[match[2]] if match else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write for example 1.5, 2e-3 or 200M") from None


def count(text: str) -> int:
    """A whole number."""
    value = number(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def amounts(text: str) -> tuple[float, ...]:
    """One number for all chunks, or one for each, joined by colons."""
    return tuple(map(number, text.split(":")))


def one_of(*names: str) -> Callable[[str], str]:
    """One of these words."""

    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return convert


def check_amounts(flag: str, values: Sequence[float]) -> None:
    """Refuse times and sizes that cannot be.

    Args:
        flag: that gave them.

    Raises:
        ConfigurationError: one is negative, or not finite.
    """
    for value in values:
        if not 0 <= value < float("inf"):
            reason = "it cannot be negative; use 0 for what takes nothing" if value < 0 else "it must be finite"
            raise ConfigurationError(f"--{flag} {value:g}: {reason}")


def listed(convert: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Values separated by commas: each is simulated."""

    def convert_all(text: str) -> tuple[T, ...]:
        return tuple(convert(part.strip()) for part in text.split(","))

    return convert_all


def _png(path: str) -> str:
    if not path.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{path!r}: charts are PNG, so the name of the file must end in .png")
    return path


def combinations(arguments: argparse.Namespace, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every combination of the values that these flags were given."""
    for values in itertools.product(*(getattr(arguments, name) for name in names)):
        yield dict(zip(names, values, strict=True))


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser with the flags for output, which all simulators have."""
    made = argparse.ArgumentParser(
        prog=f"python -m ramtorch_core.{program}",
        description=description,
        epilog="Flags take lists: --window 1,2,3 simulates each. Numbers may end in K, M, G or T. Times are in "
        "seconds, or in any other unit if all of them are.",
    )
    output = made.add_argument_group("output")
    output.add_argument("--plot", type=_png, metavar="FILE.png", help="draw the fastest combination")
    output.add_argument(
        "--json", action="store_true", help="print figures and the fastest timeline as JSON, nothing else"
    )
    output.add_argument("--width", type=count, default=100, help="columns of the text chart (default: 100)")
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; `given` are the names of those that are there, also where they have their defaults."""
    arguments = made.parse_args(argv)
    unset = argparse.Namespace(**dict.fromkeys(vars(arguments), made))
    arguments.given = {name for name, value in vars(made.parse_args(argv, unset)).items() if value is not made}
    return arguments


def refuse_beside(flag: str, others: Sequence[str], arguments: argparse.Namespace) -> None:
    """Refuse flags that would be ignored beside another one.

    Raises:
        ConfigurationError: `flag` was given, and one of the others.
    """
    ignored = [other for other in others if other in arguments.given]
    if flag in arguments.given and ignored:
        raise ConfigurationError(f"--{ignored[0].replace('_', '-')} is ignored beside --{flag}: leave one out")


def main(body: Callable[[Sequence[str]], None], program: str, argv: Sequence[str] | None) -> int:
    """Run a command; what the user got wrong becomes one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else argv
    try:
        for word in words:
            if word.startswith("--") and word.endswith("--"):  # argparse would take the value for none at all
                raise ConfigurationError(f"{word}: write --flag value, or --flag=value")
        body(_attached(words))
    except (ConfigurationError, PlanError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def present(rows: Sequence[Row], arguments: argparse.Namespace, head: str = "", **more: object) -> None:
    """Print the table and the chart of the fastest row that fits, or JSON; draw a PNG if asked.

    Args:
        head: printed first, unless JSON is asked for; nothing is printed before what cannot be done is refused.
        more: into the JSON object.
    """
    if arguments.width < 20:
        raise ConfigurationError(f"width={arguments.width}: a chart needs at least 20 columns")
    if arguments.width > 1000:
        raise ConfigurationError(f"width={arguments.width}: a chart has at most 1000 columns")
    if not all(math.isfinite(value) for row in rows for value in row.figures.values()):
        raise ConfigurationError("the bytes add up to more than a number can hold: use a larger unit")
    fitting = [i for i, row in enumerate(rows) if row.knobs.get("fits") != "no"]
    best = min(fitting, key=lambda i: rows[i].figures["seconds"])
    varied = {key for row in rows for key in row.knobs if key != "fits" and row.knobs[key] != rows[0].knobs[key]}
    common = ", ".join(f"{key}={_word(value)}" for key, value in rows[0].knobs.items() if key not in {*varied, "fits"})
    title = ", ".join(f"{key}={_word(value)}" for key, value in rows[best].knobs.items() if key in varied) or common
    if arguments.plot:
        plot(rows[best].line, arguments.plot, f"{title}: {rows[best].figures['seconds']:.4g} s")
    if arguments.json:
        found = [{**row.knobs, **row.figures, **row.details} for row in rows]
        print(json.dumps({"rows": found, "fastest": best, "timeline": _as_data(rows[best].line), **more}))
        return
    used = [key for key in rows[0].figures if any(row.figures.get(key) for row in rows) or key in ("seconds", "GPU")]
    if head:
        print(f"{head}\n")
    if common:
        print(f"{common}\n")
    print(table([_cells(row, used, varied | ({"fits"} & row.knobs.keys())) for row in rows]))
    print(f"\nfastest: {title}" if varied else "")
    print(text_chart(rows[best].line, arguments.width))
    if arguments.plot:
        print(f"chart written to {arguments.plot}")


def mark_what_fits(rows: Sequence[Row], gpu_bytes: float | None) -> None:
    """Mark the rows that fit into so much memory of a GPU.

    Raises:
        ConfigurationError: none does.
    """
    if gpu_bytes is None:
        return
    for row in rows:
        row.knobs["fits"] = "yes" if row.figures["peak bytes"] <= gpu_bytes else "no"
    if all(row.knobs["fits"] == "no" for row in rows):
        least = min(rows, key=lambda row: row.figures["peak bytes"])
        knobs = ", ".join(f"{key}={value}" for key, value in least.knobs.items() if key != "fits")
        raise ConfigurationError(
            f"none of {len(rows)} combinations fits into {sized(gpu_bytes)} of GPU memory: the smallest, "
            f"{knobs}, needs {sized(least.figures['peak bytes'])}. Lower --window or --pin, or checkpoint"
        )


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cells(row: Row, used: Sequence[str], knobs: AbstractSet[str]) -> dict[str, str]:
    shown = {key: _word(value) for key, value in row.knobs.items() if key in knobs}
    for key in used:
        value = row.figures[key]
        if key.endswith("bytes"):
            shown[key.replace("bytes", "GB")] = f"{value / 1e9:.2f}"
        else:
            shown[key] = f"{100 * value:.0f} %" if key in PARTS else f"{value:.4g}"
    return shown


def _as_data(line: Timeline) -> dict[str, object]:
    return {
        "start": line.start,
        "end": line.end,
        "spans": [
            {"resource": s.resource, "label": s.label, "kind": s.kind.name.lower(), "start": s.start, "end": s.end}
            for s in line.spans
        ],
        "gaps": [
            {"resource": g.resource, "cause": g.cause.value, "reason": g.reason, "start": g.start, "end": g.end}
            for g in line.gaps
        ],
    }


def _attached(argv: Sequence[str]) -> list[str]:
    """`--tf -1` as `--tf=-1`, so that a negative number is read as one, and refused for what it is."""
    words: list[str] = []
    for word in argv:
        if re.match(r"-[\d.]", word) and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words

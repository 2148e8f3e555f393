"""The command line of the schedule simulator."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.plan.schedule import ALIASES, SCHEDULES, Schedule, build, interleaved, uniform_1f1b
from ramtorch_core.plan.size import check_size
from ramtorch_core.simulate import options
from ramtorch_core.simulate.costs import ChunkCost
from ramtorch_core.simulate.options import Row, amounts, check_amounts, count, listed, number, one_of
from ramtorch_core.simulate.pipeline import PipelinePlan, PipelineResult, simulate_pipeline

PROGRAM = "schedule_simulator"
TEACHING = "uniform_1f1b"
NAMES = (*SCHEDULES, *ALIASES, TEACHING)
FLAT = ("gpipe", TEACHING, "staggered_1b1f", "eager_1f1b", "zb_h1")
KNOBS = ("p", "m", "v", "tf", "tb", "comm", "weight_share")


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate pipeline schedules as the arguments say. Returns the exit code: 0, or 2 for input that cannot work."""
    return options.main(_run, PROGRAM, argv)


def add_schedule_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that choose schedules and links."""
    group = parser.add_argument_group("pipeline")
    add = group.add_argument
    add("--p", type=listed(count), default=(4,), help="GPUs (default: 4)")
    add("--m", type=listed(count), default=(8,), help="microbatches (default: 8)")
    add("--comm", type=listed(number), default=(0.0,), help="seconds that an activation is on a link (default: 0)")
    add("--schedule", type=listed(one_of(*NAMES)), help=f"{', '.join(NAMES)} (default: those with a stage per GPU)")
    stages = "stages per GPU: of interleaved, which is what more than 1 shows by default (default: 2)"
    add("--v", type=listed(count), default=(None,), help=stages)
    add("--vshape", action="store_true", help="add zbv: two stages per GPU, placed in a V")
    share = "part of a backward that is the weight gradient, where it is split (default: 0.5)"
    add("--weight-share", type=listed(number), default=(0.5,), help=share)
    add("--table", metavar="FILE", help="a schedule of your own instead: a line of ops per GPU, as in 0F0 0F1 0B0 0B1")


def schedules(arguments: argparse.Namespace, knobs: Mapping[str, Any]) -> list[Schedule]:
    """The schedules of one combination of GPUs, microbatches and stages per GPU.

    Raises:
        ConfigurationError: counts below one, stages per GPU that the schedule does not take, or flags that say
            otherwise than a table.
    """
    options.refuse_beside("table", ("p", "m", "v", "schedule", "vshape"), arguments)
    p, m, v = knobs["p"], knobs["m"], knobs["v"]
    if arguments.table:
        return [_from_file(arguments.table)]
    if v is not None and v < 1:
        raise ConfigurationError(f"v={v}: a GPU has at least 1 stage")
    names = arguments.schedule or (FLAT if v in (None, 1) else ("interleaved",))
    if v not in (None, 1) and "interleaved" not in names:
        raise ConfigurationError(
            f"v={v} stages per GPU: only interleaved takes them; add it to --schedule, or use --v 1"
        )
    first = v == arguments.v[0]  # what takes no number of stages is not repeated for each
    found = [_named(name, p, m, v or 2) for name in names if name == "interleaved" or first or not arguments.schedule]
    if arguments.vshape and "zbv" not in names and first:
        found.append(build("zbv", p, m))
    return found


def _named(name: str, p: int, m: int, v: int) -> Schedule:
    check_size(p, m, v if name == "interleaved" else 1, names=("p", "m", "v"))
    checked = build("sequential" if name == TEACHING else name, p, m)
    if name == TEACHING:
        return uniform_1f1b(p, m)
    return interleaved(p, m, v) if name == "interleaved" else checked


def _from_file(path: str) -> Schedule:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    return Schedule.parse(text, name=path)


def named(schedule: Schedule) -> dict[str, object]:
    """What tables say of a schedule."""
    stages = schedule.stages // schedule.devices
    return {"schedule": schedule.name, "p": schedule.devices, "m": schedule.microbatches, "v": stages}


def figures(result: PipelineResult, stages_per_device: float) -> dict[str, float]:
    """What tables show of a pipeline; the peaks are those of the GPU that has the largest."""
    devices = result.devices
    return {
        "seconds": result.seconds,
        "GPU": result.compute,
        "bubble": result.bubble,
        "stall": result.stall,
        "link": result.link,
        "H2D": max(device.h2d for device in devices),
        "D2H": max(device.d2h for device in devices),
        **result.shared,
        "microbatches held": max(device.peak_microbatches for device in devices) / stages_per_device,
        "peak bytes": max(device.peak_bytes for device in devices),
    }


def _run(argv: Sequence[str]) -> None:
    parser = options.parser(PROGRAM, "Simulates pipeline schedules: makespan, bubbles and memory.")
    add_schedule_flags(parser)
    per_gpu = "of one microbatch on one GPU, all its stages together; one number, or one per GPU as in 1:1:2"
    parser.add_argument(
        "--tf", type=listed(amounts), default=((1.0,),), help=f"seconds: forward {per_gpu} (default: 1)"
    )
    parser.add_argument(
        "--tb", type=listed(amounts), default=((2.0,),), help="seconds: backward, likewise (default: 2)"
    )
    parser.add_argument("--kept-bytes", type=number, default=0.0, help="activations of one microbatch on one GPU")
    arguments = options.parse(parser, argv)
    check_amounts("comm", arguments.comm)
    rows = []
    for knobs in options.combinations(arguments, KNOBS):
        plan = PipelinePlan(send=knobs["comm"], weight_share=knobs["weight_share"])
        for schedule in schedules(arguments, knobs):
            share = schedule.devices / schedule.stages
            costs = [
                ChunkCost(
                    forward=_of_device("tf", knobs, home, schedule) * share,
                    backward=_of_device("tb", knobs, home, schedule) * share,
                    kept_bytes=arguments.kept_bytes * share,
                )
                for home in schedule.placement
            ]
            result = simulate_pipeline(schedule, [[cost] for cost in costs], plan)
            shown = named(schedule)
            for name in KNOBS[3:]:
                if len(getattr(arguments, name)) > 1:
                    value = knobs[name]
                    shown[name] = ":".join(f"{part:g}" for part in value) if isinstance(value, tuple) else value
            held: dict[str, object] = {"peak microbatches": [device.peak_microbatches for device in result.devices]}
            rows.append(Row(shown, figures(result, 1 / share), result.timeline, held))
    options.present(rows, arguments)


def _of_device(flag: str, knobs: Mapping[str, Any], device: int, schedule: Schedule) -> float:
    values: tuple[float, ...] = knobs[flag]
    if len(values) not in (1, schedule.devices):
        raise ConfigurationError(
            f"--{flag} has {len(values)} values for {schedule.devices} GPUs: give 1, or one for each"
        )
    check_amounts(flag, values)
    return values[device % len(values)]

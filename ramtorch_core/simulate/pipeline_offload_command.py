"""The command line of the simulator of pipelines whose stages stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.plan.partition import partition
from ramtorch_core.simulate import options
from ramtorch_core.simulate.chunk_flags import SWEPT, add_chunk_flags, chunks_of, machine_of
from ramtorch_core.simulate.knobs import Accumulate
from ramtorch_core.simulate.options import Row, check_amounts, count, listed, one_of
from ramtorch_core.simulate.pipeline import PipelinePlan, simulate_pipeline
from ramtorch_core.simulate.schedule_command import add_schedule_flags, figures, named, schedules

PROGRAM = "pipeline_offload_simulator"
MAX_CUTS = 20_000_000
"""Steps of the search for the most even cut: some tens of seconds."""
KNOBS = ("p", "m", "v", "comm", "weight_share", "window", "pin", "activations", "accumulate")


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate streamed stages as the arguments say. Returns the exit code: 0, or 2 for input that cannot work."""
    return options.main(_run, PROGRAM, argv)


def _run(argv: Sequence[str]) -> None:
    parser = options.parser(PROGRAM, "Simulates pipelines whose stages stream: makespan, bubbles, stalls and memory.")
    add_chunk_flags(parser)
    add_schedule_flags(parser)
    group = parser.add_argument_group("streaming, on each GPU")
    group.add_argument(
        "--window", type=listed(count), default=(2,), help="slots; 0 keeps all chunks resident (default: 2)"
    )
    group.add_argument("--pin", type=listed(count), default=(0,), help="resident chunks, spread evenly (default: 0)")
    policies = listed(one_of("keep", "checkpoint"))
    group.add_argument("--activations", type=policies, default=("keep",), help="keep, checkpoint (default: keep)")
    places = [place.value for place in Accumulate]
    group.add_argument("--accumulate", type=listed(one_of(*places)), default=("host",), help=f"gradients: {places}")
    arguments = options.parse(parser, argv)
    check_amounts("comm", arguments.comm)
    machine = machine_of(arguments)
    rows = []
    for knobs in options.combinations(arguments, (*SWEPT, *KNOBS)):
        chunks = chunks_of(arguments, machine, knobs)
        plan = PipelinePlan(
            window=knobs["window"] or None,
            pin=knobs["pin"],
            checkpoint=knobs["activations"] == "checkpoint",
            weight_share=knobs["weight_share"],
            send=knobs["comm"],
            accumulate=Accumulate(knobs["accumulate"]),
        )
        for schedule in schedules(arguments, knobs):
            if len(chunks) < schedule.stages:
                raise ConfigurationError(
                    f"{len(chunks)} chunks for the {schedule.stages} stages of {schedule.name}: each needs at least one"
                )
            if len(chunks) ** 2 * schedule.stages > MAX_CUTS:
                raise ConfigurationError(
                    f"layers={len(chunks)} for the {schedule.stages} stages of {schedule.name} (p={schedule.devices}): "
                    f"too many to find the most even cut"
                )
            parts = partition([chunk.forward + chunk.backward for chunk in chunks], schedule.stages)
            stages = [[chunks[i] for i in part] for part in parts]
            result = simulate_pipeline(schedule, stages, plan, machine)
            shown = named(schedule)
            for name in ("window", *(n for n in (*SWEPT, *KNOBS[3:]) if n != "window")):
                if name == "window" or len(getattr(arguments, name)) > 1:
                    value = knobs[name]
                    shown[name] = ":".join(f"{part:g}" for part in value) if isinstance(value, tuple) else value
            row = figures(result, schedule.stages / schedule.devices)
            peak = row.pop("peak bytes")
            row["chunks"] = max(device.peak_chunks for device in result.devices)
            row["weight bytes"] = max(device.weight_bytes for device in result.devices)
            row["peak bytes"] = peak
            rows.append(Row(shown, row, result.timeline, {"devices": [asdict(d) for d in result.devices]}))
    options.mark_what_fits(rows, machine.gpu_bytes)
    options.present(rows, arguments)

"""Streaming on one GPU, simulated: what a step of training or prediction costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ramtorch_core.errors import ConfigurationError, check_count
from ramtorch_core.simulate.clock import COMPUTE, Kind
from ramtorch_core.simulate.costs import BOTH_WAYS, HOST_MEMORY, ChunkCost, Machine, StepCost, resident_chunks
from ramtorch_core.simulate.knobs import Optimizer, StreamingPlan
from ramtorch_core.simulate.steps import HOST, Steps
from ramtorch_core.simulate.timeline import Cause, Timeline, timeline

__all__ = ["Outline", "StreamingResult", "outline", "simulate_streaming"]


MAX_VISITS = 1_000_000
"""About a minute of simulation, and two gigabytes."""

PASSES = 3, 5
"""Of which steps the length of longer ones is told: the first and the last differ from those between."""

COPIES_IN, COPIES_OUT = frozenset({Kind.TRANSFER, Kind.STATE}), frozenset({Kind.GRADIENT, Kind.STATE})


@dataclass(frozen=True, slots=True)
class StreamingResult:
    """What one step costs; parts are of its length, 0 to 1.

    Attributes:
        seconds: per step of the optimizer, all its batches together.
        compute: part in which the GPU computes.
        h2d, d2h, host: part that the work of the copy streams and of the host's optimizer fills, at full speed.
        shared: part of the host's memory and of PCIe in both directions that is used; 0 where no limit is known.
        peak_chunks: the most chunks on the GPU at once.
        weight_bytes: slots and resident chunks.
        peak_bytes: those, and activations, gradients, optimizer state and what is in no chunk, at their peak.
        transfers: copies into slots per step.
    """

    seconds: float
    compute: float
    h2d: float
    d2h: float
    host: float
    shared: dict[str, float]
    peak_chunks: int
    weight_bytes: float
    peak_bytes: float
    transfers: int
    timeline: Timeline

    @property
    def stall(self) -> float:
        """Seconds in which the GPU waits for copies or updates."""
        return self.timeline.waited(Cause.STALL)


def simulate_streaming(
    chunks: Sequence[ChunkCost],
    plan: StreamingPlan,
    machine: Machine | None = None,
    beside: StepCost | None = None,
    *,
    steps: int = 3,
    merged: bool = False,
) -> StreamingResult:
    """Run `steps` steps on a virtual clock and report the last.

    A step lasts from the start of its first visit to that of the next step's. With `steps=1` it is a single cold step:
    from nothing on the GPU to the end of its last copy or update.

    Args:
        merged: as for `Steps`: the same times and peaks, told sooner.

    Raises:
        ConfigurationError: no chunk, no step, a resident index out of range, or more than `MAX_VISITS` visits.
    """
    if not chunks:
        raise ConfigurationError("0 chunks: there is nothing to simulate; give at least 1")
    check_count("steps", steps)
    passes = plan.backwards // plan.together
    visits = 2 * len(chunks) * passes * (min(3, plan.together) if merged else plan.together) * (steps + (steps > 1))
    if visits > MAX_VISITS:
        batches = f"batches={plan.batches}, " * (plan.batches > 1)
        said = f"{len(chunks)} chunks (layers), {batches}microbatches={plan.microbatches} and {steps} steps"
        raise ConfigurationError(f"{said} are {visits:,} visits; at most {MAX_VISITS:,} are simulated")
    machine = machine or Machine()
    run = Steps(chunks, plan, machine, beside, merged=merged)
    for _ in range(steps + (steps > 1)):
        run.lay_out()
    run.end()
    times, lane = run.work.run(), run.lane
    if steps > 1:
        line = timeline(run.work, times, lane.holdings, times.start[run.first[-2]], times.start[run.first[-1]])
    else:
        line = timeline(run.work, times, lane.holdings)
    return StreamingResult(
        seconds=line.seconds,
        compute=line.busy(lane.compute, kinds=COMPUTE | {Kind.UPDATE}),
        h2d=line.busy(lane.h2d, kinds=COPIES_IN),
        d2h=line.busy(lane.d2h, kinds=COPIES_OUT),
        host=line.busy(HOST),
        shared={name: line.used(name) for name in (HOST_MEMORY, BOTH_WAYS)},
        peak_chunks=lane.peak_chunks(line.peaks),
        weight_bytes=lane.weight_bytes,
        peak_bytes=run.stays_bytes + lane.peak_bytes(line.peaks),
        transfers=lane.transfers // len(run.first),
        timeline=line,
    )


@dataclass(frozen=True, slots=True)
class Outline:
    """Seconds of a step and the peak of its memory, as in `StreamingResult`."""

    seconds: float
    peak_bytes: float


def outline(
    chunks: Sequence[ChunkCost], plan: StreamingPlan, machine: Machine | None = None, beside: StepCost | None = None
) -> Outline:
    """What `simulate_streaming` finds, but for rounding, mostly without walking through each of many microbatches.

    Those side by side are merged. Passes over all chunks that follow each other take equally long, but for the first
    and the last, as long as the host waits for the end of each, as it does where gradients arrive.
    """

    def walked(passes: int | None = None) -> Outline:
        fewer = plan
        if passes is not None:
            fewer = replace(plan, batches=passes, microbatches=plan.together)
        result = simulate_streaming(chunks, fewer, machine, beside, merged=plan.updates is not Optimizer.GPU)
        return Outline(result.seconds, result.peak_bytes)

    passes, (few, more) = plan.backwards // plan.together, PASSES
    arrives = len(resident_chunks(plan.pin, len(chunks))) < len(chunks) or beside is None or beside.awaited
    if passes <= more or not (plan.train and arrives) or plan.updates is Optimizer.GPU:
        return walked()
    short, long = walked(few), walked(more)
    each = (long.seconds - short.seconds) / (more - few)
    return replace(long, seconds=long.seconds + (passes - more) * each)

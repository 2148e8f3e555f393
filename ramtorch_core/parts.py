"""The parts of a step: measured from the engine's ranges, or simulated, so that both can be compared."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

from ramtorch_core.engine.laps import read_visits, read_waits, within
from ramtorch_core.engine.pipeline.runner import PipelineRunner
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.timed_passes import Deliveries, least_issue
from ramtorch_core.engine.timed_passes import Part as Issued
from ramtorch_core.memory.ranges import Kind, Range
from ramtorch_core.simulate import Timeline
from ramtorch_core.simulate.clock import COMPUTE
from ramtorch_core.simulate.clock import Kind as Task
from ramtorch_core.simulate.steps import HOST

__all__ = ["Part", "measured_parts", "pipeline_parts", "predicted_parts"]

WATCHED = 3
"""Steps whose parts are measured."""


class Part(Enum):
    """What a step spends its time with; only `COMPUTE` and `IDLE` add up to it, the others go on beside."""

    COMPUTE = "compute"
    """The device computes (the mean of several)."""
    IN = "in"
    """Copies of weights to the device."""
    OUT = "out"
    """Copies of gradients to the host."""
    UPDATE = "update"
    """The optimizer on the host."""
    ISSUE = "issue"
    """The host launches what the step computes, where it does not compute itself."""
    IDLE = "idle"
    """The rest: the device waits for copies, updates, the host, or another device."""


def predicted_parts(line: Timeline) -> dict[Part, float]:
    """Seconds of a simulated step by part."""
    seconds = dict.fromkeys(Task, 0.0)
    for span in line.spans:
        on_device = span.kind is Task.UPDATE and span.resource != HOST
        seconds[Task.LOSS if on_device else span.kind] += min(span.end, line.end) - max(span.start, line.start)
    compute = sum(seconds[kind] for kind in COMPUTE)
    return {
        Part.COMPUTE: compute,
        Part.IN: seconds[Task.TRANSFER],
        Part.OUT: seconds[Task.GRADIENT],
        Part.UPDATE: seconds[Task.UPDATE],
        Part.ISSUE: seconds[Task.ISSUE],
        Part.IDLE: max(0.0, line.seconds - compute),
    }


def measured_parts(streamer: Streamer, step: Callable[[], object]) -> dict[Part, float]:
    """Seconds of a training step by part, the mean of some that are run for it.

    What is around the visits of a pass, such as resident chunks and the loss, counts as compute.
    """
    device = streamer.device
    listener = device.ranges.listen()
    listener.waiting = deliveries = Deliveries()
    try:
        device.synchronize()
        begun = time.perf_counter()
        for _ in range(WATCHED):
            step()
        seconds = (time.perf_counter() - begun) / WATCHED
        streamer.updates.wait()
        device.synchronize()
        ended = listener.collect()
    finally:
        listener.close()
    spent = {kind: sum(each.seconds for each in ended if each.kind is kind) for kind in Kind}
    lap = read_visits(ended, asynchronous=device.asynchronous, train=True)
    counts = Counter(part for part, _ in deliveries.ends)
    compute = seconds  # where nothing streams, there are no visits
    if lap is not None:
        passes = max(1, counts[Issued.FORWARD] // max(1, len(streamer.groups)))
        compute = (sum(lap.visits.values()) + lap.outside) * passes / WATCHED
    issue, issued = least_issue(deliveries.ends), 0.0
    for part, each in zip(Issued, (issue.forward, issue.recompute, issue.backward), strict=True):
        issued += counts[part] * each / WATCHED
    return {
        Part.COMPUTE: compute,
        Part.IN: spent[Kind.TRANSFER] / WATCHED,
        Part.OUT: spent[Kind.GRADIENT] / WATCHED,
        Part.UPDATE: spent[Kind.UPDATE] / WATCHED,
        Part.ISSUE: issued if device.asynchronous else 0.0,
        Part.IDLE: max(0.0, seconds - compute),
    }


def pipeline_parts(runner: PipelineRunner, step: Callable[[], object]) -> dict[Part, float]:
    """The same of one step of a pipeline, which ends when its devices have.

    Compute is the mean of the devices; what the host launches adds up, with its waits for the interpreter.
    """
    listeners = [device.ranges.listen() for device in runner.devices]
    try:
        begun = time.perf_counter()
        step()
        seconds = time.perf_counter() - begun
        ended = [listener.collect() for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
    compute = statistics.mean(map(_busy, ended))
    ops = [each for ranges in ended for each in ranges if each.kind is Kind.OP]
    issued = sum(op.waited for op in ops) if runner.devices[0].asynchronous else 0.0
    return {Part.COMPUTE: compute, Part.ISSUE: issued, Part.IDLE: max(0.0, seconds - compute)}


def _busy(ranges: Sequence[Range]) -> float:
    """Seconds of a device's ops, without the waits in them."""
    waits = read_waits(ranges, asynchronous=True)
    ops = [each for each in ranges if each.kind is Kind.OP]
    return sum(each.seconds - sum(wait.seconds for wait in waits if within(wait, each)) for each in ops)

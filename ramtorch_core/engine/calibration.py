"""Measures what the chunks of a model cost on this machine, by running it streamed and timing every visit."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ramtorch_core.engine.chunks import ChunkSpec, find_chunks
from ramtorch_core.engine.footprints import Footprint, Run, footprints_of
from ramtorch_core.engine.laps import Lap, compute_of, read_waits, within
from ramtorch_core.engine.rates import Rates
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import Kind
from ramtorch_core.memory.weights import WeightGroup
from ramtorch_core.plan.itinerary import Visit

WARM_UP = 2
"""Steps: the first one lays weights out as they are found to be used."""


@dataclass(frozen=True, slots=True)
class ChunkMeasure:
    """One streamed chunk, per microbatch.

    Attributes:
        parameters, trained: numbers of parameters, all and those that get gradients.
        master_bytes, weight_bytes: of all, as the optimizer sees them and as they cross the bus.
        gradient_bytes: of the trained ones, as backward produces them.
        forward, backward: seconds of compute; backward without recomputing.
        kept_bytes: activations that backward needs.
        boundary_bytes: activations that stay when the chunk is checkpointed: its inputs.
    """

    name: str
    parameters: int
    trained: int
    master_bytes: int
    weight_bytes: int
    gradient_bytes: int
    forward: float
    backward: float
    kept_bytes: int
    boundary_bytes: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a model and a machine cost.

    Attributes:
        outside: seconds per microbatch of compute in no chunk: the loss, and what does not stream.
        window: slots with which it was measured; every chunk was checkpointed, none resident.
        peak_bytes: the most device memory that tensors took then; None for the CPU.
    """

    rates: Rates
    chunks: tuple[ChunkMeasure, ...]
    outside: float
    window: int
    peak_bytes: int | None


def calibrate_chunks(
    root: nn.Module,
    step: Callable[[], Tensor],
    device: Device,
    rates: Rates,
    *,
    chunks: ChunkSpec = None,
    resident_below: int = 1 << 20,
    host_memory: int | None = None,
    window: int = 2,
    steps: int = 3,
    autocast: torch.dtype | None = None,
) -> Calibration:
    """Run `step` a few times with `root` streamed, checkpointed, and with gradients that nobody uses.

    Weights keep their values and `.grad` what it holds; random numbers are drawn and buffers change as in training.

    Args:
        step: a forward of one microbatch on `device`, of which it returns the loss.
        steps: how many are timed; medians are taken.
        autocast: the dtype under which `step` runs.

    Raises:
        ConfigurationError: nothing streams, or the loss does not depend on what does.
        HostMemoryError: too little host memory.
    """
    streamer = Streamer(
        root,
        find_chunks(root, chunks, resident_below=resident_below),
        device=device,
        window=window,
        resident_below=resident_below,
        overlapped=True,
        host_memory=host_memory,
    )
    held = {parameter: parameter.grad for parameter in root.parameters()}
    try:
        if not streamer.groups:
            raise ConfigurationError("nothing streams, so there is nothing to measure: lower resident_below")
        for parameter in held:
            parameter.grad = None
        run = Run(streamer, step, autocast)
        for _ in range(WARM_UP):
            run.train()
        footprints = footprints_of(run)
        run.train()  # leads from what that looked like back to training
        device.forget_peak()
        laps = [_time(run) for _ in range(steps)]
        peak = device.peak_bytes()
        groups = streamer.groups
        measured = tuple(
            describe(group, footprint, *compute_of(group, laps, recomputed=True))
            for group, footprint in zip(groups, footprints[1:], strict=True)
        )
        return Calibration(rates, measured, statistics.median(lap.outside for lap in laps), window, peak)
    finally:
        streamer.close()
        for parameter, grad in held.items():
            parameter.grad = grad


def _time(run: Run) -> Lap:
    device = run.streamer.device
    device.synchronize()
    listener = device.ranges.listen()
    try:
        start = device.mark()
        run.train()
        end = device.mark()
        device.synchronize()
        ended = listener.collect()
    finally:
        listener.close()
    lap = Lap()
    waits = read_waits(ended, asynchronous=device.asynchronous)
    for visit in (each for each in ended if each.kind is Kind.VISIT):
        waited = sum(wait.seconds for wait in waits if within(wait, visit))
        assert isinstance(visit.what, Visit)
        lap.visits[visit.what] += max(0.0, visit.seconds - waited)
    waited = sum(wait.seconds for wait in waits)
    lap.outside = max(0.0, end.seconds_since(start) - waited - sum(lap.visits.values()))
    return lap


def describe(group: WeightGroup, footprint: Footprint, forward: float, backward: float) -> ChunkMeasure:
    """A streamed chunk, with what was found out about it."""
    trained = [weight for weight in group.weights if weight.parameter.requires_grad]
    return ChunkMeasure(
        name=group.name,
        parameters=sum(weight.parameter.numel() for weight in group.weights),
        trained=sum(weight.parameter.numel() for weight in trained),
        master_bytes=sum(weight.parameter.nbytes for weight in group.weights),
        weight_bytes=group.nbytes,
        gradient_bytes=sum(weight.nbytes for weight in trained),
        forward=forward,
        backward=backward,
        kept_bytes=footprint.kept,
        boundary_bytes=footprint.boundary,
    )

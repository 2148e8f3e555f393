"""Measures what the chunks of a model cost on this machine, by running it streamed and timing every visit."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ramtorch_core.engine.chunks import ChunkSpec, find_chunks
from ramtorch_core.engine.footprints import Footprint, Run, footprints_of
from ramtorch_core.engine.laps import compute_of
from ramtorch_core.engine.rates import Rates
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.timed_passes import time_passes
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.weights import WeightGroup

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
        issue_forward, issue_backward: seconds that the host takes to issue the compute of one visit, backward without
            recomputing; 0 where that is not known, or the host computes itself.
        issue_outside: seconds per microbatch that the host takes between visits.
    """

    rates: Rates
    chunks: tuple[ChunkMeasure, ...]
    outside: float
    window: int
    peak_bytes: int | None
    issue_forward: float = 0.0
    issue_backward: float = 0.0
    issue_outside: float = 0.0


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

    The steps that are timed copy and update nothing, and the host is ahead of the device in them; see `timed_passes`.

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
        run.train()
        device.synchronize()
        peak = device.peak_bytes()
        passes = time_passes(run, steps)
        laps = [each.lap for each in passes]
        groups = streamer.groups
        measured = tuple(
            describe(group, footprint, *compute_of(group, laps, recomputed=True))
            for group, footprint in zip(groups, footprints[1:], strict=True)
        )
        forward = statistics.median(each.issue_forward for each in passes)
        backward = statistics.median(each.issue_backward for each in passes)
        return Calibration(
            rates,
            measured,
            statistics.median(lap.outside for lap in laps),
            window,
            peak,
            issue_forward=forward,
            issue_backward=max(0.0, backward - forward),
            issue_outside=statistics.median(each.issue_outside for each in passes),
        )
    finally:
        streamer.close()
        for parameter, grad in held.items():
            parameter.grad = grad


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

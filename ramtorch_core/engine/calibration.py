"""Measures what the chunks of a model cost on this machine, by running it streamed and timing every visit."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor, nn

from ramtorch_core.engine.chunks import ChunkSpec, find_chunks
from ramtorch_core.engine.footprints import Footprint, Run, footprints_of
from ramtorch_core.engine.laps import Compute, compute_of
from ramtorch_core.engine.launches import Launches, time_launches
from ramtorch_core.engine.peaks import Peaks, PeakWatch
from ramtorch_core.engine.rates import Rates
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.timed_passes import Issue, time_passes
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.weights import WeightGroup

WARM_UP = 2
"""Steps: the first one lays weights out as they are found to be used."""


@dataclass(frozen=True, slots=True)
class ChunkMeasure:
    """One streamed chunk, per microbatch.

    Attributes:
        parameters, trained, largest: numbers of parameters: all, those that get gradients, and of the largest tensor.
        master_bytes, weight_bytes: of all, as the optimizer sees them and as they cross the bus.
        gradient_bytes: of the trained ones, as backward produces them.
        forward, recompute, backward: seconds of compute; backward without recomputing. A recompute ends with the last
            tensor that backward needs.
        kept_bytes: activations that backward needs.
        boundary_bytes: activations that stay when the chunk is checkpointed: its inputs. Those of the first chunk are
            there before.
        recomputed_bytes: activations that a recompute makes besides.
        launches: seconds of the host where weights stay on the device; None if they are not known.
    """

    name: str
    parameters: int
    trained: int
    largest: int
    master_bytes: int
    weight_bytes: int
    gradient_bytes: int
    forward: float
    recompute: float
    backward: float
    kept_bytes: int
    boundary_bytes: int
    recomputed_bytes: int
    launches: Launches | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a model and a machine cost.

    Attributes:
        outside: seconds per microbatch of compute in no chunk: the loss, and what does not stream.
        ahead: the part of it that belongs to the forward.
        window: slots with which it was measured.
        peaks: the device's memory then; None where that is not known.
        issue: what the host takes, for chunks that stream.
        awaited: tensors that stay on the device are trained, and the host waits for their gradients.
        between: seconds of the host per step, between the end of one and the beginning of the next.
        update_factor: by how much updates on the host take longer than `rates` say.
    """

    rates: Rates
    chunks: tuple[ChunkMeasure, ...]
    outside: float
    window: int
    peaks: Peaks | None
    ahead: float = 0.0
    issue: Issue = field(default_factory=Issue)
    awaited: bool = True
    between: float = 0.0
    update_factor: float = 1.0


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
        watch = PeakWatch(device)
        try:
            run.train(watch.backward_begins)
        finally:
            watch.close()
        passes = time_passes(run, steps)
        laps = [each.lap for each in passes]
        groups = streamer.groups
        measured = tuple(
            replace(describe(group, footprint, compute_of(group, laps)), launches=each)
            for group, footprint, each in zip(groups, footprints[1:], time_launches(run), strict=True)
        )
        issues = [each.issue for each in passes]
        return Calibration(
            rates,
            measured,
            statistics.median(lap.outside for lap in laps),
            window,
            watch.peaks(),
            statistics.median(lap.ahead for lap in laps),
            awaited=gets_gradients(streamer),
            issue=Issue(*(min(getattr(each, part.name) for each in issues) for part in fields(Issue))),
        )
    finally:
        streamer.close()
        for parameter, grad in held.items():
            parameter.grad = grad


def gets_gradients(streamer: Streamer) -> bool:
    """Whether tensors that stay on the device are trained."""
    return any(weight.parameter.requires_grad for weight in streamer.census.copies)


def describe(group: WeightGroup, footprint: Footprint, compute: Compute) -> ChunkMeasure:
    """A streamed chunk, with what was found out about it."""
    trained = [weight for weight in group.weights if weight.parameter.requires_grad]
    return ChunkMeasure(
        name=group.name,
        parameters=sum(weight.parameter.numel() for weight in group.weights),
        trained=sum(weight.parameter.numel() for weight in trained),
        largest=max(weight.parameter.numel() for weight in group.weights),
        master_bytes=sum(weight.parameter.nbytes for weight in group.weights),
        weight_bytes=group.nbytes,
        gradient_bytes=sum(weight.nbytes for weight in trained),
        forward=compute.forward,
        recompute=compute.recompute,
        backward=compute.backward,
        kept_bytes=footprint.kept,
        boundary_bytes=footprint.boundary,
        recomputed_bytes=footprint.recomputed,
    )

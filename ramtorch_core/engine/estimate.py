"""What the chunks of a model would cost, from shapes alone: no device, no values, no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ramtorch_core.engine.calibration import Calibration, describe
from ramtorch_core.engine.chunks import ChunkSpec, find_chunks
from ramtorch_core.engine.footprints import Footprint, Run, footprints_of
from ramtorch_core.engine.laps import Compute
from ramtorch_core.engine.peaks import Peaks
from ramtorch_core.engine.rates import Rates
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import Device

SLOTS = 2


def estimate_chunks(
    root: nn.Module,
    step: Callable[[], Tensor] | None,
    rates: Rates,
    operations_per_second: float,
    *,
    tokens: int = 0,
    chunks: ChunkSpec = None,
    resident_below: int = 1 << 20,
    autocast: torch.dtype | None = None,
) -> Calibration:
    """What the chunks would cost, from shapes alone; `root` and `step` are run under `FakeTensorMode`, without memory.

    Forwards take the time of their matrix products and attention, backwards twice that. Memory is that of chunks and of
    the first one's inputs.

    Args:
        step: as for `calibrate_chunks`. None: two operations per parameter and token, and no activations.
        operations_per_second: what the device sustains.

    Raises:
        ConfigurationError: nothing streams.
    """
    found = find_chunks(root, chunks, resident_below=resident_below)
    streamer = Streamer(root, found, device=Device("cpu"), resident_below=resident_below)
    try:
        if not streamer.groups:
            raise ConfigurationError("nothing streams, so there is nothing to plan: lower resident_below")
        if step is None:
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                streamer.prepare()
            sizes = [sum(weight.parameter.numel() for weight in group.weights) for group in streamer.groups]
            footprints = [Footprint(), *(Footprint(operations=2 * size * tokens) for size in sizes)]
        else:
            run = Run(streamer, step, autocast)
            run.forward()
            with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
                footprints = footprints_of(run, counter.get_total_flops)
        seconds = [footprint.operations / operations_per_second for footprint in footprints]
        measured = tuple(
            describe(group, footprint, Compute(forward, forward, 2 * forward))
            for group, footprint, forward in zip(streamer.groups, footprints[1:], seconds[1:], strict=True)
        )
        before = SLOTS * max(chunk.weight_bytes for chunk in measured) + footprints[0].boundary
        peaks = Peaks(before, loss=before + sum(chunk.boundary_bytes for chunk in measured))
        return Calibration(rates, measured, 3 * seconds[0], SLOTS, peaks)
    finally:
        streamer.close()


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""What torch does not count itself."""

"""Plans without a device and without values: will a model fit a machine, with which knobs, and how fast?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ramtorch_core.engine.calibration import ChunkMeasure
from ramtorch_core.engine.chunks import ChunkSpec, choose_resident
from ramtorch_core.engine.estimate import estimate_chunks
from ramtorch_core.engine.modules import tensors_in
from ramtorch_core.engine.peaks import Peaks
from ramtorch_core.engine.rates import UPDATE_BYTES, Rates
from ramtorch_core.memory.staging import STAGING_BUFFERS
from ramtorch_core.prediction import Calibration, Optimizer, StreamingPlan, mean_loss, planned_costs
from ramtorch_core.pricing import FULL, as_run, master_width
from ramtorch_core.simulate.choose import DoesNotFit, timed
from ramtorch_core.simulate.costs import resident_chunks

__all__ = [
    "DoesNotFit",
    "Estimate",
    "Subject",
    "describe_machine",
    "described",
    "estimate",
    "given",
    "host_bytes",
    "timed",
]

BOTH_WAYS = 1.67
"""What PCIe moves in both directions at once, as a multiple of one direction."""
LOSS_BYTES = 12
"""Device memory of a loss per element of the model's output: a float32 copy, its logarithm, and its gradient."""
SHADOW_BYTES = 4
"""Host memory traffic per parameter besides the update: a bfloat16 gradient is read, a bfloat16 shadow written."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to be estimated.

    Attributes:
        forward: a forward of one microbatch, which returns the output; None where there is no example of a batch.
        chunks: as for `attach`.
    """

    module: nn.Module
    forward: Callable[[], Any] | None = None
    chunks: ChunkSpec = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a model would cost; `parameters` and `trained` count all of it, also what does not stream."""

    calibration: Calibration
    parameters: int
    trained: int
    bytes: int


def describe_machine(*, device_bytes: float, pcie: float, host_memory: float, device_update: float = 0.01e-9) -> Rates:
    """The rates of a machine that is not here.

    Args:
        device_bytes: memory of the device.
        pcie: bytes per second in one direction, from page-locked memory.
        host_memory: bytes per second that the host's memory reads and writes; AdamW on the host is bound by it.
        device_update: seconds per parameter of AdamW on the device.
    """
    return Rates(
        h2d=pcie,
        d2h=pcie,
        both_ways=BOTH_WAYS * pcie,
        host_memory=host_memory,
        host_update=(UPDATE_BYTES - SHADOW_BYTES + 2 * 2) / host_memory,
        device_update=device_update,
        device_bytes=int(device_bytes),
    )


def estimate(
    build: Callable[[], Subject],
    rates: Rates,
    operations_per_second: float,
    *,
    tokens: int = 0,
    resident_below: int = 1 << 20,
    autocast: torch.dtype | None = None,
) -> Estimate:
    """Build a model without memory for its values, and estimate its chunks on a machine.

    Args:
        build: makes the model; it runs under `FakeTensorMode`, where tensors have shapes and no values.
        operations_per_second: what the device sustains in matrix products.
        tokens: per microbatch, for subjects without a forward.
        resident_below: bytes, as for `attach`.
        autocast: the dtype to compute in.

    Raises:
        ConfigurationError: nothing streams.
    """
    loss_elements = 0

    with FakeTensorMode(allow_non_fake_inputs=True):
        subject = build()

        def step() -> Tensor:
            nonlocal loss_elements
            assert subject.forward is not None
            output = subject.forward()
            loss_elements = sum(tensor.numel() for tensor in tensors_in(output) if tensor.is_floating_point())
            return mean_loss(output)

        parameters = list(subject.module.parameters())
        numbers = [(p.numel(), p.requires_grad, p.nbytes) for p in parameters]
        found = estimate_chunks(
            subject.module,
            None if subject.forward is None else step,
            rates,
            operations_per_second,
            tokens=tokens,
            chunks=subject.chunks,
            resident_below=resident_below,
            autocast=autocast,
        )
    rest = sum(size for _, _, size in numbers) - sum(chunk.master_bytes for chunk in found.chunks)
    assert found.peaks is not None
    peaks = Peaks(found.peaks.before + rest, loss=found.peaks.loss + rest + LOSS_BYTES * loss_elements)
    return Estimate(
        calibration=replace(found, peaks=peaks),
        parameters=sum(count for count, _, _ in numbers),
        trained=sum(count for count, trains, _ in numbers if trains),
        bytes=sum(size for _, _, size in numbers),
    )


def given(
    found: Estimate,
    base: StreamingPlan,
    *,
    window: int = 2,
    pin: int | Sequence[int] | Sequence[str] = 0,
    activations: str = "checkpoint",
) -> StreamingPlan:
    """`base` with knobs as `attach` takes them.

    Raises:
        ConfigurationError: no slot, or chunks that there are not.
        TypeError: anything else than such a knob.
    """
    names = [chunk.name for chunk in found.calibration.chunks]
    chosen = pin if isinstance(pin, int) else tuple(sorted(choose_resident(pin, names)))
    return replace(base, window=window, pin=chosen, checkpoint=activations != "keep")


def host_bytes(found: Estimate, plan: StreamingPlan) -> float:
    """Host memory that training under `plan` takes: masters, shadows, moments, and gradients.

    And copies of what updates overwrite that run ahead of the norm, as `plan.ahead` says.
    """
    plan = as_run(found.calibration, plan)
    chunks = found.calibration.chunks
    resident = resident_chunks(plan.pin, len(chunks))
    streamed = [chunk for index, chunk in enumerate(chunks) if index not in resident]
    every = planned_costs(found.calibration, plan)
    gone = sum(every[index].master_bytes + every[index].state_bytes for index in resident)
    shadows = sum(chunk.weight_bytes for chunk in streamed if chunk.weight_bytes < chunk.master_bytes)
    priced = [cost for index, cost in enumerate(every) if index not in resident]
    overlapped = plan.updates not in (Optimizer.NONE, Optimizer.PUBLISHED)
    gradients = copies = 0.0
    if plan.adds or plan.batches > 1 or not overlapped:  # sums are kept, of half-precision masters twice
        gradients += sum(_sum_bytes(chunk, several=plan.backwards > 1) for chunk in streamed)
    if plan.clip and overlapped:  # all of them wait for the last one
        gradients += sum(cost.gradient_bytes for cost in priced)
        copies = (plan.ahead or 0.0) * sum(cost.saved_bytes for cost in priced)
    elif overlapped and not plan.adds:
        widest = max((max(cost.weight_bytes, cost.gradient_bytes) for cost in priced), default=0.0)
        gradients += min(STAGING_BUFFERS, len(priced)) * widest
    moments = 2 * found.trained * found.bytes / max(1, found.parameters)  # of AdamW, in the masters' dtype
    return found.bytes + moments - gone + shadows + gradients + copies


def described(found: Estimate, plan: StreamingPlan, ram: float | None) -> StreamingPlan:
    """The plan as the engine carries it out, on a host with so many bytes of memory; None if that is not known."""
    left = None if ram is None else max(0.0, ram - host_bytes(found, replace(plan, ahead=0.0)))
    return as_run(found.calibration, plan, None if left is None else left / 4)


def _sum_bytes(chunk: ChunkMeasure, *, several: bool) -> float:
    """Host memory of a chunk's `.grad`; beside that of half-precision masters lies a sum in float32."""
    own = master_width(chunk)
    return chunk.trained * (own + FULL * (several and own < FULL))

"""What a calibration comes to in the simulator's terms: the costs of chunks, and of what is beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ramtorch_core.engine.calibration import Calibration, ChunkMeasure
from ramtorch_core.engine.rates import UPDATE_BYTES, Rates
from ramtorch_core.memory.bounce import BOUNCE_BYTES
from ramtorch_core.optim.ahead import BYTES as AHEAD_BYTES
from ramtorch_core.simulate import ChunkCost, Optimizer, Order, StepCost, StreamingPlan
from ramtorch_core.simulate.choose import twice
from ramtorch_core.simulate.lane import GRADIENTS_IN_FLIGHT

__all__ = ["as_run", "costs", "doubled", "half_precision", "planned_costs", "step_cost"]

FULL = 4
"""Bytes of a number in float32, in which gradients of narrower masters are added up."""


def costs(
    calibration: Calibration,
    microbatches: int = 1,
    rates: Rates | None = None,
    optimizer: Optimizer = Optimizer.OVERLAPPED,
    *,
    clip: bool = False,
    together: bool = False,
) -> list[ChunkCost]:
    """The simulator's costs of the chunks, when each step has so many microbatches of the calibration's size.

    Args:
        microbatches: of a step, those of all its batches.
        rates: of another machine with the same device.
        optimizer: as of the plan. Gradients that are published cross in the master's dtype, and shadows of masters
            that the optimizer itself steps are cast again; updates take gradients as backward leaves them.
        clip: likewise. The host finds the norm of gradients that are published, and scales them; with others this costs
            next to nothing.
        together: microbatches go side by side. Their gradients are added up on the device, in float32 at least, and
            leave it like that.
    """
    rates = rates or calibration.rates
    published = optimizer in (Optimizer.NONE, Optimizer.PUBLISHED)
    return [
        _cost(calibration, chunk, rates, microbatches, published=published, clip=clip, together=together)
        for chunk in calibration.chunks
    ]


def planned_costs(calibration: Calibration, plan: StreamingPlan) -> list[ChunkCost]:
    """The simulator's costs of the chunks under a plan."""
    together = plan.order is Order.CHUNK
    return costs(calibration, plan.backwards, optimizer=plan.updates, clip=plan.clip, together=together)


def as_run(calibration: Calibration, plan: StreamingPlan, room: float | None = None) -> StreamingPlan:
    """The plan as the engine carries it out: see `Updates`.

    Where `plan.ahead` is left open, updates run ahead of the norm of all gradients as far as there is room for copies.
    Sums of gradients of half-precision masters on the host are published.

    Args:
        room: bytes of host memory for those copies, at the most; None for as many as the engine takes where it can.
    """
    trained = sum(chunk.trained for chunk in calibration.chunks)
    overwritten = 3 * sum(chunk.trained * master_width(chunk) for chunk in calibration.chunks)  # with two moments
    room = AHEAD_BYTES * trained if room is None else min(room, AHEAD_BYTES * trained)
    half = all(master_width(chunk) < FULL for chunk in calibration.chunks)
    kept_apart = plan.adds and half and plan.optimizer is not Optimizer.NONE
    plan = replace(plan, optimizer=Optimizer.PUBLISHED) if kept_apart else plan
    ahead = min(1.0, room / overwritten) if plan.held and overwritten else 0.0
    return replace(plan, ahead=ahead if plan.ahead is None else plan.ahead)


def doubled(calibration: Calibration, base: StreamingPlan) -> tuple[StreamingPlan, list[ChunkCost]]:
    """As `choose` takes it: the plan with twice the microbatches as it would be carried out, and its chunks' costs."""
    plan = as_run(calibration, twice(base))
    return plan, planned_costs(calibration, plan)


def step_cost(calibration: Calibration, measured: StreamingPlan | None = None, *, train: bool = True) -> StepCost:
    """What a step costs beside its chunks.

    Memory in no chunk is what was measured in the phases of a step beyond what the plan then holds.

    Args:
        measured: the plan of the steps in which memory was measured; by default that of `calibrate`.
        train: False for forwards alone.
    """
    issue, peaks = calibration.issue, calibration.peaks
    found = StepCost(
        loss=calibration.outside if train else calibration.ahead,
        issue_begin=issue.begin,
        issue_loss=issue.loss if train else 0.0,
        between=calibration.between,
        awaited=calibration.awaited,
        bounce_bytes=BOUNCE_BYTES,
    )
    if peaks is None:
        return found
    plan = replace(measured or StreamingPlan(optimizer=Optimizer.OVERLAPPED), window=calibration.window, pin=0)
    chunks = planned_costs(calibration, plan)
    slots = min(plan.window, len(chunks)) * max(chunk.weight_bytes for chunk in chunks)
    base = max(0.0, peaks.before - slots)
    held, first, others = _held(chunks, plan)
    return replace(
        found,
        base_bytes=max(0.0, base - BOUNCE_BYTES * plan.bounces(chunks, others=calibration.awaited)),
        forward_bytes=max(0.0, peaks.forward - base - slots - held),
        loss_bytes=max(0.0, peaks.loss - base - slots - held),
        turn_bytes=max(0.0, (peaks.turn or peaks.loss) - base - slots - held),
        first_bytes=max(0.0, peaks.first - base - slots - first),
        work_bytes=max(0.0, peaks.backward - base - slots - others),
    )


def _held(chunks: Sequence[ChunkCost], plan: StreamingPlan) -> tuple[float, float, float]:
    """Bytes of activations and gradients while nothing is resident.

    Between forward and backward, in the first visit of a backward, and the most in the others.
    """
    level = held = plan.together * sum(chunk.held_bytes(plan.checkpoint) for chunk in chunks) * plan.train
    visits = []
    for position, chunk in reversed(list(enumerate(chunks))):
        leaving = sum(later.left_bytes for later in chunks[position : position + GRADIENTS_IN_FLIGHT + 1])
        visits.append(level + chunk.made_bytes(plan.checkpoint) + leaving)
        level -= plan.together * chunk.held_bytes(plan.checkpoint)
    return held, visits[0], max(visits[1:], default=0.0)


def half_precision(calibration: Calibration) -> Calibration | None:
    """The same model if its weights and gradients crossed in half precision; None if they do.

    Compute takes as long, and activations as much, as they were measured.
    """
    full = [chunk for chunk in calibration.chunks if chunk.parameters and chunk.weight_bytes >= 4 * chunk.parameters]
    if not full:
        return None
    halved = [
        replace(chunk, weight_bytes=chunk.weight_bytes // 2, gradient_bytes=chunk.gradient_bytes // 2)
        if chunk in full
        else chunk
        for chunk in calibration.chunks
    ]
    return replace(calibration, chunks=tuple(halved))


def master_width(chunk: ChunkMeasure) -> float:
    """Bytes of a number in the master's dtype."""
    return chunk.master_bytes / max(1, chunk.parameters)


def _cost(
    calibration: Calibration,
    chunk: ChunkMeasure,
    rates: Rates,
    microbatches: int,
    *,
    published: bool,
    clip: bool,
    together: bool,
) -> ChunkCost:
    width = master_width(chunk)
    state_bytes = 2 * chunk.trained * width  # of AdamW, in the master's dtype
    summed = chunk.trained * width  # several microbatches are added up in the master's dtype
    half, several = chunk.weight_bytes < chunk.master_bytes, microbatches > 1
    wide = max(summed, FULL * chunk.trained) if several and together else summed
    gradient_bytes = wide if several or published else chunk.gradient_bytes
    sum_bytes = FULL * chunk.trained if several and not together and width < FULL else 0.0  # on the host
    added = summed + sum_bytes  # crosses to the host while the sum comes
    shadow_bytes = chunk.weight_bytes if half else 0
    again_bytes = chunk.master_bytes if published and shadow_bytes else 0.0  # read once more
    again_bytes += 3 * gradient_bytes * (published and clip)  # read, read again, and written
    update_bytes = chunk.trained * (UPDATE_BYTES - 4) + gradient_bytes + shadow_bytes + again_bytes
    as_measured = update_bytes - again_bytes - gradient_bytes + chunk.gradient_bytes
    slower = calibration.update_factor * (update_bytes / as_measured if as_measured else 1.0)
    update, saved_bytes = chunk.trained * rates.host_update * slower, summed + state_bytes
    device_bytes = UPDATE_BYTES / rates.device_update  # per second of its own memory, in its update
    return ChunkCost(
        forward=chunk.forward,
        recompute=chunk.recompute,
        backward=chunk.backward,
        issue_forward=calibration.issue.forward,
        issue_recompute=calibration.issue.recompute,
        issue_backward=calibration.issue.backward,
        launch_forward=None if chunk.launches is None else chunk.launches.forward,
        launch_backward=None if chunk.launches is None else chunk.launches.backward,
        cast=(chunk.master_bytes + chunk.weight_bytes) / device_bytes if half else 0.0,
        add=3 * summed / device_bytes,
        transfer=chunk.weight_bytes / rates.h2d,
        gradient=gradient_bytes / rates.d2h,
        accumulate=((sum_bytes or summed) + added) / 2 / rates.accumulated if rates.accumulated else added / rates.d2h,
        sum_bytes=sum_bytes,
        recall=gradient_bytes / rates.h2d,
        update=update,
        save=update * saved_bytes / update_bytes if update_bytes else 0.0,
        recast=(chunk.master_bytes + chunk.weight_bytes) / rates.host_memory if half and not published else 0.0,
        device_update=chunk.trained * rates.device_update,
        state_in=(summed + state_bytes) / rates.h2d,
        state_out=(summed + state_bytes + chunk.weight_bytes) / rates.d2h,
        weight_bytes=chunk.weight_bytes,
        master_bytes=chunk.master_bytes,
        gradient_bytes=gradient_bytes,
        produced_bytes=chunk.gradient_bytes,
        resident_gradient_bytes=summed,
        passing_bytes=chunk.gradient_bytes * (half or several) + chunk.largest * width * (half and several),
        adding_bytes=(chunk.trained + chunk.largest) * chunk.gradient_bytes / max(1, chunk.trained) * several,
        state_bytes=state_bytes,
        update_bytes=update_bytes,
        saved_bytes=saved_bytes,
        kept_bytes=chunk.kept_bytes,
        boundary_bytes=chunk.boundary_bytes,
        recomputed_bytes=chunk.recomputed_bytes,
    )

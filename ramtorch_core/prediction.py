"""Predicts steps on this machine or another one: `calibrate` a model, then `predict` and `recommend` plans for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ramtorch_core.checks import check_not_streamed
from ramtorch_core.engine.calibration import Calibration, ChunkMeasure, calibrate_chunks
from ramtorch_core.engine.chunks import ChunkSpec
from ramtorch_core.engine.modules import tensors_in
from ramtorch_core.engine.rates import Rates, known_rates
from ramtorch_core.errors import ConfigurationError, check_count, shown
from ramtorch_core.memory.device import Device
from ramtorch_core.plan.partition import partition
from ramtorch_core.plan.schedule import Schedule
from ramtorch_core.pricing import as_run, costs, doubled, half_precision, planned_costs, step_cost
from ramtorch_core.simulate import (
    Accumulate,
    Choice,
    ChunkCost,
    Machine,
    Optimizer,
    Order,
    PipelinePlan,
    PipelineResult,
    StepCost,
    StreamingPlan,
    StreamingResult,
    choose,
    simulate_pipeline,
    simulate_streaming,
)
from ramtorch_core.simulate.choose import WINDOWS
from ramtorch_core.simulate.clock import Kind
from ramtorch_core.simulate.steps import HOST
from ramtorch_core.wishes import usable_of

__all__ = [
    "Calibration",
    "ChunkCost",
    "ChunkMeasure",
    "Machine",
    "Optimizer",
    "Order",
    "PipelinePlan",
    "Prediction",
    "Rates",
    "StepCost",
    "StreamingPlan",
    "calibrate",
    "costs",
    "even_stages",
    "fitted",
    "half_precision",
    "machine",
    "mean_loss",
    "planned_costs",
    "predict",
    "predict_pipeline",
    "rates_of",
    "recommend",
    "seconds_alone",
    "step_cost",
]

FITTING = 8


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan would cost.

    Attributes:
        seconds: per step.
        peak_bytes: of device memory.
    """

    seconds: float
    peak_bytes: float
    result: StreamingResult


def calibrate(
    module: nn.Module,
    batch: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    step: Callable[[], Tensor] | None = None,
    device: torch.device | str | int = "cuda",
    chunks: ChunkSpec = None,
    resident_below: int = 1 << 20,
    autocast: torch.dtype | None = None,
    steps: int = 3,
    host_memory: int | None = None,
    rates: Rates | None = None,
) -> Calibration:
    """Measure what the chunks of `module` cost, by training a few steps on one microbatch, streamed and checkpointed.

    Weights and gradients stay as they are. It takes the time of about fifteen steps, and, the first time on a
    machine, some seconds for its rates, which are then kept in the user's cache folder.

    Args:
        module: its parameters are on the host.
        batch: one microbatch: a tensor, or a tuple of arguments; tensors are moved to `device`.
        loss_fn: of the module's output; by default the mean of its tensors.
        step: instead of calling `module` on `batch`: computes and returns the loss.
        device: where to compute.
        chunks, resident_below, host_memory: as for `attach`.
        autocast: the dtype to compute in.
        steps: how many are timed.
        rates: of the machine; by default the known ones.

    Raises:
        ConfigurationError: nothing streams, nothing is trained, an engine streams the module already, or the loss is no
            tensor of one element that depends on what is trained.
        HostMemoryError: too little host memory.
    """
    check_count("steps", steps)
    check_not_streamed(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError("no parameter of the module is trained, so there is no training to measure")
    target = Device(device)
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(target.torch), batch)

    def forward() -> Tensor:
        output = module(*batch) if isinstance(batch, tuple) else module(batch)
        return mean_loss(output) if loss_fn is None else loss_fn(output)

    def checked() -> Tensor:
        loss: object = (step or forward)()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
            name = "loss_fn" if step is None else "step"
            raise ConfigurationError(f"{name} returns {found}: a loss is a tensor of one element")
        return loss

    return calibrate_chunks(
        module,
        checked,
        target,
        rates or known_rates(target),
        chunks=chunks,
        resident_below=resident_below,
        host_memory=host_memory,
        steps=steps,
        autocast=autocast,
    )


def rates_of(device: torch.device | str | int) -> Rates:
    """The rates of this machine, measured if they are not known."""
    return known_rates(Device(device))


def machine(rates: Rates, gpu_bytes: float | None = None) -> Machine:
    """The simulator's machine.

    Args:
        gpu_bytes: device memory for tensors; by default what a plan may take of the whole device, `wishes.usable_of`.
    """
    if gpu_bytes is None and rates.device_bytes is not None:
        gpu_bytes = usable_of(rates.device_bytes)
    return Machine(
        h2d=rates.h2d,
        d2h=rates.d2h,
        both_ways=rates.both_ways,
        host_memory=rates.host_memory,
        gpu_bytes=gpu_bytes,
        host_update=rates.host_update,
        gpu_update=rates.device_update,
        asynchronous=rates.device_bytes is not None,
    )


def predict(
    calibration: Calibration, plan: StreamingPlan, on: Machine | None = None, *, measured: StreamingPlan | None = None
) -> Prediction:
    """Simulate `plan` as the engine carries it out (`pricing.as_run`), by default on the calibrated machine.

    Args:
        measured: as for `step_cost`.
    """
    result = _simulated(calibration, as_run(calibration, plan), on, measured)
    return Prediction(result.seconds, result.peak_bytes, result)


def seconds_alone(calibration: Calibration, plan: StreamingPlan) -> float:
    """Of a step of the calibration's own plan that begins with nothing under way, until the host goes on to the next.

    Updates that may run on into the next step do not count.
    """
    return _alone(calibration, as_run(calibration, plan))[0]


def fitted(calibration: Calibration, plan: StreamingPlan, seconds: float, update_seconds: float) -> Calibration:
    """The calibration with which a step of `plan` takes as long as it was measured to take.

    Updates on the host take as much longer, or shorter, than the machine's rates say as they did. What the step is
    longer for no reason that is simulated counts as time of the host between two steps; or, where the optimizer itself
    steps published gradients, as its time.

    Args:
        plan: of the steps that were measured, those of which the calibration is.
        seconds: of a step, as `seconds_alone` counts them.
        update_seconds: in which the host updated.
    """
    plan = as_run(calibration, plan)
    _, updating = _alone(calibration, plan)
    if updating and update_seconds:
        calibration = replace(calibration, update_factor=calibration.update_factor * update_seconds / updating)
    published = plan.updates is Optimizer.PUBLISHED and updating > 0
    for _ in range(FITTING):  # what limits the step may hide a part of the time that is added
        unexplained = seconds - _alone(calibration, plan)[0]
        if unexplained <= 1e-4 * seconds:
            break
        if published:
            factor = calibration.update_factor * (1 + unexplained / updating)
            return replace(calibration, update_factor=factor)
        calibration = replace(calibration, between=calibration.between + unexplained)
    return calibration


def _alone(calibration: Calibration, plan: StreamingPlan) -> tuple[float, float]:
    """Seconds of a step with nothing of another one in it, until the host goes on; and of its updates on the host."""
    line = _simulated(calibration, plan, None, plan, steps=1).timeline
    updates = [span for span in line.spans if span.kind is Kind.UPDATE and span.resource == HOST]
    others = [span for span in line.spans if span.kind is not Kind.UPDATE or span.resource != HOST]
    awaited = others if plan.updates is Optimizer.OVERLAPPED else others + updates
    end = max((span.end for span in awaited), default=line.start)
    return end - line.start, sum(span.end - span.start for span in updates)


def _simulated(
    calibration: Calibration,
    plan: StreamingPlan,
    on: Machine | None,
    measured: StreamingPlan | None,
    *,
    steps: int = 3,
) -> StreamingResult:
    found = planned_costs(calibration, plan)
    beside = step_cost(calibration, measured, train=plan.train)
    return simulate_streaming(found, plan, on or machine(calibration.rates), beside, steps=steps)


def recommend(
    calibration: Calibration,
    on: Machine | None = None,
    base: StreamingPlan | None = None,
    *,
    windows: Sequence[int] | None = None,
    resident: Sequence[int | tuple[int, ...]] | None = None,
    checkpoint: Sequence[bool] = (False, True),
) -> Choice:
    """The fastest window, resident chunks and activation policy that fit; see `simulate.choose`.

    Args:
        base: what is not chosen: microbatches and the like; as for `predict`.
        windows, resident, checkpoint: what is chosen from; by default whatever may be best.

    Raises:
        ConfigurationError: nothing fits, or there is nothing to choose from.
    """
    base = as_run(calibration, base or StreamingPlan(optimizer=Optimizer.OVERLAPPED))
    return choose(
        planned_costs(calibration, base),
        on or machine(calibration.rates),
        base=base,
        beside=step_cost(calibration, train=base.train),
        doubled=doubled(calibration, base),
        windows=WINDOWS if windows is None else windows,
        resident=resident,
        checkpoint=checkpoint,
    )


def even_stages(calibration: Calibration, stages: int) -> list[int]:
    """The first chunks of all stages but the first, for `predict_pipeline`, with which stages compute most evenly.

    What is in no chunk counts as part of the last one, as there.

    Raises:
        ConfigurationError: fewer chunks than stages, or no stages.
    """
    check_count("stages", stages)
    seconds = [chunk.forward + chunk.backward for chunk in calibration.chunks]
    seconds[-1] += calibration.outside
    return [part.start for part in partition(seconds, stages)[1:]]


def predict_pipeline(
    calibration: Calibration, schedule: Schedule, first_chunks: Sequence[int], plan: PipelinePlan | None = None
) -> PipelineResult:
    """Simulate a step of a pipeline of resident stages, without its optimizer.

    What is in no chunk counts as part of the last chunk's backward, and what the host does before a microbatch as part
    of the first chunk's forward.

    Args:
        first_chunks: of each stage but the first, the index of its first chunk, as from `even_stages`.

    Raises:
        ConfigurationError: indices that do not cut the chunks into as many stages as `schedule` has.
    """
    issue = calibration.issue
    plan = plan or PipelinePlan()
    found = costs(calibration, schedule.microbatches, together=plan.accumulate is Accumulate.GPU)
    last = replace(found[-1], backward=found[-1].backward + calibration.outside)
    found[-1] = _issued_longer(last, backward=issue.loss)
    found[0] = _issued_longer(found[0], forward=issue.begin)
    cuts = [0, *first_chunks, len(found)]
    if cuts != sorted(set(cuts)):
        raise ConfigurationError(
            f"first_chunks={list(first_chunks)}: give rising indices between 1 and {len(found) - 1}"
        )
    stages = [found[start:end] for start, end in itertools.pairwise(cuts)]
    return simulate_pipeline(schedule, stages, plan, machine(calibration.rates))


def _issued_longer(cost: ChunkCost, *, forward: float = 0.0, backward: float = 0.0) -> ChunkCost:
    launches = None if cost.launch_forward is None else cost.launch_forward + forward
    return replace(
        cost,
        issue_forward=cost.issue_forward + forward,
        issue_backward=cost.issue_backward + backward,
        launch_forward=launches,
        launch_backward=None if cost.launch_backward is None else cost.launch_backward + backward,
    )


def mean_loss(output: Any) -> Tensor:
    """A loss of any output: the mean of its tensors, added up."""
    tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not tensors:
        raise ConfigurationError("the module's output has no tensor with a gradient: pass loss_fn= or step=")
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()

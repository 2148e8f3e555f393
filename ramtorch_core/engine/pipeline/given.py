"""Devices, schedules and weights as users give them, checked."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ramtorch_core.errors import ConfigurationError, shown
from ramtorch_core.memory.device import Device
from ramtorch_core.plan.check import check
from ramtorch_core.plan.schedule import Schedule, build

__all__ = ["ScheduleSpec", "check_device_weights", "plan_schedule", "resolve_devices", "stage_weights"]

ScheduleSpec: TypeAlias = str | Schedule | Callable[[int, int], Schedule]
"""A name, a schedule for one number of microbatches, or a function of (devices, microbatches)."""


def plan_schedule(spec: ScheduleSpec, devices: int, microbatches: int) -> Schedule:
    """The checked schedule that `spec` means for so many devices; a fixed schedule as it is.

    Raises:
        ConfigurationError: an unknown name, or a schedule for another number of devices.
        PlanError: a schedule that cannot run.
    """
    if isinstance(spec, Schedule):
        schedule = spec
    elif isinstance(spec, str):
        schedule = build(spec, devices, microbatches)
    else:
        schedule = _made(spec, devices, microbatches)
    if schedule.devices != devices:
        raise ConfigurationError(
            f"schedule {schedule.name!r} is for {schedule.devices} devices, but {devices} are given"
        )
    check(schedule)
    return schedule


def _made(spec: Any, devices: int, microbatches: int) -> Schedule:
    """The schedule that a function makes."""
    what = f"schedule={shown(spec)}"
    if callable(spec) and not isinstance(spec, type | nn.Module):
        schedule = spec(devices, microbatches)
        if isinstance(schedule, Schedule):
            if schedule.microbatches != microbatches:
                made = f"the function made {schedule.name!r} for {schedule.microbatches} microbatches"
                raise ConfigurationError(f"schedule: {made} when it was asked for {microbatches}")
            return schedule
        what = f"schedule: the function returned {shown(schedule)}"
    raise ConfigurationError(f"{what}; a name, a Schedule, or a function that makes one is needed")


def resolve_devices(devices: Sequence[torch.device | str | int]) -> list[Device]:
    """The devices, checked. Raises `ConfigurationError` for none, unknown ones, or a GPU given twice."""
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise ConfigurationError(f"devices={shown(devices)}: give a list, devices=[0, 1] or devices=['cpu', 'cpu']")
    if not devices:
        raise ConfigurationError("a pipeline needs at least one device: devices=[0, 1] or devices=['cpu', 'cpu']")
    try:
        resolved = [Device(device) for device in devices]
    except ConfigurationError as error:
        raise ConfigurationError(f"devices: {error}") from None
    names = [str(device.torch) for device in resolved]
    for name in names:
        if names.count(name) > 1 and name != "cpu":
            raise ConfigurationError(f"device {name} is given {names.count(name)} times: every stage needs its own GPU")
    return resolved


def check_device_weights(weights: Any) -> None:
    """Refuse what cannot be relative speeds.

    Raises:
        ConfigurationError: no list of positive, finite numbers.
    """
    speeds = isinstance(weights, Sequence) and all(isinstance(weight, int | float) for weight in weights)
    if not speeds or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigurationError(f"device_weights={shown(weights)}: give positive, finite numbers, one for each device")


def stage_weights(weights: Sequence[float] | None, placement: Sequence[int], devices: int) -> list[float] | None:
    """The weight of each stage's device; `placement[s]` is the device of stage s."""
    if weights is None:
        return None
    check_device_weights(weights)
    if len(weights) != devices:
        raise ConfigurationError(f"{len(weights)} device_weights for {devices} devices: give one for each")
    return [weights[device] for device in placement]

"""Attaches a pipeline to any module tree: stages, devices and schedules."""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ramtorch_core.engine.observe import is_compiled
from ramtorch_core.engine.pipeline.executor import Executor, StepResult
from ramtorch_core.engine.pipeline.running_order import AS_REGISTERED, FirstCalls, RunningOrder, optimizers_follow
from ramtorch_core.engine.pipeline.stages import (
    StageMap,
    StageRow,
    balanced_entries,
    memory_cost,
    parameter_cost,
    place,
    resolve_entries,
)
from ramtorch_core.engine.pipeline.step import Root
from ramtorch_core.engine.pipeline.streamed import StreamedStages, StreamOptions
from ramtorch_core.errors import ConfigurationError, check_choice, shown
from ramtorch_core.memory.device import Device
from ramtorch_core.plan.check import check
from ramtorch_core.plan.schedule import Schedule, build, forward_only, one_by_one

__all__ = ["PipelineRunner", "ScheduleSpec", "StageSpec", "format_stage_rows", "plan_schedule", "resolve_devices"]

log = logging.getLogger(__name__)

WORTH_CUTTING_ANEW = 0.05
"""Share of the weights' bytes away from where they run at which stages follow the running order."""

StageSpec: TypeAlias = Sequence[str | nn.Module] | Callable[[nn.Module], Sequence[str | nn.Module]] | None
"""The modules whose entry begins stages 1, 2, ..., or their names; a function that finds them; None: balanced."""

ScheduleSpec: TypeAlias = str | Schedule | Callable[[int, int], Schedule]
"""A name, a schedule for one number of microbatches, or a function of (devices, microbatches)."""

Balance: TypeAlias = Literal["parameters", "memory"]
_COSTS = {"parameters": parameter_cost, "memory": memory_cost}


class PipelineRunner:
    """A module spread over several devices, stage after stage, until `close()`.

    Nothing in the module tree is renamed or moved: parameters stay the same objects, on the devices of their stages.
    The first training step shows in which order modules run. If that is not the order of their registration, stages are
    cut, and weights placed, anew after it; cuts of the user's stay, and what runs between them is placed.

    Args:
        root: the module; its parameters and buffers move.
        devices: one per pipeline device, in the order of the stages; the CPU may be given several times.
        stages: where stages begin. None: balanced automatically.
        schedule: the default schedule.
        balance: what is balanced: numbers of parameters, or bytes with gradients and two moments.
        device_weights: relative speed, or size, of each device.
        aside: submodules for which it is true stay where they are (metrics, for example).
        stream: let the chunks of every stage stay in RAM and stream through a window on its device.

    Raises:
        ConfigurationError: duplicate or unknown devices, cuts that cannot begin a stage, too few modules.
        PlanError: a schedule that cannot run.
    """

    def __init__(
        self,
        root: nn.Module,
        devices: Sequence[torch.device | str | int],
        *,
        stages: StageSpec = None,
        schedule: ScheduleSpec = "staggered_1b1f",
        balance: Balance = "parameters",
        device_weights: Sequence[float] | None = None,
        aside: Callable[[nn.Module], bool] = lambda module: False,
        stream: StreamOptions | None = None,
    ) -> None:
        self.devices = resolve_devices(devices)
        self.schedule = schedule
        self._schedules: dict[int, Schedule] = {}
        self._fixed_logged = False
        placement = plan_schedule(schedule, len(self.devices), 1).placement
        self.stage_devices = [self.devices[d] for d in placement]
        weights = _stage_weights(device_weights, placement, len(self.devices))
        self._find = functools.partial(_find_stages, root, stages, len(placement), balance, weights)
        self._aside, self._stream = aside, stream
        self.streamed: StreamedStages | None = None
        self._following: RemovableHandle | None = None
        self._settle(self._find(AS_REGISTERED))
        self._calls = self._first_calls()

    @property
    def root_device(self) -> torch.device:
        """The device of the last stage, where loss and labels belong."""
        return self.stage_devices[-1].torch

    def stage_table(self) -> list[StageRow]:
        """One row per stage."""
        return self.stages.rows([str(device.torch) for device in self.stage_devices])

    def plan(self, microbatches: int) -> Schedule:
        """The checked schedule for so many microbatches."""
        found = self._schedules.get(microbatches)
        if found is None:
            found = self._schedules[microbatches] = self._build(microbatches)
        return found

    def train(
        self,
        function: Callable[[Any], Any],
        inputs: Sequence[Any],
        root: Root,
        *,
        accumulate: bool = False,
        step: int = 0,
        schedule: Schedule | None = None,
    ) -> StepResult:
        """Forward and backward of all microbatches, by default in the order of `plan`; see `Executor.run`."""
        self._follow_tree()
        plan = schedule or self.plan(len(inputs))
        streaming = contextlib.nullcontext() if self.streamed is None else self.streamed.step(len(inputs))
        shared = self.streamed is not None  # where user code skips a module that begins a stage, chunks run in another
        with contextlib.nullcontext() if self._calls is None else self._calls, streaming as finish:
            result = self._executor.run(
                function, inputs, plan, root, accumulate=accumulate, step=step, finish=finish, exclusive=shared
            )
        calls, self._calls = self._calls, None
        return result if calls is None else self._cut_anew(result, calls.order())

    def evaluate(self, function: Callable[[Any], Any], inputs: Sequence[Any], *, step: int = 0) -> list[Any]:
        """The outputs of `function` for all microbatches, without backward."""
        self._follow_tree()
        plan = forward_only(self.plan(len(inputs)))
        with contextlib.nullcontext() if self.streamed is None else self.streamed.scopes():
            return self._executor.run(function, inputs, plan, step=step).outputs

    def transparent(self) -> AbstractContextManager[object]:
        """Inside, the calling thread may call the module as if it were on one device, with its graph whole."""
        return self._executor.transparent()

    def close(self) -> None:
        """Remove the hooks and end the threads; parameters stay where they are. Idempotent."""
        self._executor.close()
        if self.streamed is not None:
            self.streamed.close()
        if self._following is not None:
            self._following.remove()

    def _settle(self, stages: StageMap) -> None:
        self.stages = stages
        if self.streamed is not None:
            self.streamed.close()
        if self._stream is not None:
            self.streamed = StreamedStages(stages, self.stage_devices, self._stream)
        try:
            place(stages, [device.torch for device in self.stage_devices], self._stays)
            self._executor = Executor(stages, self.stage_devices)
        except BaseException:
            if self.streamed is not None:
                self.streamed.close()
            raise

    def _stays(self, module: nn.Module) -> bool:
        return self._aside(module) or (self.streamed is not None and self.streamed.holds(module))

    def _first_calls(self) -> FirstCalls | None:
        """What notes in which order the next step calls the modules, if that can be told and makes a difference."""
        root = self.stages.root
        return None if is_compiled(root) or self.stages.count == 1 else FirstCalls(root)

    def _replace(self, stages: StageMap) -> None:
        before = {parameter: parameter.device for owned in self.stages.owned for parameter in owned}
        self._executor.close()
        self._settle(stages)
        self._following = optimizers_follow({p: device for p, device in before.items() if p.device != device})
        weakref.finalize(self, self._following.remove)

    def _follow_tree(self) -> None:
        """Cut the stages anew where user code has put other modules into the tree, whose weights nobody knows."""
        if self.stages.outdated():
            with torch.inference_mode(False):
                self._replace(self._find(AS_REGISTERED))
            self._calls = self._first_calls()
            log.info("the model has other modules than before:\n%s", format_stage_rows(self.stage_table()))

    def _cut_anew(self, result: StepResult, order: RunningOrder) -> StepResult:
        """Let the stages follow the running order, if that is another one; returns the result at its new places."""
        away = self.stages.away(order)
        astray = self.streamed is not None and self.streamed.out_of_place(order)
        if away < WORTH_CUTTING_ANEW and not astray and not self.stages.never_entered(order):
            return result
        try:
            self._replace(self._find(order))
        except ConfigurationError:  # too few modules are called, and called once, to begin stages
            self._replace(StageMap(self.stages.root, self.stages.entries, order))
        if idle := self.stages.never_entered(order):
            log.warning(
                "the first microbatch did not call %s, where a stage begins: what follows belongs to the stage before. "
                "If none does, a device has nothing to do: cut elsewhere (stages=[...])",
                " and ".join(f"'{name}'" for name in idle),
            )
        if astray:
            log.info("chunks that run in another stage than it seemed stream there, those of several stages nowhere")
        if away >= WORTH_CUTTING_ANEW:
            log.warning(
                "modules run in another order than they are registered in, and %.0f %% of the weights were copied to "
                "where they are used. From now on they are there:\n%s",
                100 * away,
                format_stage_rows(self.stage_table()),
            )
        return replace(result, gradients={p: gradient.to(p.device) for p, gradient in result.gradients.items()})

    def _build(self, microbatches: int) -> Schedule:
        fixed = self.schedule
        if not isinstance(fixed, Schedule) or fixed.microbatches == microbatches:
            return plan_schedule(fixed, len(self.devices), microbatches)
        if not self._fixed_logged:
            self._fixed_logged = True
            log.warning(
                "the schedule %r is for %d microbatches; a batch with %d runs one microbatch after the other. Pass a "
                "function of (devices, microbatches) to cover every number.",
                fixed.name,
                fixed.microbatches,
                microbatches,
            )
        return one_by_one(fixed.placement, microbatches)


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


def format_stage_rows(rows: Sequence[StageRow]) -> str:
    """The stage table as text."""
    lines = [f"{'stage':>5}  {'device':<8} {'parameters':>12} {'MB':>10} {'share':>6}  begins at"]
    lines += [
        f"{row.stage:>5}  {row.device:<8} {row.parameters:>12,} {row.bytes / 1e6:>10,.1f} {row.share:>6.1%}  "
        f"{row.first_module}"
        for row in rows
    ]
    return "\n".join(lines)


def check_device_weights(weights: Any) -> None:
    """Refuse what cannot be relative speeds.

    Raises:
        ConfigurationError: no list of positive, finite numbers.
    """
    speeds = isinstance(weights, Sequence) and all(isinstance(weight, int | float) for weight in weights)
    if not speeds or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigurationError(f"device_weights={shown(weights)}: give positive, finite numbers, one for each device")


def _find_stages(
    root: nn.Module,
    chosen: StageSpec,
    count: int,
    balance: Balance,
    weights: Sequence[float] | None,
    order: RunningOrder,
) -> StageMap:
    if chosen is None:
        check_choice("balance", balance, _COSTS)
        return balanced_entries(root, count, weights, _COSTS[balance], order)
    function = callable(chosen) and not isinstance(chosen, type | nn.Module)
    entries: Any = chosen(root) if function else chosen  # type: ignore[operator]
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ConfigurationError(
            f"stages={shown(entries)}: give a list with the names of the modules whose entry begins stages 1, 2, ..."
        )
    return resolve_entries(root, entries, count, order)


def _stage_weights(weights: Sequence[float] | None, placement: Sequence[int], devices: int) -> list[float] | None:
    if weights is None:
        return None
    check_device_weights(weights)
    if len(weights) != devices:
        raise ConfigurationError(f"{len(weights)} device_weights for {devices} devices: give one for each")
    return [weights[device] for device in placement]

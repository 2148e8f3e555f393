"""Steps of one module with gradients that wait for a flush: what the public engines without Lightning share."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ramtorch_core.engine.pipeline.runner import PipelineRunner, ScheduleSpec, plan_schedule
from ramtorch_core.engine.pipeline.split import batch_size, join, sizes_of, split
from ramtorch_core.engine.pipeline.trees import map_tensors
from ramtorch_core.errors import ConfigurationError, check_count, shown
from ramtorch_core.plan.schedule import Schedule

__all__ = ["Autocast", "Chain", "GradOutputs", "LossFunction", "Steps"]

Autocast: TypeAlias = Literal["bf16", "fp16"] | torch.dtype | None
GradOutputs: TypeAlias = Tensor | Callable[[Any], Any]
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]


class Steps:
    """Steps and inference of one module with one runner; see `Pipeline.step` for the arguments."""

    def __init__(self, module: nn.Module, runner: PipelineRunner, autocast: Autocast) -> None:
        self.module = module
        self.runner = runner
        self._dtype = _autocast_dtype(autocast)
        self._pending: dict[Tensor, Tensor] = {}
        self._count = 0
        self._last: tuple[ScheduleSpec, int, Schedule] | None = None

    def step(
        self,
        x: Any,
        targets: Any,
        schedule: ScheduleSpec,
        n_microbatches: int,
        loss_fn: LossFunction | None,
        grad_outputs: GradOutputs | None,
        diced: bool,
        scaler: Any,
    ) -> Tensor | None:
        """Forward and backward of one batch; returns its loss, if there is one."""
        if (loss_fn is None) == (grad_outputs is None):
            raise ConfigurationError("a step needs either loss_fn or grad_outputs, and not both")
        if self._dtype is torch.float16 and scaler is None:
            raise ConfigurationError("training in fp16 needs scaler=torch.amp.GradScaler(); or use autocast='bf16'")
        given = grad_outputs if isinstance(grad_outputs, Tensor) else None
        x, targets = _to(x, self.runner.stage_devices[0].torch), _to(targets, self.runner.root_device)
        items, sizes = self._microbatches((x, targets, given), n_microbatches, diced)
        shares = [size / sum(sizes) for size in sizes]
        equal = len(set(sizes)) == 1

        def function(item: Any) -> Any:
            inputs, target, gradient = item
            output = self._call(inputs)
            if loss_fn is not None:
                return [loss_fn(output, target)]
            return [output, grad_outputs(output) if callable(grad_outputs) and gradient is None else gradient]

        def root(outcome: list[Any], m: int) -> Any:
            if loss_fn is None:
                pairs = _paired(*outcome)
                outcome.clear()  # nothing of them is kept
                return pairs
            (loss,) = outcome
            if scaler is None:
                return loss, 1 / len(items) if equal else shares[m]
            return scaler.scale(loss / len(items) if equal else loss * shares[m]), None

        plan = self._plan(schedule, len(items))
        held = [(p, p.grad) for p in self.module.parameters()]
        for p, _ in held:
            p.grad = _beside(p, self._pending.get(p))
        try:
            with self._autocast():
                result = self.runner.train(function, items, root, accumulate=True, step=self._count, schedule=plan)
            self._pending = {p: p.grad for p, _ in held if p.grad is not None} | result.gradients
        except BaseException:
            self._pending = {}
            raise
        finally:
            for p, gradient in held:
                p.grad = _beside(p, gradient)
            self._count += 1
        return None if loss_fn is None else join([loss for (loss,) in result.outputs], sizes)

    def infer(self, x: Any, n_microbatches: int, diced: bool) -> Any:
        """The outputs of a batch, without gradients."""
        x = _to(x, self.runner.stage_devices[0].torch)
        items, sizes = self._microbatches((x,), n_microbatches, diced)
        with torch.no_grad(), self._autocast():
            outputs = self.runner.evaluate(lambda item: self._call(item[0]), items, step=self._count)
        return join(outputs, sizes)

    def flush_grads(self) -> None:
        """Add the gradients of all steps since the last flush to `.grad`."""
        for parameter, waiting in self._pending.items():
            gradient = waiting.to(parameter.device)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._pending = {}

    def _call(self, inputs: Any) -> Any:
        return self.module(*inputs) if isinstance(inputs, tuple) else self.module(inputs)

    def _plan(self, spec: ScheduleSpec, microbatches: int) -> Schedule:
        if self._last is not None and self._last[:2] == (spec, microbatches):
            return self._last[2]
        schedule = plan_schedule(spec, len(self.runner.devices), microbatches)
        if schedule.microbatches != microbatches:
            raise ConfigurationError(
                f"schedule {schedule.name!r} is for {schedule.microbatches} microbatches, but the batch makes "
                f"{microbatches}: pass n_microbatches={schedule.microbatches}, or a function that makes schedules"
            )
        if schedule.placement != self.runner.plan(1).placement:
            raise ConfigurationError(
                f"schedule {schedule.name!r} has {schedule.stages} stages, but the model was cut into "
                f"{len(self.runner.stage_devices)}, one for each device"
            )
        self._last = None if callable(spec) else (spec, microbatches, schedule)  # a function may change its mind
        return schedule

    def _microbatches(self, parts: tuple[Any, ...], n: int, diced: bool) -> tuple[list[Any], list[int]]:
        n = check_count("n_microbatches", n)
        if diced:
            counts = {len(part) for part in parts if part is not None}
            if len(counts) != 1:
                raise ConfigurationError(f"diced inputs and targets have different lengths: {sorted(counts)}")
            count = counts.pop()
            items = [tuple(None if part is None else part[m] for part in parts) for m in range(count)]
            found = [batch_size(item) for item in items]
            return items, [size if isinstance(size, int) else 1 for size in found]
        size = batch_size(parts)
        if isinstance(size, str):
            raise ConfigurationError(
                f"the batch cannot be cut into microbatches: {size}. Cut it yourself and pass lists with diced=True"
            )
        sizes = sizes_of(size, n)
        return split(parts, sizes), sizes

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        kind = self.runner.root_device.type
        context: AbstractContextManager[Any] = contextlib.nullcontext()
        if self._dtype is not None:
            context = torch.autocast(kind, self._dtype)
        with context:
            yield


class Chain(nn.Module):
    """Stages one after the other."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *args: Any) -> Any:
        """The output of the last stage."""
        value: Any = args
        for stage in self.stages:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
            if isinstance(value, tuple) and (silent := getattr(stage, "out_no_grad", ())):
                value = tuple(item.detach() if i in silent else item for i, item in enumerate(value))
        return value


def _autocast_dtype(autocast: Autocast) -> torch.dtype | None:
    named = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if autocast is None or (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        return autocast
    if not isinstance(autocast, str) or autocast not in named:
        raise ConfigurationError(f"autocast={shown(autocast)}: use 'bf16', 'fp16', a floating-point dtype, or None")
    return named[autocast]


def _to(value: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)


def _beside(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient on the device of its parameter, which a new cut may have moved."""
    return None if gradient is None else gradient.to(parameter.device)


def _paired(output: Any, gradient: Any) -> list[tuple[Tensor, Tensor]]:
    """Outputs with their gradients."""
    outputs = output if isinstance(output, tuple) else (output,)
    gradients = gradient if isinstance(gradient, tuple) else (gradient,)
    if len(outputs) != len(gradients):
        raise ConfigurationError(
            f"{len(gradients)} grad_outputs for {len(outputs)} outputs: give one for each, or None"
        )
    return [(o, g.to(o.device)) for o, g in zip(outputs, gradients, strict=True) if g is not None]

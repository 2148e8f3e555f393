"""Pipelines over several devices in one process, without Lightning."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ramtorch_core.engine.pipeline.executor import StepResult
from ramtorch_core.engine.pipeline.runner import (
    PipelineRunner,
    ScheduleSpec,
    StageSpec,
    format_stage_rows,
    plan_schedule,
    resolve_devices,
)
from ramtorch_core.engine.pipeline.split import batch_size, join, sizes_of, split
from ramtorch_core.engine.pipeline.stages import StageRow
from ramtorch_core.errors import ConfigurationError

__all__ = [
    "Pipeline",
    "PipelineModel",
    "PipelineResult",
    "PipelineRunner",
    "ScheduleSpec",
    "StageRow",
    "StageSpec",
    "StepResult",
    "batch_size",
    "format_stage_rows",
    "join",
    "plan_schedule",
    "resolve_devices",
    "sizes_of",
    "split",
]

Autocast: TypeAlias = Literal["bf16", "fp16"] | torch.dtype | None
GradOutputs: TypeAlias = Tensor | Callable[[Any], Any]
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]


class PipelineResult:
    """What one `step` leaves behind."""

    def __init__(self, owner: "Pipeline | PipelineModel", loss: Tensor | None) -> None:
        self._owner = owner
        self._loss = loss

    @property
    def loss(self) -> Tensor:
        """The loss of the batch: the mean over the microbatches, weighted by size. A scalar on the last device.

        Raises:
            RuntimeError: the step was given `grad_outputs`, so there is no loss.
        """
        if self._loss is None:
            raise RuntimeError("a step with grad_outputs has no loss")
        return self._loss

    def flush_grads(self) -> None:
        """Publish the gradients of all steps since the last flush; see `Pipeline.flush_grads`."""
        self._owner.flush_grads()


class _Outcome:
    """The output of one microbatch, until its backward begins, and its loss, or the gradient of the output."""

    __slots__ = ("last", "output")

    def __init__(self, output: Any, last: Any) -> None:
        self.output = output
        self.last = last


class _Steps:
    """Steps and inference of one module with one runner; what `Pipeline` and `PipelineModel` share."""

    def __init__(self, module: nn.Module, runner: PipelineRunner, autocast: Autocast) -> None:
        self.module = module
        self.runner = runner
        self._dtype = _autocast_dtype(autocast)
        self._pending: dict[Tensor, Tensor] = {}
        self._count = 0

    def step(
        self,
        owner: "Pipeline | PipelineModel",
        x: Any,
        targets: Any,
        schedule: ScheduleSpec,
        n_microbatches: int,
        loss_fn: LossFunction | None,
        grad_outputs: GradOutputs | None,
        diced: bool,
        scaler: Any,
    ) -> PipelineResult:
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
                return _Outcome(output, loss_fn(output, target))
            return _Outcome(output, grad_outputs(output) if callable(grad_outputs) and gradient is None else gradient)

        def root(outcome: _Outcome, m: int) -> Any:
            output, outcome.output = outcome.output, None
            last, outcome.last = outcome.last, None
            if loss_fn is None:
                return _paired(output, last)
            outcome.last = last.detach()
            loss = last / len(items) if equal else last * shares[m]
            return (loss if scaler is None else scaler.scale(loss)), None

        plan = self._plan(schedule, len(items))
        held = [(p, p.grad) for p in self.module.parameters()]
        for p, _ in held:
            p.grad = self._pending.get(p)
        try:
            with self._autocast():
                result = self.runner.train(function, items, root, accumulate=True, step=self._count, schedule=plan)
            self._pending = result.gradients
        except BaseException:
            self._pending = {}
            raise
        finally:
            for p, gradient in held:
                p.grad = gradient
            self._count += 1
        losses = [outcome.last for outcome in result.outputs]
        return PipelineResult(owner, None if loss_fn is None else join(losses, sizes))

    def infer(self, x: Any, n_microbatches: int, diced: bool) -> Any:
        x = _to(x, self.runner.stage_devices[0].torch)
        items, sizes = self._microbatches((x,), n_microbatches, diced)
        with torch.no_grad(), self._autocast():
            outputs = self.runner.evaluate(lambda item: self._call(item[0]), items, step=self._count)
        return join(outputs, sizes)

    def flush_grads(self) -> None:
        for parameter, gradient in self._pending.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._pending = {}

    def _call(self, inputs: Any) -> Any:
        return self.module(*inputs) if isinstance(inputs, tuple) else self.module(inputs)

    def _plan(self, spec: ScheduleSpec, microbatches: int) -> Any:
        schedule = plan_schedule(spec, len(self.runner.devices), microbatches)
        if schedule.placement != self.runner.plan(1).placement:
            raise ConfigurationError(
                f"schedule {schedule.name!r} has {schedule.stages} stages, but the model was cut into "
                f"{len(self.runner.stage_devices)}, one for each device"
            )
        return schedule

    def _microbatches(self, parts: tuple[Any, ...], n: int, diced: bool) -> tuple[list[Any], list[int]]:
        if n < 1:
            raise ConfigurationError(f"n_microbatches={n}: at least 1 is needed")
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


class Pipeline:
    """Stages that you made yourself, one per device, trained and run in one process.

    Each stage gets the output of the one before; a tuple becomes positional arguments. Whatever is no float tensor
    passes through without gradient, and so do the positions in a stage's attribute `out_no_grad`.

    Args:
        stage_modules: one module per device, in order. They move to their devices; parameters stay the same objects.
        devices: one per stage; the CPU may be given several times.
        autocast: "bf16", "fp16" or a dtype to compute in; None keeps the caller's own autocast. fp16 is for inference,
            unless a step is given a scaler.

    Raises:
        ConfigurationError: other numbers of stages and devices, or devices that cannot work.
    """

    def __init__(
        self,
        *,
        stage_modules: Sequence[nn.Module],
        devices: Sequence[torch.device | str | int],
        autocast: Autocast = None,
    ) -> None:
        if len(stage_modules) != len(devices):
            raise ConfigurationError(f"{len(stage_modules)} stages for {len(devices)} devices: give one for each")
        chain = _Chain(stage_modules)
        runner = PipelineRunner(chain, devices, stages=list(stage_modules[1:]))
        self._steps = _Steps(chain, runner, autocast)

    def step(
        self,
        x: Any,
        targets: Any = None,
        *,
        schedule: ScheduleSpec = "staggered_1b1f",
        n_microbatches: int = 4,
        loss_fn: LossFunction | None = None,
        grad_outputs: GradOutputs | None = None,
        diced: bool = False,
        scaler: Any = None,
    ) -> PipelineResult:
        """Forward and backward of one batch; its gradients wait for `flush_grads`.

        Args:
            x: the input of the first stage; a tuple is its positional arguments. First dimensions are the batch.
            targets: second argument of `loss_fn`, cut like the input, and moved to the last device.
            schedule: see `plan.schedule`.
            n_microbatches: parts into which the batch is cut; it need not divide the batch.
            loss_fn: `(output, target) -> scalar`, a mean over its microbatch.
            grad_outputs: instead of a loss, the gradient of the output for the whole batch, or a function from the
                output of a microbatch to its gradient. A tuple output takes a tuple, None where there is no gradient.
            diced: `x` and `targets` are lists of microbatches already.
            scaler: a `torch.amp.GradScaler`; gradients are scaled by it.

        Raises:
            ConfigurationError: neither or both of `loss_fn` and `grad_outputs`, or a batch that cannot be cut.
            BaseException: whatever a stage or the loss raised; the gradients since the last flush are dropped then.
        """
        return self._steps.step(self, x, targets, schedule, n_microbatches, loss_fn, grad_outputs, diced, scaler)

    def infer(self, x: Any, *, n_microbatches: int = 4, diced: bool = False) -> Any:
        """The outputs for a batch of any size, without gradients, on the last device."""
        return self._steps.infer(x, n_microbatches, diced)

    def flush_grads(self) -> None:
        """Add the gradients of all steps since the last flush to `.grad`."""
        self._steps.flush_grads()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all stages, each once."""
        return self._steps.module.parameters()

    def stage_table(self) -> list[StageRow]:
        """One row per stage."""
        return self._steps.runner.stage_table()

    def close(self) -> None:
        """End the threads; the modules stay usable. Idempotent."""
        self._steps.runner.close()


class PipelineModel(nn.Module):
    """A model that is cut by itself, one stage per device, and called like a module.

    Args:
        model: any module that runs its parts in the order of their registration, or as `split_spec` says.
        example: one microbatch; if given, one forward checks that every stage is entered once and in order.
        devices: in the order of the stages.
        device_weights: relative speed of the devices, for the automatic cut.
        split_spec: the names of the modules that begin stages 1, 2, ..., instead of the automatic cut.
        autocast: as for `Pipeline`.

    Raises:
        ConfigurationError: too few modules, cuts that cannot begin a stage, devices that cannot work.
        RamtorchError: the example entered a stage twice or out of order.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        devices: Sequence[torch.device | str | int],
        device_weights: Sequence[float] | None = None,
        split_spec: Sequence[str] | None = None,
        autocast: Autocast = None,
    ) -> None:
        super().__init__()
        self.model = model
        runner = PipelineRunner(model, devices, stages=split_spec, device_weights=device_weights)
        self._steps = _Steps(model, runner, autocast)
        if example is not None:
            try:
                self._steps.infer(example, 1, False)
            except BaseException:
                self.close()
                raise

    def forward(self, x: Any, n_microbatches: int = 4) -> Any:
        """The outputs for a batch of any size, without gradients, on the last device; nothing is padded."""
        return self._steps.infer(x, n_microbatches, False)

    def step(
        self,
        x: Any,
        targets: Any = None,
        *,
        schedule: ScheduleSpec = "staggered_1b1f",
        n_microbatches: int = 4,
        loss_fn: LossFunction | None = None,
        grad_outputs: GradOutputs | None = None,
        diced: bool = False,
        scaler: Any = None,
    ) -> PipelineResult:
        """As `Pipeline.step`."""
        return self._steps.step(self, x, targets, schedule, n_microbatches, loss_fn, grad_outputs, diced, scaler)

    def flush_grads(self) -> None:
        """Add the gradients of all steps since the last flush to `.grad`."""
        self._steps.flush_grads()

    def stage_table(self) -> list[StageRow]:
        """One row per stage."""
        return self._steps.runner.stage_table()

    def close(self) -> None:
        """End the threads; the model stays usable. Idempotent."""
        self._steps.runner.close()


class _Chain(nn.Module):
    """Stages one after the other."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *args: Any) -> Any:
        """The output of the last stage."""
        value: Any = args
        for stage in self.stages:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
            silent = getattr(stage, "out_no_grad", ())
            if silent and isinstance(value, tuple):
                value = tuple(item.detach() if i in silent else item for i, item in enumerate(value))
        return value


def _autocast_dtype(autocast: Autocast) -> torch.dtype | None:
    named = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if autocast is None or isinstance(autocast, torch.dtype):
        return autocast
    if autocast not in named:
        raise ConfigurationError(f"autocast={autocast!r}: use 'bf16', 'fp16', a dtype, or None")
    return named[autocast]


def _to(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def _paired(output: Any, gradient: Any) -> list[tuple[Tensor, Tensor]]:
    """Outputs with their gradients."""
    outputs = output if isinstance(output, tuple) else (output,)
    gradients = gradient if isinstance(gradient, tuple) else (gradient,)
    if len(outputs) != len(gradients):
        raise ConfigurationError(
            f"{len(gradients)} grad_outputs for {len(outputs)} outputs: give one for each, or None"
        )
    return [(o, g.to(o.device)) for o, g in zip(outputs, gradients, strict=True) if g is not None]

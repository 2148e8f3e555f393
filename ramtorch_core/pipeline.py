"""Pipelines over several devices in one process, without Lightning."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ramtorch_core.checks import check_list, check_modules, check_options
from ramtorch_core.engine.pipeline.balance import Balance
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
from ramtorch_core.engine.pipeline.steps import Autocast, Chain, GradOutputs, LossFunction, Steps
from ramtorch_core.engine.pipeline.streamed import StreamOptions
from ramtorch_core.errors import ConfigurationError, check_choice, shown
from ramtorch_core.schedules import AutoSchedule
from ramtorch_core.traces import trace

__all__ = [
    "Pipeline",
    "PipelineModel",
    "PipelineResult",
    "PipelineRunner",
    "ScheduleSpec",
    "StageRow",
    "StageSpec",
    "StepResult",
    "StreamOptions",
    "batch_size",
    "format_stage_rows",
    "join",
    "plan_schedule",
    "resolve_devices",
    "sizes_of",
    "split",
    "stream_options",
]


def stream_options(
    window: int,
    pin: int | Sequence[str],
    activations: Literal["checkpoint", "keep"],
    accumulate: Literal["host", "gpu"] = "host",
    **more: Any,
) -> StreamOptions:
    """How stages stream.

    Raises:
        ConfigurationError: an argument that cannot work.
    """
    given = more.get("stream_dtype", "auto"), more.get("resident_below", 0)
    check_options(window, pin, activations, *given, "host", host_memory=more.get("host_memory"))
    check_choice("accumulate", accumulate, ("host", "gpu"))
    return StreamOptions(window, pin, checkpoint=activations == "checkpoint", accumulate=accumulate, **more)


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


class Pipeline:
    """Stages that you made yourself, one per device, trained and run in one process.

    Each stage gets the output of the one before; a tuple becomes positional arguments. Whatever is no float tensor
    passes through without gradient, and so do the positions in a stage's attribute `out_no_grad`.

    Args:
        stage_modules: one module per device, in order. They move to their devices; parameters stay the same objects.
        chunk_modules: instead, a list of modules per device. They stay in RAM and stream through a window on it.
        devices: one per stage; the CPU may be given several times.
        window: slots on each device, with `chunk_modules`.
        pin: how many chunks of each device stay on it, with `chunk_modules`.
        activations: "checkpoint" recomputes those of a streamed chunk in backward, "keep" keeps them.
        accumulate: where gradients of streamed chunks add up over microbatches: "host" takes 0.1 GB of each device, in
            which the sums pass through; "gpu" 4 bytes for each trained float32 or half-precision parameter (8 for
            float64), and they cross the bus once per step.
        autocast: "bf16", "fp16" or a dtype to compute in; None keeps the caller's own autocast. fp16 is for inference,
            unless a step is given a scaler.

    Raises:
        ConfigurationError: other numbers of stages and devices, or devices that cannot work.
    """

    def __init__(
        self,
        *,
        stage_modules: Sequence[nn.Module] | None = None,
        chunk_modules: Sequence[Sequence[nn.Module]] | None = None,
        devices: Sequence[torch.device | str | int],
        window: int = 2,
        pin: int = 0,
        activations: Literal["checkpoint", "keep"] = "checkpoint",
        accumulate: Literal["host", "gpu"] = "host",
        autocast: Autocast = None,
    ) -> None:
        if (stage_modules is None) == (chunk_modules is None):
            raise ConfigurationError("a pipeline is made of either stage_modules or chunk_modules: pass one of them")
        how = window, pin, activations, accumulate
        stream = stream_options(*how)  # refused, whether or not it is used
        if chunk_modules is not None:
            listed = check_list("chunk_modules", chunk_modules, "lists of modules, one per device,")
            stages = [check_modules("chunk_modules", chunks) for chunks in listed]
            chunks = [chunk for stage in stages for chunk in stage if any(True for _ in chunk.parameters())]
            stream = stream_options(*how, chunks=list(dict.fromkeys(chunks)), resident_below=0)
            stage_modules = [Chain(stage) for stage in stages]
        assert stage_modules is not None
        stage_modules = check_modules("stage_modules", stage_modules)
        places = resolve_devices(devices)
        if len(stage_modules) != len(places):
            given = "stage_modules" if chunk_modules is None else "chunk_modules"
            raise ConfigurationError(f"{given}: {len(stage_modules)} stages for {len(places)} devices; give one each")
        chain = Chain(stage_modules)
        streamed = stream if chunk_modules is not None else None
        runner = PipelineRunner(chain, devices, stages=list(stage_modules[1:]), stream=streamed)
        self._steps, self._auto = Steps(chain, runner, autocast), AutoSchedule(runner)

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
        profile_path: str | None = None,
    ) -> PipelineResult:
        """Forward and backward of one batch; its gradients wait for `flush_grads`.

        Args:
            x: the input of the first stage; a tuple is its positional arguments. First dimensions are the batch.
            targets: second argument of `loss_fn`, cut like the input, and moved to the last device.
            schedule: see `plan.schedule`; "auto" times the first steps with it, and takes the fastest from then on.
            n_microbatches: parts into which the batch is cut; it need not divide the batch.
            loss_fn: `(output, target) -> scalar`, a mean over its microbatch.
            grad_outputs: instead of a loss, the gradient of the output for the whole batch, or a function from the
                output of a microbatch to its gradient. A tuple output takes a tuple, None where there is no gradient.
            diced: `x` and `targets` are lists of microbatches already.
            scaler: a `torch.amp.GradScaler`; gradients are scaled by it.
            profile_path: write a trace of the step there; see `ramtorch_core.traces.trace`.

        Raises:
            ConfigurationError: neither or both of `loss_fn` and `grad_outputs`, or a batch that cannot be cut.
            BaseException: whatever a stage or the loss raised; the gradients since the last flush are dropped then.
        """
        with trace(profile_path), self._auto.around(schedule, n_microbatches) as plan:
            loss = self._steps.step(x, targets, plan, n_microbatches, loss_fn, grad_outputs, diced, scaler)
        return PipelineResult(self, loss)

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
        balance: what the automatic cut balances: "parameters", "memory" with gradients and two moments, or "time": the
            third step is timed, and the model is cut anew after it if that makes the slowest stage faster.
        device_weights: relative speed of the devices, for the automatic cut.
        split_spec: the names of the modules that begin stages 1, 2, ..., instead of the automatic cut.
        window: slots on each device, through which the chunks of its stages stream from RAM; None: nothing streams.
        pin: how many chunks of each device stay on it, or their names, with `window`.
        activations, accumulate: as for `Pipeline`.
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
        balance: Balance = "parameters",
        device_weights: Sequence[float] | None = None,
        split_spec: Sequence[str] | None = None,
        window: int | None = None,
        pin: int | Sequence[str] = 0,
        activations: Literal["checkpoint", "keep"] = "checkpoint",
        accumulate: Literal["host", "gpu"] = "host",
        autocast: Autocast = None,
    ) -> None:
        super().__init__()
        self.model = model
        stream = None if window is None else stream_options(window, pin, activations, accumulate)
        how: dict[str, Any] = {"balance": balance, "device_weights": device_weights, "stream": stream}
        runner = PipelineRunner(model, devices, stages=split_spec, **how)
        self._steps, self._auto = Steps(model, runner, autocast), AutoSchedule(runner)
        if example is not None:
            try:
                self._steps.infer(example, 1, False)
            except ConfigurationError as error:
                self.close()
                raise ConfigurationError(f"example={shown(example)}: {error}") from error
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
        profile_path: str | None = None,
    ) -> PipelineResult:
        """As `Pipeline.step`."""
        with trace(profile_path), self._auto.around(schedule, n_microbatches) as plan:
            loss = self._steps.step(x, targets, plan, n_microbatches, loss_fn, grad_outputs, diced, scaler)
        return PipelineResult(self, loss)

    def flush_grads(self) -> None:
        """Add the gradients of all steps since the last flush to `.grad`."""
        self._steps.flush_grads()

    def stage_table(self) -> list[StageRow]:
        """One row per stage."""
        return self._steps.runner.stage_table()

    def close(self) -> None:
        """End the threads; the model stays usable. Idempotent."""
        self._steps.runner.close()

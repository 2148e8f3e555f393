"""`PipelineStrategy`: several devices, one process, one stage of the model after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from ramtorch_core import ConfigurationError, format_rows
from ramtorch_core.advice import advise_pipeline
from ramtorch_core.checks import check_device_weights
from ramtorch_core.errors import check_choice
from ramtorch_core.pipeline import (
    PipelineRunner,
    StageRow,
    StreamOptions,
    format_stage_rows,
    join,
    plan_schedule,
    resolve_devices,
    stream_options,
)
from ramtorch_core.schedules import AUTO, FIRST, ScheduledRunner
from ramtorch_core.tuning import bytes_of
from ramtorch_lightning._lightning import (
    Accelerator,
    CheckpointIO,
    Precision,
    TrainerFn,
    pl,
    rank_zero_info,
)
from ramtorch_lightning.arguments import ChunkSpec, Devices, ScheduleSpec, StageSpec
from ramtorch_lightning.chunks import chunk_spec
from ramtorch_lightning.evaluation import evaluate_pipelined, evaluate_whole
from ramtorch_lightning.logs import LogCapture
from ramtorch_lightning.microbatches import MicrobatchedStrategy, SplitFn, WeightFn
from ramtorch_lightning.refusals import allow_clipping, check_agreement, check_optimizer, check_plugins
from ramtorch_lightning.tuning import tell_missed
from ramtorch_lightning.writers import keep_average_on_host

__all__ = ["PipelineStrategy"]

_UNSUPPORTED_PRECISION = ("BitsandbytesPrecision", "TransformerEnginePrecision", "DeepSpeedPrecision", "FSDPPrecision")


class PipelineStrategy(MicrobatchedStrategy):
    """Train and run a model across several GPUs in one process: each holds one stage, microbatches flow through them.

    `training_step` runs once per microbatch, unchanged. Results are those of
    `Trainer(accumulate_grad_batches=n_microbatches)` with batches of the microbatches' size on one device, bit for bit,
    except for random operations, which are reproducible but draw other numbers. Losses and logged means weigh
    microbatches of unequal size by their size.

    Batches that cannot be split, and steps that take the `dataloader_iter`, run as one microbatch; manual optimization
    runs `training_step` once per batch, the model whole across the devices.

    Args:
        devices: one per pipeline device, in the order of the stages. `"cpu"` works, also several times. None: those of
            the Trainer.
        schedule: "staggered_1b1f" (also "1f1b"), "gpipe", "eager_1f1b", "zb_h1", "interleaved", "zbv", "sequential", or
            a schedule, or a function of (devices, microbatches). "auto" times the first batches, and takes the fastest
            of the first four that fits; the log says which, and why.
        n_microbatches: into how many parts each batch is cut; fewer for smaller batches.
        stages: where stages begin: the names of the modules that begin stages 1, 2, ..., the modules, or a function
            that finds them. None: `configure_stages()` of the LightningModule if it has one, else a balanced split of
            modules in the order of their registration.
        balance: what the automatic split balances: "parameters", "memory" with gradients and optimizer state, or
            "time": the third batch is timed, and the stages are cut anew after it if that makes the slowest one faster.
        device_weights: relative speed of the devices, for the automatic split.
        window: slots on each device, through which the chunks of its stages stream from RAM; None: nothing streams.
        pin: how many chunks of each device stay on it, or their names, with `window`.
        chunks: what streams together, with `window`; as for OffloadStrategy.
        activations: of streamed chunks: "checkpoint" recomputes them in backward, "keep" keeps them.
        accumulate: where gradients of streamed chunks add up over microbatches: "host" takes 0.1 GB of each
            GPU, in which the sums pass through; "gpu" takes 4 bytes for each of their trained parameters, and the
            gradients cross the bus once per step.
        resident_below: bytes; smaller tensors of streamed chunks keep a copy on the device.
        host_memory: bytes of RAM that streaming may use; by default what the system reports as available.
        gpu_memory: of each device that schedule="auto" may plan with: bytes, or as in "20GB". By default what is free.
        split_fn: `(batch, n) -> microbatches`, for batches without a common first dimension.
        weight_fn: `microbatch -> weight` in loss and logged means, such as a number of tokens; by default its size.
        evaluate: "pipelined" splits validation, test and predict batches too; "whole" leaves them whole. Where such a
            step computes gradients, its microbatches run one after the other.
        accelerator: Lightning's accelerator; by default chosen by the Trainer.
        checkpoint_io: writes and reads checkpoints; by default without a second copy in RAM.
        precision_plugin: Lightning's precision plugin; by default what `Trainer(precision=)` says.

    Raises:
        ConfigurationError: an argument that cannot work.
        PlanError: a schedule that cannot run.
    """

    strategy_name = "pipeline"

    def __init__(
        self,
        devices: Devices = None,
        schedule: ScheduleSpec = "staggered_1b1f",
        n_microbatches: int = 4,
        stages: StageSpec = None,
        balance: Literal["parameters", "memory", "time"] = "parameters",
        device_weights: list[float] | None = None,
        window: int | None = None,
        pin: int | list[str] = 0,
        chunks: ChunkSpec = None,
        activations: Literal["checkpoint", "keep"] = "checkpoint",
        accumulate: Literal["host", "gpu"] = "host",
        resident_below: int = 2**20,
        host_memory: int | None = None,
        gpu_memory: int | str | None = None,
        split_fn: SplitFn | None = None,
        weight_fn: WeightFn | None = None,
        evaluate: Literal["pipelined", "whole"] = "pipelined",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_plugins(accelerator, checkpoint_io, precision_plugin)
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._configure_microbatches(n_microbatches, split_fn, weight_fn)
        check_choice("evaluate", evaluate, ("pipelined", "whole"))
        check_choice("balance", balance, ("parameters", "memory", "time"))
        if device_weights is not None:
            check_device_weights(device_weights)
        self._devices = None if devices is None else resolve_devices(devices)
        self._auto_schedule = isinstance(schedule, str) and schedule == AUTO
        self._schedule: ScheduleSpec = FIRST if self._auto_schedule else schedule
        self._gpu_memory = None if gpu_memory is None else bytes_of(gpu_memory)
        if gpu_memory is not None and not self._auto_schedule:
            raise ConfigurationError(f"gpu_memory={gpu_memory!r} limits what schedule='auto' chooses, and it is given")
        self._stages = stages
        self._balance = balance
        self._device_weights = device_weights
        self._evaluate = evaluate
        self._chunks = chunks
        pins: Any = pin
        unpinned = isinstance(pins, int | Sequence) and not pins
        how = {"activations": activations, "accumulate": accumulate}
        streaming: dict[str, Any] = {"resident_below": resident_below, "host_memory": host_memory, **how}
        streaming |= {"window": 2 if window is None else window, "pin": pin}
        stream_options(**streaming)  # refuses what cannot work
        as_if = how == {"activations": "checkpoint", "accumulate": "host"}
        if window is None and not (unpinned and chunks is None and as_if and host_memory is None):
            raise ConfigurationError(
                "pin, chunks, activations, accumulate and host_memory are of stages that stream, and none does: pass "
                "window=2"
            )
        self._streaming = None if window is None else streaming
        self._runner: PipelineRunner | None = None
        self._scheduled: ScheduledRunner | None = None
        self._need_graphs: set[str] = set()  # the evaluation steps that compute gradients
        if self._devices is not None:
            self._choose_root()

    @property
    def runner(self) -> PipelineRunner:
        """The engine, between the Trainer's set-up and its end.

        Raises:
            RuntimeError: the Trainer has not set the model up.
        """
        if self._runner is None:
            raise RuntimeError("no pipeline yet: it exists from the Trainer's set-up to its end")
        return self._runner

    def stage_table(self) -> list[StageRow]:
        """One row per stage: device, parameters, bytes, and where it begins. Also in the log."""
        return self.runner.stage_table()

    # ------------------------------------------------------------------ device and processes

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices given to this strategy, which the Trainer then takes; empty if the Trainer is to choose."""
        devices = [] if self._devices is None else [device.torch for device in self._devices]
        check_agreement("PipelineStrategy(devices=)", devices)
        return devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        self._devices = resolve_devices(devices)
        self._choose_root()

    def _choose_root(self) -> None:
        """The root device is the last stage's, where labels, loss and metrics belong. Refuses a schedule early."""
        assert self._devices is not None
        named = isinstance(self._schedule, str)  # those can run with any number of microbatches
        schedule = plan_schedule(self._schedule, len(self._devices), 1 if named else self._microbatches)
        self._root_device = self._devices[schedule.placement[-1]].torch

    @override
    def setup_environment(self) -> None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if processes > 1 and ("LOCAL_RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ):
            raise ConfigurationError(
                f"this process is one of {processes} that a launcher started, and PipelineStrategy runs in one: each "
                f"would train on its own. Start the script with plain python."
            )
        name = type(self.precision_plugin).__name__
        if name in _UNSUPPORTED_PRECISION:
            raise ConfigurationError(f"{name} does not work with PipelineStrategy: use 'bf16-mixed' or '16-mixed'")
        if self.lightning_module is not None and self._devices is not None and len(self._devices) > 1:
            for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
                keep_average_on_host(callback)  # no single device may hold the whole model
        super().setup_environment()

    # ------------------------------------------------------------------ set-up and end

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._close()
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.model = self._setup_model(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        streamed = self.runner.streamed
        for optimizer in self.optimizers:
            if streamed is not None:
                check_optimizer(optimizer)
            allow_clipping(optimizer, self.precision_plugin)
        if streamed is not None:
            rank_zero_info(format_rows([row for streamer in streamed.streamers for row in streamer.chunk_table()]))

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._runner is not None and self._runner.streamed is not None:
            self._runner.streamed.refresh()
        return output

    @override
    def model_to_device(self) -> None:
        module = self.lightning_module
        assert module is not None
        assert self._devices is not None
        configure = getattr(module, "configure_stages", None)
        say = lambda message: rank_zero_info(f"PipelineStrategy: {message}")
        self._runner = PipelineRunner(
            module,
            [device.torch for device in self._devices],
            stages=configure() if self._stages is None and configure is not None else self._stages,
            schedule=self._schedule,
            balance=self._balance,
            device_weights=self._device_weights,
            aside=lambda submodule: isinstance(submodule, Metric),
            stream=self._stream_options(module),
            say=say,
        )
        self._scheduled = ScheduledRunner(self._runner, self._gpu_memory, say) if self._auto_schedule else None
        for submodule in module.modules():
            if isinstance(submodule, Metric):
                submodule.to(self.root_device)
        rank_zero_info(f"PipelineStrategy, {self._microbatches} microbatches:\n{format_stage_rows(self.stage_table())}")

    def _stream_options(self, module: pl.LightningModule) -> StreamOptions | None:
        if self._streaming is None:
            return None
        return stream_options(**self._streaming, chunks=chunk_spec(module, self._chunks))

    @override
    def teardown(self) -> None:
        tell_missed(self.lightning_module, self._scheduled)
        self._close()
        if self.accelerator is not None:
            super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._runner is not None:
            advise_pipeline(exception, self._runner, self._microbatches)

    def _close(self) -> None:
        runner, self._runner, self._scheduled = self._runner, None, None
        if runner is not None:
            runner.close()

    @override
    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_runner"] = state["_scheduled"] = None
        return state

    # ------------------------------------------------------------------ training

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        with self.precision_plugin.train_step_context():
            if self._runner is None:  # before the Trainer's set-up or after its end: an ordinary module
                return module.training_step(*args, **kwargs)
            if not module.automatic_optimization:
                with self.runner.transparent():
                    return module.training_step(*args, **kwargs)
            return self._train(module, self._scheduled or self.runner, args, kwargs)

    # ------------------------------------------------------------------ evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluation("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluation("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluation("predict_step", args, kwargs)

    def _evaluation(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        module = self.lightning_module
        assert module is not None
        function = getattr(module, name)
        if self._evaluate == "whole" or not args:
            with self.runner.transparent():
                return function(*args, **kwargs)
        inputs, sizes = self._split(args[0])
        logs = LogCapture(module, self._weigh(inputs, sizes))

        def step(item: tuple[int, Any]) -> Any:
            with logs.microbatch(item[0]):
                return function(item[1], *args[1:], **kwargs)

        number = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        with logs.active():
            outputs = None
            if name not in self._need_graphs:
                outputs = evaluate_pipelined(self.runner, step, list(enumerate(inputs)), number)
            if outputs is None:
                self._need_graphs.add(name)
                self._tell_once(f"{name} computes gradients, so its microbatches run one after the other")
                outputs = evaluate_whole(self.runner, step, list(enumerate(inputs)))
        logs.replay()
        return join(outputs, sizes)

"""`OffloadStrategy`: one device, weights streamed from RAM."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from ramtorch_core import ChunkRow, ConfigurationError, MicrobatchRunner, Streamer, attach, format_rows
from ramtorch_core.advice import advise
from ramtorch_core.checks import check_options, parse_device
from ramtorch_core.errors import check_choice
from ramtorch_core.tuning import Auto, Wish
from ramtorch_lightning._lightning import (
    Accelerator,
    CheckpointIO,
    Precision,
    TrainerFn,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from ramtorch_lightning.arguments import ChunkSpec, Device
from ramtorch_lightning.chunks import chunk_spec, warn_of_unused_chunks
from ramtorch_lightning.microbatches import SplitFn, WeightFn
from ramtorch_lightning.overlap import StepPath
from ramtorch_lightning.refusals import (
    allow_clipping,
    check_agreement,
    check_optimizer,
    check_plugins,
    check_precision,
    check_single_process,
    devices_were_automatic,
)
from ramtorch_lightning.tuning import BatchTuner
from ramtorch_lightning.waiting import WaitingStrategy
from ramtorch_lightning.writers import keep_average_on_host, may_write_every_batch


class OffloadStrategy(WaitingStrategy):
    """Train and run a model larger than the GPU's memory: weights stay in RAM and stream through a small window.

    Results are those of the same model held on the device, bit for bit, with the same optimizer on the host. The
    LightningModule, its optimizers, callbacks and checkpoints stay as they are.

    Args:
        window: slots on the device, each as large as the largest chunk. 2 let copies overlap compute.
        pin: chunks that stay on the device, with gradients and optimizer state: a count, spread evenly; indices; or
            names. A count beyond the chunks keeps all, with a warning.
        chunks: what streams together. None: `configure_chunks()` of the LightningModule if it has one, else repeated
            blocks and large modules are found. Names or globs, module types, a callable `(name, module) -> bool`, or
            "leaves": every module that owns parameters.
        activations: "checkpoint" recomputes a chunk's activations in backward, "keep" keeps them; "recompute" is
            another name of "checkpoint". If window, pin or activations are "auto", the first batches run with 2, 0 and
            "checkpoint" and are measured; then the fastest plan that fits is chosen between two steps, and logged.
        n_microbatches: into how many parts `training_step` gets each batch; fewer for smaller batches. All of them go
            through a chunk before the next one, so weights cross once per pass. Results are those of
            `accumulate_grad_batches` with batches of that size, but for random operations, which draw other numbers,
            and the last place of weights that several chunks share.
        gradients: "auto" updates each chunk on the host as soon as its gradients have arrived, while backward goes on,
            if nothing looks at gradients; the log says which way was taken, and why. `.grad` of streamed parameters is
            then None. "published" always steps the optimizer over `.grad`, after backward.
        kernel: "auto" updates with a compiled kernel where the optimizer is Adam or AdamW and there is a C compiler;
            its results are those of `fused=True`. "torch" always runs the optimizer's own code.
        updates: which chunks are updated on the device instead, their masters and state streaming through it, where the
            optimizer is Adam or AdamW in float32: "host" none; a share of the streamed parameters, the first chunks; a
            list of chunks' names; "auto" as this machine's measured speeds suggest. Clipping leaves all on the host.
        stream_dtype: "auto" streams float32 weights in autocast's dtype where autocast casts them anyway, with the same
            bits. A dtype, or a mapping from name patterns to dtypes, overrides that.
        resident_below: bytes; smaller tensors keep a copy on the device. 0 streams everything.
        device: where to compute; by default what `Trainer(accelerator=, devices=)` says.
        host_memory: bytes of RAM that may be used; by default what the system reports as available.
        gpu_memory: that "auto" may plan with: bytes, or as in "20GB". By default what is free.
        split_fn: `(batch, n) -> microbatches`, for batches without a common first dimension.
        weight_fn: `microbatch -> weight` in loss and logged means, such as a number of tokens; by default its size.
        accelerator: Lightning's accelerator; by default chosen by the Trainer.
        checkpoint_io: writes and reads checkpoints; by default without a second copy in RAM.
        precision_plugin: Lightning's precision plugin; by default what `Trainer(precision=)` says.

    Raises:
        ConfigurationError: an argument that cannot work; when the Trainer is set up, several devices, a launcher that
            starts several processes, or a precision or optimizer that cannot work with weights in RAM.
        HostMemoryError: too little RAM; nothing has been allocated.
    """

    strategy_name = "offload"

    def __init__(
        self,
        window: int | Auto = 2,
        pin: int | list[int] | list[str] | Auto = 0,
        chunks: ChunkSpec = None,
        activations: Literal["checkpoint", "keep", "recompute", "auto"] = "checkpoint",
        n_microbatches: int = 1,
        gradients: Literal["auto", "published"] = "auto",
        kernel: Literal["auto", "torch"] = "auto",
        updates: Literal["host", "auto"] | float | list[str] = "host",
        stream_dtype: Literal["auto"] | torch.dtype | dict[str, torch.dtype] = "auto",
        resident_below: int = 2**20,
        device: Device = None,
        host_memory: int | None = None,
        gpu_memory: int | str | None = None,
        split_fn: SplitFn | None = None,
        weight_fn: WeightFn | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_plugins(accelerator, checkpoint_io, precision_plugin)
        chosen = parse_device("cpu" if device is None else device)
        super().__init__(
            device=chosen,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._wish = Wish.of(window, pin, activations, gpu_memory)
        first = self._wish.first()
        knobs = first["window"], first["pin"], first["activations"]
        check_options(*knobs, stream_dtype, resident_below, updates, kernel, host_memory)
        check_choice("gradients", gradients, ("auto", "published"))
        if gradients == "published" and updates != "host":
            raise ConfigurationError(f"gradients='published' leaves no updates to updates={updates!r}: leave one out")
        self._configure_microbatches(n_microbatches, split_fn, weight_fn)
        self._device_given = device is not None
        self._gradients = gradients
        self._chunks = chunks
        self._options: dict[str, Any] = {
            **first,
            "kernel": kernel,
            "updates": updates,
            "stream_dtype": stream_dtype,
            "resident_below": resident_below,
            "host_memory": host_memory,
        }
        self._streamer: Streamer | None = None
        self._training = True
        self._steps = 0
        self._logged_table = ""
        self._path: StepPath | None = None
        self._runner: MicrobatchRunner | None = None
        self._tuner: BatchTuner | None = None

    @property
    def streamer(self) -> Streamer:
        """The engine, between the Trainer's set-up and its end.

        Raises:
            RuntimeError: the Trainer has not set the model up.
        """
        if self._streamer is None:
            raise RuntimeError("nothing streams yet: the engine exists from the Trainer's set-up to its end")
        return self._streamer

    def chunk_table(self) -> list[ChunkRow]:
        """One row per chunk: name, parameters, bytes, dtype, placement, and why. Also in the log."""
        return self.streamer.chunk_table()

    # ------------------------------------------------------------------ device and processes

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device given to this strategy, which the Trainer then takes; empty if the Trainer is to choose."""
        devices = [self._root_device] if self._device_given else []
        check_agreement("OffloadStrategy(device=)", devices)
        return devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[Any]) -> None:
        if len(devices) > 1 and not devices_were_automatic():
            raise ConfigurationError(
                f"OffloadStrategy computes on one device, and the Trainer was given {len(devices)}: pass devices=1, or "
                f"use PipelineStrategy(devices=[...]) for several"
            )
        self._root_device = torch.device(devices[0])

    @override
    def setup_environment(self) -> None:
        check_single_process("OffloadStrategy")
        check_precision(self.precision_plugin)
        if self.lightning_module is not None:
            for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
                keep_average_on_host(callback)
        super().setup_environment()

    # ------------------------------------------------------------------ set-up and end

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._detach()
        self._training = trainer.state.fn == TrainerFn.FITTING
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.model = self._setup_model(self.model)
        if self._training:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                check_optimizer(optimizer)
                allow_clipping(optimizer, self.precision_plugin)
        self.setup_precision_plugin()
        assert self.lightning_module is not None
        self.streamer.conservative = may_write_every_batch(self.lightning_module, trainer.callbacks)  # type: ignore[attr-defined]
        if self._training:
            path = StepPath(self.streamer, trainer, self.lightning_module, self.optimizers, self._gradients)
            self._path = path
            if self._microbatches > 1:
                aside = lambda submodule: isinstance(submodule, Metric)
                self._runner = MicrobatchRunner(self.streamer, path.begin_backward, path.end_backward, aside)
        if self._wish.open:
            recut = self._runner.cut_anew if self._runner is not None else lambda: None
            count, optimizers = self._microbatches, self.optimizers
            parts = self._path, optimizers, count, recut, self.root_device
            self._tuner = BatchTuner(self.streamer, self._wish, trainer, *parts)

    @override
    def model_to_device(self) -> None:
        module = self.lightning_module
        assert module is not None
        spec = chunk_spec(module, self._chunks)
        self._streamer = attach(
            module,
            device=self.root_device,
            chunks=spec,
            training=self._training,
            overlapped=self._gradients == "auto",
            **self._options,
        )
        with self.precision_plugin.forward_context():
            self._streamer.prepare()
        self._steps = 0
        table = format_rows(self.chunk_table())
        if table != self._logged_table:
            self._logged_table = table
            rank_zero_info(f"OffloadStrategy on {self.root_device}:\n{table}")
            if not self._streamer.groups:
                rank_zero_warn("nothing streams: every tensor is pinned, shared or smaller than resident_below")

    @override
    def teardown(self) -> None:
        self._detach()
        if self.accelerator is None:
            return
        module = self._lightning_module
        if module is not None and any(parameter.is_meta for parameter in module.parameters()):
            self._lightning_module = None  # moving it to the host would fail, and hide the error that brought us here
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._streamer is not None:
            advise(exception, self._streamer)
            self._streamer.abandon()

    def _detach(self) -> None:
        parts = self._tuner, self._runner, self._path, self._streamer
        self._tuner = self._runner = self._path = self._streamer = None
        for part in parts:
            if part is not None:
                part.close()

    @override
    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_streamer"] = state["_path"] = state["_runner"] = state["_tuner"] = None
        return state

    # ------------------------------------------------------------------ steps

    def _scope(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._streamer is None else self._streamer.scope()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        with self.precision_plugin.train_step_context(), self._scope():
            if self._runner is not None and module.automatic_optimization:
                return self._train(module, self._runner, args, kwargs)
            return module.training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _evaluate(self, name: str, context: AbstractContextManager[None], args: Any, kwargs: Any) -> Any:
        if self._tuner is not None and not self._training:
            self._tuner.batch_begins(0)
        with context, self._scope():
            return getattr(self.lightning_module, name)(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._streamer is not None:
            self._streamer.begin_lending()
        if self._path is not None and self._runner is None:  # else its backward has been
            self._path.begin_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._path is not None:
            self._path.end_backward()
        if self._streamer is not None:
            self._streamer.end_lending()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        with self._path.step(optimizer) if self._path is not None else contextlib.nullcontext():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._streamer is not None:
            self._streamer.refresh()
        return output

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._steps += 1
        if batch_idx == 0:
            self._invalidate()
        if self._steps == 2 and self._streamer is not None:
            warn_of_unused_chunks(self._streamer)
        if self._tuner is not None:
            self._tuner.batch_begins(batch_idx)

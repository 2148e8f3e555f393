"""Streaming without Lightning: `attach` for any module tree, and `OffloadModel` for a list of chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ramtorch_core.checks import ACTIVATIONS, check_list, check_modules, check_not_streamed, check_options
from ramtorch_core.engine.chunks import ChunkSpec, choose_resident, find_chunks
from ramtorch_core.engine.dtypes import StreamDtypes
from ramtorch_core.engine.modules import tensors_in
from ramtorch_core.engine.out_of_memory import advise_streaming, advising
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.update_places import UpdateSpec
from ramtorch_core.errors import ConfigurationError, RamtorchError, shown
from ramtorch_core.memory.device import Device
from ramtorch_core.traces import trace
from ramtorch_core.tuning import Auto, Wish, known_from, tune_lazily


def attach(
    module: nn.Module,
    *,
    device: torch.device | str | int = "cuda",
    chunks: ChunkSpec = None,
    window: int | Auto = 2,
    pin: int | Sequence[int] | Sequence[str] | Auto = 0,
    activations: str = "checkpoint",
    gpu_memory: int | str | None = None,
    example: Any = None,
    stream_dtype: torch.dtype | str | Mapping[str, torch.dtype] = "auto",
    resident_below: int = 1 << 20,
    training: bool = True,
    overlapped: bool = False,
    host_memory: int | None = None,
    kernel: Literal["auto", "torch"] = "auto",
    updates: UpdateSpec = "host",
    poison: bool = False,
) -> Streamer:
    """Stream the weights of any module tree through a small window of device memory.

    The tree stays what it is: the same modules, parameter names and `Parameter` objects, on the host. Call it, backward
    through it and step an optimizer over `module.parameters()` as usual. `close()` on the result detaches.

    Args:
        module: its parameters are on the host, its inputs on `device`. Buffers are moved to `device`.
        device: where to compute; `"cpu"` runs the same code without a GPU.
        chunks: what streams together. None finds repeated blocks and large modules; names or globs, module types,
            modules, a callable `(name, module) -> bool`, or `"leaves"` (every module that owns parameters).
        window: slots on the device, each as large as the largest chunk. With 2 or more, copies overlap compute.
        pin: chunks that stay on the device as ordinary device parameters: a count, spread evenly; indices; or names.
        activations: `"checkpoint"` recomputes a chunk's activations in backward, `"keep"` keeps them. These three may
            be `"auto"`: the fastest plan that fits is chosen; see `ramtorch_core.tuning`.
        gpu_memory: that "auto" may plan with: bytes, or as in `"20GB"`. By default what is free.
        example: one microbatch: a tensor, or a tuple of arguments. With it, "auto" chooses now, by training on it a few
            times to no effect; else after the first steps of an optimizer.
        stream_dtype: `"auto"` streams float32 weights in autocast's dtype where autocast would cast them anyway, with
            the same bits. A dtype, or a mapping from name patterns to dtypes, overrides that under autocast.
        resident_below: bytes; smaller tensors keep a copy on the device. 0 streams everything.
        training: whether gradients will be needed; counted when the host's memory is checked.
        overlapped: whether `updates.overlap` will be used in every step, so that few gradients are on the host at
            a time; counted likewise.
        host_memory: bytes of host memory that may be used; by default what the system reports as available.
        kernel: of `updates.overlap`: `"auto"` uses a compiled kernel for Adam and AdamW where there is a C compiler,
            with the results of torch's fused one; `"torch"` always uses the optimizer's own code.
        updates: which chunks `updates.overlap` steps on the device, with torch's fused kernels there, where they are
            Adam's or AdamW's and in float32: `"host"` none; a share of the streamed parameters, the first chunks; a
            list of chunks' names or globs; or `"auto"`, as measured speeds of the machine suggest. Their masters and
            state stay on the host, page-locked, and stream through a few buffers.
        poison: fill slots with NaN before each copy; proves the ordering of streams in tests.

    Returns:
        The engine: `updates.overlap(optimizer)` around a backward, `scope()` around code that reads parameters outside
        of `module.forward`, `refresh()` and `invalidate()` after writing masters, `chunk_table()`,
        `device_weight_bytes()`, `close()`.

    Raises:
        ConfigurationError: an argument that cannot work, or a parameter that is not on the host.
        TypeError: `updates` is of another type.
        HostMemoryError: too little host memory; nothing has been allocated.
    """
    wish = Wish.of(window, pin, activations, gpu_memory)
    known = wish.first()
    first = known["window"], known["pin"], known["activations"]
    check_options(*first, stream_dtype, resident_below, updates, kernel, host_memory)
    if wish.open and not training and example is None:
        raise ConfigurationError("without training no optimizer's steps tell when to choose: pass example=, a batch")
    check_not_streamed(module)
    found = find_chunks(module, chunks, resident_below=resident_below)
    if wish.open and example is not None:
        options = {"chunks": chunks, "resident_below": resident_below, "host_memory": host_memory}
        known = known_from(module, example, wish, device=device, training=training, **options)
    streamer = Streamer(
        module,
        found,
        device=Device(device),
        window=known["window"],
        resident=choose_resident(known["pin"], [name for name, _ in found]),
        activations=ACTIVATIONS[known["activations"]],
        dtypes=StreamDtypes(stream_dtype),
        resident_below=resident_below,
        training=training,
        overlapped=overlapped,
        host_memory=host_memory,
        kernel=kernel,
        updates=updates,
        poison=poison,
    )
    if wish.open and example is None:
        try:
            tune_lazily(streamer, wish)
        except BaseException:
            streamer.close()
            raise
    return streamer


class OffloadResult:
    """What `OffloadModel.step` returns.

    Attributes:
        output: the last chunk's output, detached.
    """

    def __init__(self, output: Any, loss: Tensor | None) -> None:
        self.output, self._loss = output, loss

    @property
    def loss(self) -> Tensor:
        """The loss, detached.

        Raises:
            RamtorchError: the step was given `grad_outputs`, so there is none.
        """
        if self._loss is None:
            raise RamtorchError("this step backpropagated grad_outputs: it has no loss; pass loss_fn= to get one")
        return self._loss


class OffloadModel(nn.Module):
    """A chain of chunks, each fed with the output of the one before, streamed through a window.

    A tuple is passed on as positional arguments. The model is differentiable: `model(x)` and `loss.backward()` publish
    gradients as usual. `step` runs forward and backward at once and keeps the gradients apart until `flush_grads`, so
    that several steps accumulate. Use it as a context manager, or call `close`.

    `parameters()` and `state_dict()` are those of `nn.Sequential(*chunks)`; the parameters of pinned chunks are on the
    device, so give `torch.optim.AdamW` `fused=True`: torch groups parameters by device.

    Args:
        chunks: modules with their parameters on the host.
        device: where to compute.
        window: slots on the device.
        pin: how many chunks stay on the device, spread evenly.
        pin_layers: indices of the chunks that stay on the device; overrides `pin`.
        keep_activations: True keeps them; False and "checkpoint" recompute them, exactly, dropout included.
        options: further arguments of `attach`; `resident_below` is 0 here, so that every tensor of a chunk streams.

    Raises:
        ConfigurationError: an argument that cannot work.
        HostMemoryError: too little host memory; nothing has been allocated.
    """

    def __init__(
        self,
        chunks: Iterable[nn.Module],
        device: torch.device | str | int = "cuda",
        window: int = 2,
        pin: int = 0,
        pin_layers: Sequence[int] | None = None,
        keep_activations: bool | str = False,
        **options: Any,
    ) -> None:
        super().__init__()
        modules = check_modules("chunks", chunks)
        if not modules:
            raise ConfigurationError("chunks is empty: pass at least one module")
        if not isinstance(keep_activations, bool) and keep_activations != "checkpoint":
            raise ConfigurationError(f"keep_activations={shown(keep_activations)}: use True, False or 'checkpoint'")
        for index, chunk in enumerate(modules):
            self.add_module(str(index), chunk)
        self._count = len(modules)
        distinct = list({id(chunk): chunk for chunk in modules if any(True for _ in chunk.parameters())}.values())
        self._streamer = attach(
            self,
            device=device,
            chunks=distinct,
            window=window,
            pin=pin if pin_layers is None else _pinned(pin_layers, modules, distinct),
            activations="keep" if keep_activations is True else "checkpoint",
            **{"resident_below": 0, **options},
        )

    def forward(self, *inputs: Any) -> Any:
        """The chunks in order: the first gets `inputs`, every other one its predecessor's output."""
        value: Any = inputs
        for index in range(self._count):
            chunk = self.get_submodule(str(index))
            value = chunk(*value) if isinstance(value, tuple) else chunk(value)
        return value

    def step(
        self,
        x: Any,
        targets: Any = None,
        loss_fn: Callable[..., Tensor] | None = None,
        grad_outputs: Any = None,
        profile_path: str | None = None,
    ) -> OffloadResult:
        """One forward and backward; gradients add up out of sight until `flush_grads`.

        If it fails, what earlier steps have left since the last flush is dropped too: the sum may be half formed.

        Args:
            x: the first chunk's input, or a tuple of inputs.
            targets: second argument of `loss_fn`.
            loss_fn: `(output, targets) -> loss`, a scalar; without `targets` it gets the output alone.
            grad_outputs: the gradient of the output instead of a loss: a tensor, a tuple of tensors, or a callable that
                gets the live output and returns them.
            profile_path: write a trace of the step there; see `ramtorch_core.traces.trace`.

        Raises:
            ConfigurationError: both or neither of `loss_fn` and `grad_outputs` are given.
        """
        if (loss_fn is None) == (grad_outputs is None):
            raise ConfigurationError(
                "give step() either loss_fn= (and targets=) or grad_outputs=, not both, not neither"
            )
        private = self._take_device_grads()
        self._streamer.gradients.hold = True
        try:
            with trace(profile_path), torch.enable_grad(), advising(partial(advise_streaming, self._streamer)):
                output = self(*x) if isinstance(x, tuple) else self(x)
                loss = None
                if loss_fn is not None:
                    loss = loss_fn(output) if targets is None else loss_fn(output, targets)
                    loss.backward()
                else:
                    given = grad_outputs(output) if callable(grad_outputs) else grad_outputs
                    _backward(output, given)
        finally:
            self._streamer.gradients.hold = False
            self._keep_device_grads(private)
        return OffloadResult(_detached(output), None if loss is None else loss.detach())

    def flush_grads(self, scale: float = 1.0) -> None:
        """Add the gradients of all steps since the last flush, times `scale`, to `.grad`."""
        self._streamer.gradients.publish(scale)
        with torch.no_grad():
            for parameter, grad in self._device_grads.items():
                grad.mul_(scale)
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        self._device_grads.clear()

    def close(self) -> None:
        """Stop streaming and leave plain modules on the host. Idempotent."""
        self._streamer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engine(self) -> Streamer:
        """The streaming engine, for its tables and counters."""
        return self._streamer

    @property
    def _device_grads(self) -> dict[nn.Parameter, Tensor]:
        grads: dict[nn.Parameter, Tensor] = self.__dict__.setdefault("_held_grads", {})
        return grads

    def _resident(self) -> Iterator[nn.Parameter]:
        for chunk in self._streamer.census.chunks:
            if chunk.resident:
                yield from chunk.parameters

    def _take_device_grads(self) -> dict[nn.Parameter, Tensor | None]:
        """Autograd adds to `.grad` of device parameters itself: give it the held gradients for the length of a step."""
        published = {parameter: parameter.grad for parameter in self._resident()}
        for parameter in published:
            parameter.grad = self._device_grads.get(parameter)
        return published

    def _keep_device_grads(self, published: dict[nn.Parameter, Tensor | None]) -> None:
        for parameter, grad in published.items():
            if parameter.grad is not None:
                self._device_grads[parameter] = parameter.grad
            parameter.grad = grad


def _pinned(layers: Any, modules: Sequence[nn.Module], distinct: Sequence[nn.Module]) -> list[int]:
    """The positions among `distinct` of the chunks that have weights to pin."""
    layers = check_list("pin_layers", layers, "indices")
    for layer in layers:
        if not isinstance(layer, int) or not 0 <= layer < len(modules):
            raise ConfigurationError(f"pin_layers: {shown(layer)} is out of range for {len(modules)} chunks")
    return [position for position, chunk in enumerate(distinct) if any(modules[layer] is chunk for layer in layers)]


def _backward(output: Any, grads: Any) -> None:
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    given = list(tensors_in(grads))
    if len(given) != len(outputs):
        raise ConfigurationError(f"{len(given)} grad_outputs for {len(outputs)} outputs that require a gradient")
    torch.autograd.backward(outputs, given)


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, value)

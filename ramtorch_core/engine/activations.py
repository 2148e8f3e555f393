"""Activation checkpointing that is exact: random states, buffers and keyword arguments included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ramtorch_core.engine.arguments import Arguments, Copies, may_write

ALWAYS_KEPT_BYTES = 1 << 16

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
"""What of torch's global settings contexts around a forward change, by which it takes other dtypes or kernels."""


class BufferSnapshot:
    """The buffers of a module as they were before a forward that changed them.

    A recompute must see what the forward saw, and must not count a second time. Buffers are exchanged, not written, so
    that no version counter moves.

    A write shows in the version counter, but for the running statistics of batch norm, which torch updates without
    counting. So the buffers of its modules, and small ones of any module, always count as changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (owner, name, buffer, buffer._version, buffer.clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        self._changed: list[tuple[nn.Module, str, Tensor]] = []

    def keep_changed(self) -> None:
        """The forward is over: keep the copies of buffers that it wrote or replaced, and drop the others."""
        self._changed = [
            (owner, name, copy)
            for owner, name, buffer, version, copy in self._before
            if owner._buffers.get(name) is not buffer
            or buffer._version != version
            or isinstance(owner, _NormBase)
            or (buffer.is_floating_point() and buffer.nbytes <= ALWAYS_KEPT_BYTES)
        ]
        self._before = []

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Show the module its former buffers, and the present ones again afterwards."""
        present = [(owner, name, owner._buffers[name]) for owner, name, _ in self._changed]
        for owner, name, copy in self._changed:
            owner._buffers[name] = copy.clone()
        try:
            yield
        finally:
            for owner, name, buffer in present:
                owner._buffers[name] = buffer


def _settings() -> list[Any]:
    return [read() for read, _ in _SETTINGS]


@contextlib.contextmanager
def _under(settings: list[Any]) -> Iterator[None]:
    """Inside, torch's settings are these."""
    now = _settings()
    if now == settings:
        yield
        return
    for (_, write), value in zip(_SETTINGS, settings, strict=True):
        write(value)
    try:
        yield
    finally:
        for (_, write), value in zip(_SETTINGS, now, strict=True):
            write(value)


def checkpoint_call(function: Callable[..., Any], arguments: Arguments, *, marker: Tensor | None = None) -> Any:
    """`function(*args, **kwargs)`, whose activations are recomputed in backward, from the arguments as they were.

    What contexts around the forward had changed, such as the default dtype of a precision or the backends of
    `sdpa_kernel`, holds in the recompute too.

    torch saves the random state of those devices that it finds among *positional* tensors, and takes autocast's device
    from them too. So every tensor is passed by position, however deep it is nested and however it came.

    Args:
        marker: an empty tensor on the device whose random state must be saved in any case.

    Raises:
        RamtorchError: it writes an argument in place that cannot be restored.
    """
    again, settings = False, _settings()

    def call(_marker: Tensor | None, *tensors: Tensor) -> Any:
        nonlocal again
        if again:
            again_args, again_kwargs = arguments.again(tensors)
            with _under(settings):
                return function(*again_args, **again_kwargs)
        again = True
        args, kwargs = arguments.take()
        output = function(*args, **kwargs)
        arguments.finish()
        return output

    return checkpoint(call, marker, *arguments.tensors, use_reentrant=False)


def offload_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Mark a region: run `function(*args, **kwargs)` and recompute its activations in backward.

    Use it inside the forward of a model with `activations="keep"` for the parts that are cheap to recompute. Exact with
    dropout, with arguments given by keyword only, and, if `function` is a module, with buffers that its forward changes
    (BatchNorm statistics are updated once) or lists, caches and the like among its arguments
    that it fills. Works on plain models as well.

    Args:
        function: a module or any callable.

    Returns:
        What `function` returns.

    Raises:
        RamtorchError: it writes a tensor among its arguments in place, and not by a module with `inplace=True`.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    copies = may_write(function) if isinstance(function, nn.Module) else Copies.NONE
    arguments = Arguments(f"the marked region {name}", args, kwargs, copies=copies)
    if not isinstance(function, nn.Module):
        return checkpoint_call(function, arguments)
    snapshot = BufferSnapshot(function)
    again = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal again
        if not again:
            again = True
            try:
                return function(*args, **kwargs)
            finally:
                snapshot.keep_changed()
        with snapshot.restored():
            return function(*args, **kwargs)

    return checkpoint_call(run, arguments)

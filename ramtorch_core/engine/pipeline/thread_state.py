"""What a new thread does not inherit from the one that starts it, captured and set up again."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ramtorch_core.memory.device import Device, Stream

__all__ = ["ThreadState", "engine_backward", "outside_autocast"]

engine_backward: Any = torch.autograd.Variable._execution_engine.run_backward
"""What `torch.autograd.backward` calls in the end, after preparing for threads of devices, which play no part here."""

_AUTOCAST_DEVICES = ("cpu", "cuda")
_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


def outside_autocast() -> AbstractContextManager[object]:
    """A backward as it runs after the user's `with torch.autocast`: nothing is cast that the forward did not cast.

    Inside, autograd's products of float32 matrices, as in regions without autocast and in attention with a trained
    bias, would be computed in half precision.
    """
    return _without_autocast() if torch._C._is_any_autocast_enabled() else _NOTHING


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class ThreadState:
    """The state of the calling thread: grad and inference mode, autocast, modes, hooks, context, streams.

    Args:
        devices: the devices whose current streams belong to the state.
    """

    def __init__(self, devices: list[Device]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.compute_threads = torch.get_num_threads()
        self.autocast = _autocast()
        self.function_modes = list(_get_current_function_mode_stack())
        self.dispatch_modes = list(_get_current_dispatch_mode_stack())
        self.saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.streams: list[tuple[Device, Stream | None]] = [(d, d.current_stream()) for d in devices]
        self.context = contextvars.copy_context()

    def run(self, job: Callable[[], None]) -> None:
        """Call `job` in the calling thread under the captured state.

        Autograd stays in the calling thread, so that a backward sees this state too.
        """
        self.context.copy().run(self._run, job)

    def _run(self, job: Callable[[], None]) -> None:
        torch.set_num_threads(self.compute_threads)
        with contextlib.ExitStack() as stack:
            for device, stream in self.streams:
                stack.enter_context(device.on(stream))
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            if torch.is_grad_enabled() != self.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if _autocast() != self.autocast:
                cached, kinds = self.autocast
                for kind, dtype, enabled in kinds:
                    context: Any = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)
                    stack.enter_context(context)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
            for mode in (*self.dispatch_modes, *self.function_modes):
                stack.enter_context(mode)
            job()


def _autocast() -> tuple[bool, list[tuple[str, torch.dtype, bool]]]:
    """Whether autocast keeps what it has cast; per kind of device its dtype, and whether it is enabled."""
    kinds = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _AUTOCAST_DEVICES]
    return torch.is_autocast_cache_enabled(), kinds

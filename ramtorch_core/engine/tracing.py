"""Calls of modules inside `torch.jit.trace`, which TensorBoard uses to draw graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ramtorch_core.engine.lend import Placement
from ramtorch_core.memory.weights import Weight


def trace_call(
    inner: Callable[..., Any], weights: Iterable[Weight], device: torch.device, args: Any, kwargs: Any
) -> Any:
    """`inner(*args, **kwargs)` with every weight on the device at once, because a trace keeps them as its constants."""
    weights = [weight for weight in weights if not any(name in module.__dict__ for module, name in weight.sites)]
    with _paused(), torch.no_grad():
        copies = [weight.parameter.detach().to(device, copy=True) for weight in weights]
        placement = Placement(weights)
        placement.show(copies)
    try:
        return inner(*args, **kwargs)
    finally:
        with _paused():
            placement.hide()


def is_tracing() -> bool:
    """Whether the calling code is being traced."""
    return torch._C._get_tracing_state() is not None


@contextmanager
def _paused() -> Iterator[None]:
    """What happens inside is no part of the trace."""
    state, change = torch._C._get_tracing_state(), torch._C._set_tracing_state  # type: ignore[attr-defined]
    change(None)
    try:
        yield
    finally:
        change(state)

"""One backward pass: begins with the first sign of it, ends with autograd's callback, or with its death after an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ramtorch_core.memory.weights import Weight, WeightGroup


def current_task() -> int:
    """The identifier of the backward that runs in this thread, -1 outside of any."""
    return int(torch._C._current_graph_task_id())


class BackwardTask:
    """A graph task of autograd that this engine takes part in.

    Autograd alone owns it: when the backward fails, autograd drops its callbacks, and `abandon` is called instead of
    `finish`.

    Attributes:
        pending: gradients of groups that were visited several times, summed on the device until the last visit.
    """

    def __init__(self, finish: Callable[[BackwardTask], None], abandon: Callable[[], None]) -> None:
        self._finish, self._abandon = finish, abandon
        self.pending: dict[WeightGroup, dict[Weight, Tensor]] = {}
        self._open = True
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self)

    def __call__(self) -> None:
        """Autograd's final callback."""
        self._open = False
        self._finish(self)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._open = False
            self._abandon()

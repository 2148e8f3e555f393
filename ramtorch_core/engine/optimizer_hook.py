"""Hears of every optimizer's step: fused kernels write weights without counting versions."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """Who wants to know."""

    closed: bool

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""


def tell_of_steps(reference: weakref.ref[Any]) -> RemovableHandle:
    """Call `note_step` of the listener, while it lives and is not closed, after each step of any optimizer."""

    def after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        listener: Listener | None = reference()
        if listener is not None and not listener.closed:
            listener.note_step(optimizer)

    return register_optimizer_step_post_hook(after)

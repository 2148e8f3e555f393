"""The cut between two stages: a tensor arrives without its graph, and its gradient is kept instead of passed on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["Cut", "cross"]


class Cut:
    """One tensor that was brought into a later stage, and, after that stage's backward, its gradient there."""

    __slots__ = ("gradient", "origin", "source")

    def __init__(self, source: Tensor, origin: int) -> None:
        self.source = source
        """The tensor in the stage where it was computed; its graph ends there."""
        self.origin = origin
        """That stage."""
        self.gradient: Tensor | None = None
        """On the device of the later stage; None until its backward, or when the tensor was not used."""


class _Crossing(torch.autograd.Function):
    """Identity whose backward keeps the gradient, in whatever layout it has, and ends the graph.

    The result is no leaf and no view, so user code may modify it in place, as it may the original. It shares memory
    with `value`, and the counter by which autograd notices such modifications.
    """

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, cut: Cut, value: tuple[Tensor]) -> Tensor:
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        return value[0].detach()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.cut.gradient = gradients[0]
        return None, None, None


_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Crossing).apply


def cross(anchor: Tensor, cut: Cut, value: Tensor) -> Tensor:
    """`value` in a graph that ends here; the gradient found for it goes to `cut`.

    `anchor` is any tensor that requires grad: it makes autograd record the call. `value` hides in a tuple from
    autograd, which would follow it into its own graph. Unless a transform of `torch.func` is active, and is refused,
    the preparations for it are left out: they take as long as the call.
    """
    if torch._C._are_functorch_transforms_active():
        return _Crossing.apply(anchor, cut, (value,))  # type: ignore[no-any-return, no-untyped-call]
    if torch.is_grad_enabled():
        return _apply(anchor, cut, (value,))
    with torch.enable_grad():
        return _apply(anchor, cut, (value,))

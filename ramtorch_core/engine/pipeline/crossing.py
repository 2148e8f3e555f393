"""The cut between two stages: a tensor arrives without its graph, and its gradient is kept instead of passed on."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["Crossing", "Cut"]


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


class Crossing(torch.autograd.Function):
    """Identity whose backward keeps the gradient, in whatever layout it has, and ends the graph.

    The result is no leaf and no view, so user code may modify it in place, as it may the original. It shares memory
    with `value`, and the counter by which autograd notices such modifications.
    """

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, cut: Cut, value: Tensor) -> Tensor:
        """`anchor` is any tensor that requires grad: it makes autograd record the call."""
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.cut.gradient = gradients[0]
        return None, None, None

"""From the losses and gradients of microbatches to the loss of a batch whose backward publishes them.

Lightning zeroes gradients between `training_step` and backward. A pipeline has run its backwards by then, so their
gradients stay private until somebody calls backward on the loss that the step returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ramtorch_core.pipeline import StepResult, join
from ramtorch_lightning._lightning import is_overridden, pl

__all__ = ["Share", "drop_gradients", "loss_of", "publishing", "sees_old_gradients", "skips_backward"]


class Share:
    """Each microbatch's part in the loss of the batch, of the accumulated batches, and of the scaled loss."""

    def __init__(self, weights: Sequence[float], batches: int, scale: Tensor | None) -> None:
        self.weights = weights
        self.batches = batches
        self.scale = scale
        self.equal = len(set(weights)) == 1

    def root(self, output: Any, microbatch: int) -> tuple[Tensor, None] | None:
        """The tensor whose backward gives this microbatch's gradients."""
        loss = loss_of(output)
        if loss is None or not self.weights[microbatch]:
            return None
        if self.equal:
            loss = loss / (len(self.weights) * self.batches)
        else:
            loss = loss * (self.weights[microbatch] / sum(self.weights)) / self.batches
        return (loss if self.scale is None else loss * self.scale.to(loss.device)), None

    def incoming(self) -> float | Tensor:
        """The gradient with which the batch's loss is called when nobody scaled it in a way unknown here."""
        return (1.0 if self.scale is None else self.scale) / self.batches


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a training step returned."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    return output if isinstance(output, Tensor) else None


class _Publish(torch.autograd.Function):
    """The loss of the batch: its backward hands out the gradients that the step has computed already."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, publish: Callable[[Tensor], None]) -> Tensor:
        ctx.publish = publish
        return loss.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.publish(gradients[0])
        return None, None, None


def publishing(
    result: StepResult,
    share: Share,
    sizes: Sequence[int],
    watched: bool,
    *,
    gone: bool = False,
) -> Any:
    """What `training_step` returns for the whole batch, with a loss that publishes the gradients in its backward.

    Args:
        gone: gradients were added to `.grad` or taken for updates already, so that there may be none to publish.
    """
    outputs = result.outputs
    present = [m for m, output in enumerate(outputs) if loss_of(output) is not None and share.weights[m]]
    if not present:
        return join(outputs, sizes)
    loss: Tensor = join([loss_of(outputs[m]) for m in present], [share.weights[m] for m in present])

    def publish(incoming: Tensor) -> None:
        factor = incoming / share.incoming() if watched else None
        for parameter, gradient in result.gradients.items():
            if factor is not None:
                gradient = gradient * factor.to(gradient.device, gradient.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    if result.gradients or gone:
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        loss = _Publish.apply(anchor, loss, publish)  # type: ignore[no-untyped-call]
    if not isinstance(outputs[present[0]], Mapping):
        return loss
    extras = [{key: value for key, value in outputs[m].items() if key != "loss"} for m in present]
    return {"loss": loss, **join(extras, [sizes[m] for m in present])}


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether the Trainer runs forwards only (to update batch statistics, for example)."""
    return bool(getattr(trainer.fit_loop.epoch_loop.automatic_optimization, "_skip_backward", False))


def drop_gradients(optimizers: Sequence[Optimizer]) -> None:
    """Free gradients that will be zeroed after the step anyway; there would be two in memory until then."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is Optimizer.zero_grad:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


def sees_old_gradients(trainer: pl.Trainer) -> bool:
    """Whether user code may look at the previous batch's gradients before they are zeroed, or zeroes them itself."""
    names = ("on_before_zero_grad", "optimizer_zero_grad")
    module = trainer.lightning_module
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    hook = names[0]
    return any(is_overridden(name, module) for name in names) or any(
        getattr(type(callback), hook, None) is not getattr(pl.Callback, hook) for callback in callbacks
    )

"""Which path the optimizer takes: overlapped with backward, or over published gradients after it; and who waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from ramtorch_core import Streamer, why_whole
from ramtorch_lightning._lightning import Precision, is_overridden, pl, rank_zero_info

__all__ = ["StepPath", "why_published"]

_OWN_PACKAGES = ("lightning", "pytorch_lightning", "ramtorch_lightning")
_HOOKS_BETWEEN_STEPS = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
_HOOKS_THAT_SEE_GRADIENTS = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)


def why_published(module: pl.LightningModule, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> str | None:
    """Why gradients have to be published as `.grad` before the optimizer steps; None if the step may overlap backward.

    The list is closed. Besides, single parameters with hooks, and those that get gradients from outside of their
    chunk's forward, are always published.
    """
    if not module.automatic_optimization:
        return "optimisation is manual"
    for hook in _HOOKS_THAT_SEE_GRADIENTS:
        if is_overridden(hook, module, pl.LightningModule):
            return f"{type(module).__name__}.{hook} is overridden, and may look at gradients"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hook in vars(callback) or getattr(type(callback), hook, None) is not getattr(pl.Callback, hook, None):
                return f"{type(callback).__name__}.{hook} may look at gradients"
    precision = trainer.precision_plugin
    if type(precision).__module__.partition(".")[0] not in _OWN_PACKAGES:
        return f"{type(precision).__name__} is not Lightning's own, and may look at gradients"
    if getattr(precision, "scaler", None) is not None:
        return "gradients are scaled (precision='16-mixed')"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        return "gradients are clipped by value"
    clip: object = torch.nn.utils.clip_grad_norm_
    if trainer.gradient_clip_val and not str(getattr(clip, "__module__", None)).startswith("torch.nn.utils"):
        return "torch.nn.utils.clip_grad_norm_ was replaced, and what stands there is given gradients"
    if _has_backward_hooks(module):
        names = [name for name, part in module.named_modules() if part._backward_hooks or part._backward_pre_hooks]
        return f"'{names[0] or type(module).__name__}' has backward hooks, which may look at weights"
    return next(filter(None, map(why_whole, optimizers)), None)


def _has_backward_hooks(module: pl.LightningModule) -> bool:
    """Whether any part of the module has; asked before every step, so without names and what makes them distinct."""
    waiting: list[torch.nn.Module | None] = [module]
    for part in waiting:
        if part is not None:
            if part._backward_hooks or part._backward_pre_hooks:
                return True
            if part._modules:
                waiting += part._modules.values()
    return False


class StepPath:
    """How the optimizers of one fit step, until `close`: chosen, and logged with the reason, once.

    Args:
        gradients: "auto" or "published", as given to the strategy.

    Raises:
        HostMemoryError: gradients have to be published, and the host cannot hold them.
    """

    def __init__(
        self,
        streamer: Streamer,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        gradients: str,
    ) -> None:
        self._streamer, self._trainer, self._module = streamer, trainer, module
        self._stepping: Optimizer | None = None  # whose step the backward under way may begin
        self._default_dtype = torch.get_default_dtype()  # around that step
        self._waiting: _WaitForUpdates | None = None
        self._callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._same_norm = gradients == "published"  # as of the run that overlaps, which this one may be compared with
        reason = "gradients='published'" if gradients == "published" else why_published(module, trainer, optimizers)
        self.overlaps = reason is None and bool(streamer.groups)
        updates = streamer.updates
        if self.overlaps:
            several = _accumulates(trainer)
            if trainer.gradient_clip_val or several:  # gradients of the whole model wait for the last one
                streamer.check_host_memory(overlapped=not several, held=not several)
            between = any(is_overridden(hook, module, pl.LightningModule) for hook in _HOOKS_BETWEEN_STEPS)
            updates.run_on = not streamer.conservative and not between
            self._waiting = _WaitForUpdates(updates.wait)
            until = ", and while the next forward goes on" if updates.run_on else ""
            how = updates.describe()
            if trainer.gradient_clip_val:
                how += "; with clipping most wait for the norm of all gradients, and all do after a scaled step"
            rank_zero_info(f"OffloadStrategy: chunks are updated while backward goes on{until}; {how}")
        else:
            self._publish(reason)

    def _publish(self, reason: str | None) -> None:
        self.overlaps = False
        self._streamer.check_host_memory(overlapped=False)
        if self._streamer.groups:
            rank_zero_info(f"OffloadStrategy: optimizers step after backward, over published gradients: {reason}")

    @contextlib.contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the Trainer's optimizer step, backward included."""
        usual = self._trainer.callbacks is self._callbacks  # type: ignore[attr-defined]  # no tuner's for a while
        if self._waiting is not None and usual and self._waiting not in self._callbacks:
            self._callbacks.insert(0, self._waiting)  # not before: hooks of the set-up see those that were given
        precision: Any = self._trainer.precision_plugin
        replaces = (self.overlaps or self._same_norm) and (
            type(precision).clip_grad_by_norm is Precision.clip_grad_by_norm
        )
        if replaces:
            precision.clip_grad_by_norm = self._clip
        self._stepping, self._default_dtype = optimizer, torch.get_default_dtype()
        try:
            yield
        finally:
            self._stepping = None
            if replaces:
                del precision.clip_grad_by_norm  # leaves the class's own

    def begin_backward(self) -> None:
        """The backward begins after which the optimizer steps, if one is to."""
        if not self.overlaps or self._stepping is None:
            return
        reason = why_published(self._module, self._trainer, [self._stepping])  # hooks may have come since the set-up
        if reason is None:
            inside = torch.get_default_dtype()  # of the precision's context, if microbatches run their own backward
            torch.set_default_dtype(self._default_dtype)
            try:
                self._streamer.updates.begin(self._stepping, hold=bool(self._trainer.gradient_clip_val))
            finally:
                torch.set_default_dtype(inside)
        else:
            self._publish(reason)

    def end_backward(self) -> None:
        """That backward is over."""
        self._streamer.updates.end()

    def close(self) -> None:
        """Leave the Trainer as it was."""
        self._callbacks[:] = [callback for callback in self._callbacks if callback is not self._waiting]

    def _clip(self, optimizer: Optimizer, max_norm: float) -> None:
        self._streamer.updates.clip(self._trainer.precision_plugin.main_params(optimizer), max_norm)


def _accumulates(trainer: pl.Trainer) -> bool:
    """Whether optimizers step over the gradients of several batches, now or in a later epoch."""
    schedulers = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
    ]
    return trainer.accumulate_grad_batches > 1 or any(each.going_to_accumulate_grad_batches() for each in schedulers)


class _WaitForUpdates(pl.Callback):
    """Goes before all other callbacks: hooks that run now and then see finished updates.

    Where hooks that run after every batch may read weights, the optimizer's step waits.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def __getstate__(self) -> dict[str, Any]:
        return {"_wait": _nothing}  # a copy of the Trainer's callbacks has no engine to wait for

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self._wait()

    @override
    def on_train_end(self, *_: Any) -> None:
        self._wait()

    @override
    def on_validation_start(self, *_: Any) -> None:
        self._wait()

    @override
    def on_save_checkpoint(self, *_: Any) -> None:
        self._wait()

    @override
    def on_exception(self, *_: Any) -> None:
        with contextlib.suppress(BaseException):  # the first error is the one to report
            self._wait()


def _nothing() -> None:
    pass

"""Which path the optimizer takes: overlapped with backward, or over published gradients after it; and who waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from ramtorch_core import Streamer, why_whole
from ramtorch_lightning._lightning import is_overridden, pl, rank_zero_info

__all__ = ["StepPath", "why_published"]

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
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "gradients are scaled (precision='16-mixed')"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        return "gradients are clipped by value"
    return next(filter(None, map(why_whole, optimizers)), None)


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
        self._streamer, self._trainer = streamer, trainer
        self._stepping: Optimizer | None = None  # whose step the backward under way may begin
        self._waiting: pl.Callback | None = None
        reason = "gradients='published'" if gradients == "published" else why_published(module, trainer, optimizers)
        self.overlaps = reason is None and bool(streamer.groups)
        updates = streamer.updates
        if self.overlaps:
            updates.run_on = not streamer.conservative
            self._waiting = _WaitForUpdates(updates.wait)
            trainer.callbacks.insert(0, self._waiting)  # type: ignore[attr-defined]
            until = ", and while the next forward goes on" if updates.run_on else ""
            rank_zero_info(f"OffloadStrategy: chunks are updated while backward goes on{until}; {updates.describe()}")
        else:
            streamer.check_host_memory(overlapped=False)
            if streamer.groups:
                rank_zero_info(f"OffloadStrategy: optimizers step after backward, over published gradients: {reason}")

    @contextlib.contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the Trainer's optimizer step, backward included."""
        precision: Any = self._trainer.precision_plugin
        precision.clip_grad_by_norm = self._clip
        self._stepping = optimizer
        try:
            yield
        finally:
            self._stepping = None
            del precision.clip_grad_by_norm  # leaves the class's own

    def begin_backward(self) -> None:
        """The backward begins after which the optimizer steps, if one is to."""
        if self.overlaps and self._stepping is not None:
            self._streamer.updates.begin(self._stepping, hold=bool(self._trainer.gradient_clip_val))

    def end_backward(self) -> None:
        """That backward is over."""
        self._streamer.updates.end()

    def close(self) -> None:
        """Leave the Trainer as it was."""
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [callback for callback in callbacks if callback is not self._waiting]

    def _clip(self, optimizer: Optimizer, max_norm: float) -> None:
        self._streamer.updates.clip(self._trainer.precision_plugin.main_params(optimizer), max_norm)


class _WaitForUpdates(pl.Callback):
    """Goes before all other callbacks: hooks that run now and then see finished updates.

    Where hooks that run after every batch may read weights, the optimizer's step waits.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

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

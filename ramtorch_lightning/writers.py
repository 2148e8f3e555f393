"""Which code of a user may write weights in ways that leave no trace, that is, through `.data`.

The engine sees ordinary writes by their version counters, and most others by sampling the values. Where code runs that
may clamp a few elements through `.data` after every batch, every shadow has to be cast again before every step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ramtorch_lightning._lightning import is_overridden, pl

_HOOKS_PER_BATCH = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)

_WRITING_CALLBACKS = {"WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging", "ModelPruning"}
_LISTENING_CALLBACKS = {"LambdaCallback"}


def may_write_every_batch(module: pl.LightningModule, callbacks: Iterable[pl.Callback]) -> bool:
    """Whether user code other than `training_step` runs between two batches.

    True for manual optimisation, for an overridden hook that runs per batch, and for callbacks that are not
    Lightning's own, or that write weights. Hooks that run per epoch or around validation are dealt with apart.
    """
    if not module.automatic_optimization or any(
        is_overridden(hook, module, pl.LightningModule) for hook in _HOOKS_PER_BATCH
    ):
        return True
    return any(_may_write(callback) for callback in callbacks)


def _may_write(callback: pl.Callback) -> bool:
    kind = type(callback)
    own = kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "ramtorch_lightning")
    names = {base.__name__ for base in kind.__mro__}
    return not own or bool(names & (_WRITING_CALLBACKS | _LISTENING_CALLBACKS))


def keep_average_on_host(callback: pl.Callback) -> None:
    """Let weight averaging build its second model where the weights are, on the host, unless it was told where.

    By default it takes the module's device, which would then have to hold the whole model.
    """
    averages = any(base.__name__ == "WeightAveraging" for base in type(callback).__mro__)
    if averages and getattr(callback, "_device", "unknown") is None:
        callback._device = torch.device("cpu")  # type: ignore[attr-defined]

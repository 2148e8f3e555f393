"""A batch in several microbatches: `training_step` runs once for each, and the batch's loss publishes the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ramtorch_core import ConfigurationError
from ramtorch_core.errors import check_function, shown
from ramtorch_core.pipeline import StepResult, batch_size, sizes_of, split
from ramtorch_lightning._lightning import is_overridden, pl, rank_zero_warn
from ramtorch_lightning.base import HostStrategy
from ramtorch_lightning.logs import LogCapture
from ramtorch_lightning.publishing import Share, drop_gradients, publishing, sees_old_gradients, skips_backward

__all__ = ["MicrobatchedStrategy", "Runner", "SplitFn", "WeightFn"]

SplitFn = Callable[[Any, int], Sequence[Any]]
"""(batch, n) -> microbatches."""

WeightFn = Callable[[Any], float]
"""microbatch -> its share in the loss of its batch, relative to the others'."""


class Runner(Protocol):
    """Who runs the microbatches of a step."""

    def train(
        self,
        function: Callable[[Any], Any],
        inputs: Sequence[Any],
        root: Any,
        *,
        accumulate: bool = False,
        step: int = 0,
    ) -> StepResult:
        """Forward and backward of all microbatches."""

    def evaluate(self, function: Callable[[Any], Any], inputs: Sequence[Any], *, step: int = 0) -> list[Any]:
        """The outputs of `function` for all microbatches, without backward."""


class MicrobatchedStrategy(HostStrategy):
    """Splits batches, and puts losses and logs together again."""

    def _configure_microbatches(self, count: int, split_fn: SplitFn | None, weight_fn: WeightFn | None) -> None:
        if type(count) is not int or count < 1:
            raise ConfigurationError(f"n_microbatches={shown(count)}: at least 1 is needed")
        if split_fn is not None:
            check_function("split_fn", split_fn, "(batch, n) -> list of microbatches")
        if weight_fn is not None:
            check_function("weight_fn", weight_fn, "microbatch -> weight")
        self._microbatches, self._split_fn, self._weight_fn = count, split_fn, weight_fn
        self._told: set[str] = set()

    def _train(self, module: pl.LightningModule, runner: Runner, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One batch through `training_step`, in microbatches; its loss publishes the gradients in its backward."""
        trainer = module.trainer
        inputs, sizes = self._split(args[0])
        weights = self._weigh(inputs, sizes)
        logs = LogCapture(module, weights)

        def step(item: tuple[int, Any]) -> Any:
            with logs.microbatch(item[0]):
                return module.training_step(item[1], *args[1:], **kwargs)

        share = Share(weights, trainer.accumulate_grad_batches, self._loss_scale())
        watched = is_overridden("backward", module)  # the user's own backward may scale the loss
        first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        if first and not sees_old_gradients(trainer):
            drop_gradients(self.optimizers)
        accumulate = not (first or watched)
        with logs.active():
            if skips_backward(trainer):
                outputs = runner.evaluate(step, list(enumerate(inputs)), step=number)
                result, gone = StepResult(outputs, {}), False
            else:
                try:
                    result = runner.train(step, list(enumerate(inputs)), share.root, accumulate=accumulate, step=number)
                except RuntimeError as error:
                    _explain(error)
                    raise
                gone = accumulate or self._takes_gradients()
        logs.replay()
        return publishing(result, share, sizes, watched, gone=gone)

    def _takes_gradients(self) -> bool:
        """Whether gradients of the last backward were taken for updates while it went on."""
        return False

    def _loss_scale(self) -> Tensor | None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is None:
            return None
        scale: Tensor = scaler.scale(torch.ones((), device=self.root_device))
        return scale

    def _split(self, batch: Any) -> tuple[list[Any], list[int]]:
        """The microbatches of `batch`, and their sizes."""
        if self._split_fn is not None:
            given: Any = self._split_fn(batch, self._microbatches)
            parts = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Tensor) else []
            if not parts:
                raise ConfigurationError(f"split_fn returned {shown(given)}: a list of microbatches is needed")
            sizes = [size if isinstance(size := batch_size(part), int) else 1 for part in parts]
            return parts, sizes
        size = batch_size(batch)
        if isinstance(size, str) or size == 0:
            if self._microbatches > 1:
                self._tell_once(
                    f"a batch runs as one microbatch, without overlap: {size or 'it is empty'}. Pass "
                    f"{type(self).__name__}(split_fn=...), a function (batch, n) -> list of microbatches."
                )
            return [batch], [1]
        sizes = sizes_of(size, self._microbatches)
        return (split(batch, sizes) if len(sizes) > 1 else [batch]), sizes

    def _weigh(self, parts: Sequence[Any], sizes: Sequence[int]) -> Sequence[float]:
        """The shares of the microbatches in the loss and in means, relative to each other."""
        if self._weight_fn is None or len(parts) == 1:
            return sizes
        given: list[Any] = [self._weight_fn(part) for part in parts]
        try:
            weights = [float(weight) for weight in given]
        except (TypeError, ValueError, RuntimeError):  # the last for a tensor of several elements
            weights = [-1.0]
        if not all(0 <= weight < float("inf") for weight in weights):
            raise ConfigurationError(f"weight_fn returned {shown(given)}: finite numbers of at least 0 are needed")
        return weights if any(weights) else sizes

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            rank_zero_warn(message)


def _explain(error: RuntimeError) -> None:
    """Add the cause and the remedy to torch's complaint about a graph that ends too early."""
    if "appears to not have been used in the graph" in str(error) and "(ramtorch:" not in str(error):
        error.args = (
            f"{error}\n(ramtorch: the graph of a microbatch ends where the next chunk or stage begins, so its "
            f"training_step cannot take gradients through the model. Use OffloadStrategy(n_microbatches=1), or manual "
            f"optimization.)",
            *error.args[1:],
        )

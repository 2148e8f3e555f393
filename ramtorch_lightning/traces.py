"""A callback that writes traces."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from os import PathLike
from typing import Any

from typing_extensions import override

from ramtorch_core import ConfigurationError
from ramtorch_core.traces import trace
from ramtorch_lightning._lightning import pl
from ramtorch_lightning.offload import OffloadStrategy

__all__ = ["TraceCallback"]


class TraceCallback(pl.Callback):
    """Writes a trace of some training batches for Chrome and Perfetto.

    Visits, transfers, gradients, updates and pipeline ops are named as in the simulators; see `ramtorch_core.traces`.

    Args:
        path: a file; `.gz` at the end compresses it.
        steps: batches, counted from the start of training, without gaps. The first ones of a streamed model are watched
            and learned, so they look different.

    Raises:
        ConfigurationError: no step, or steps with gaps.
    """

    def __init__(self, path: str | PathLike[str], steps: Sequence[int] = (4, 5)) -> None:
        self._path, self._steps = path, sorted(steps)
        if not self._steps or self._steps != list(range(self._steps[0], self._steps[-1] + 1)):
            raise ConfigurationError(f"steps={list(steps)}: give at least one, and those in between")
        self._seen = 0
        self._under_way: contextlib.AbstractContextManager[None] | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seen = 0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._seen == self._steps[0]:
            self._under_way = trace(self._path)
            self._under_way.__enter__()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._seen == self._steps[-1]:
            self._finish(trainer)
        self._seen += 1

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.__exit__(type(exception), exception, exception.__traceback__)

    def _finish(self, trainer: pl.Trainer) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            if isinstance(trainer.strategy, OffloadStrategy):
                trainer.strategy.streamer.updates.wait()  # the trace has the steps' updates whole
            under_way.__exit__(None, None, None)

"""A callback that writes traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

from typing_extensions import override

from ramtorch_core import ConfigurationError
from ramtorch_core.errors import check_count, shown
from ramtorch_core.traces import check_path, trace
from ramtorch_lightning._lightning import pl, rank_zero_warn
from ramtorch_lightning.offload import OffloadStrategy

__all__ = ["TraceCallback"]


class TraceCallback(pl.Callback):
    """Writes a trace of some training batches for Chrome and Perfetto.

    Visits, transfers, gradients, updates, pipeline ops and waits are named as in the simulators; see
    `ramtorch_core.traces`. Warns if training ends before the last of these batches.

    Args:
        path: a file; `.gz` at the end compresses it. One that is there is overwritten.
        steps: batches, counted from 0 where `Trainer.fit` begins, without gaps. The first ones of a streamed model are
            watched and learned, so they look different.

    Raises:
        ConfigurationError: steps that are no list of whole numbers from 0, none, or some with gaps; a path that cannot
            be a file; at the start of training, a Trainer with torch's profiler, or another callback of this kind with
            some of these batches.
    """

    def __init__(self, path: str | PathLike[str], steps: Sequence[int] = (4, 5)) -> None:
        self._path, self._steps = check_path(path), _steps(steps)
        self._seen = 0
        self._under_way: contextlib.AbstractContextManager[None] | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(profiler, pl.profilers.PyTorchProfiler):
            raise ConfigurationError(
                "TraceCallback and Trainer(profiler='pytorch') are both torch's profiler, which runs once at a time: "
                "leave one out"
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, TraceCallback) and other is not self and {*self._steps} & {*other._steps}:
                raise ConfigurationError(
                    f"two TraceCallbacks, with steps={self._steps} and steps={other._steps}, overlap, and torch's "
                    f"profiler runs once at a time: give them other steps, or leave one out"
                )
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
        if self._seen <= self._steps[-1]:
            written = "has only those before" if self._under_way is not None else "was not written"
            asked = f"steps={self._steps}, counted from 0"
            rank_zero_warn(f"training ended after {self._seen} batches: the trace of {asked}, {written}: {self._path}")
        self._finish(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.__exit__(type(exception), exception, exception.__traceback__)

    def _finish(self, trainer: pl.Trainer) -> None:
        with contextlib.ExitStack() as stack:
            if self._under_way is not None:
                stack.push(self._under_way)
                self._under_way = None
                if isinstance(trainer.strategy, OffloadStrategy):
                    trainer.strategy.streamer.updates.wait()  # the trace has the steps' updates whole


def _steps(given: object) -> list[int]:
    """In ascending order."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        example = given if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else 4
        raise ConfigurationError(f"steps={shown(given)}: give a list of batches, such as [{example}]")
    steps = sorted(check_count("steps", step, 0) for step in given)
    if not steps or steps != list(range(steps[0], steps[-1] + 1)):
        raise ConfigurationError(f"steps={steps}: give at least one, and those in between")
    return steps

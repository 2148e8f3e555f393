"""When a Trainer's first batches have been measured: the knobs that are "auto" are chosen between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from ramtorch_core import Streamer
from ramtorch_core.prediction import Optimizer as Where
from ramtorch_core.prediction import StreamingPlan, rates_of
from ramtorch_core.schedules import ScheduledRunner
from ramtorch_core.tuning import TIMED, WARM_UP, Order, Tuner, Wish
from ramtorch_lightning._lightning import TrainerFn, pl, rank_zero_info, rank_zero_warn
from ramtorch_lightning.overlap import StepPath

__all__ = ["BatchTuner", "rates_of", "tell_missed"]


class BatchTuner:
    """Tells a `Tuner` when a step is over, in units of the Trainer's batches.

    Args:
        path: how optimizers step; None outside of fit.
        optimizers: whose state follows parameters that move.
        microbatches: into which each batch is cut.
        changed: called when other chunks stream than before.
        device: whose rates are taken, measured if this machine is not known.
    """

    def __init__(
        self,
        streamer: Streamer,
        wish: Wish,
        trainer: pl.Trainer,
        path: StepPath | None,
        optimizers: Sequence[Optimizer],
        microbatches: int,
        changed: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._trainer, self._path, self._optimizers = trainer, path, optimizers
        self._streamer, self._microbatches = streamer, microbatches
        self._begun = False
        self.tuner = Tuner(
            streamer,
            wish,
            rates_of(device),
            base=self._base,
            changed=changed,
            say=_say,
        )

    def batch_begins(self, batch_idx: int) -> None:
        """The batch before, if there was one, is over."""
        whole = self._path is None or batch_idx % self._trainer.accumulate_grad_batches == 0
        if whole and self._begun:
            self.tuner.between_steps(self._optimizers)
        self._begun = True

    def close(self) -> None:
        """Measure no more; warns where training ends before the moment of choice. Idempotent."""
        if self._path is not None and not self.tuner.done and not self._trainer.interrupted:
            _say(f"training ended before what is 'auto' was chosen: that takes more than {WARM_UP + TIMED} steps", True)
        self.tuner.close()

    def _base(self) -> StreamingPlan:
        if self._path is None:
            return StreamingPlan(optimizer=Where.NONE, train=False)
        runs_on = Where.OVERLAPPED if self._streamer.updates.run_on else Where.JOINED
        microbatches, batches = self._microbatches, self._trainer.accumulate_grad_batches
        return StreamingPlan(
            microbatches=microbatches,
            batches=batches,
            order=Order.of(microbatches, batches),
            optimizer=runs_on if self._path.overlaps else Where.PUBLISHED,
            recast=self._streamer.conservative,
            clip=bool(self._trainer.gradient_clip_val),
        )


def tell_missed(module: pl.LightningModule | None, scheduled: ScheduledRunner | None) -> None:
    """Warn where a fit was too short for a pipeline's schedule="auto" to be chosen."""
    if module is None or scheduled is None or not module.automatic_optimization:
        return
    trainer, missed = module.trainer, scheduled.auto.missed()
    if missed is not None and trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted:
        rank_zero_warn(f"PipelineStrategy: {missed}")


def _say(message: str, warns: bool) -> None:
    (rank_zero_warn if warns else rank_zero_info)(f"OffloadStrategy: {message}")

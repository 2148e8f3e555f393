"""Callbacks that watch the engines, for loggers and the progress bar.

They look at counters and at moments of the device's streams that have come, so they never wait for the device; and they
neither read weights nor gradients, so updates go on overlapping with backward and with the next forward.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from ramtorch_core import ConfigurationError, Streamer
from ramtorch_core.errors import check_count, check_function
from ramtorch_core.pipeline import batch_size
from ramtorch_core.traces import FOR_GRADIENTS, FOR_TRANSFER, FOR_UPDATE, Kind, Listener, Mark, Range
from ramtorch_lightning._lightning import pl, rank_zero_warn
from ramtorch_lightning.figures import Crossed, PipelineTimes, resident_bytes
from ramtorch_lightning.offload import OffloadStrategy
from ramtorch_lightning.pipeline import PipelineStrategy

__all__ = ["OffloadMonitor", "PipelineMonitor"]

TIMED_ONE_IN = 20
"""Steps."""


class _Monitor(pl.Callback):
    """What both monitors share: the clock, batches and samples, what crosses the bus, and where figures go.

    The clock runs from the beginning of a batch to the end of the last one before validation or the end of an epoch,
    with the updates that are waited for then, and with loading data but for the first batch. Ranges are timed in one of
    `TIMED_ONE_IN` steps, or more often where figures are shown more often. It is the one before the last, so that the
    device has come to its end when figures are shown.
    """

    prefix = ""
    watches: type[Any]  # the strategy

    def __init__(
        self,
        every_n_steps: int | None = None,
        progress_bar: bool = False,
        tokens: Callable[[Any], int] | None = None,
    ) -> None:
        if every_n_steps is not None:
            check_count("every_n_steps", every_n_steps)
        if tokens is not None:
            check_function("tokens", tokens, "from a batch to its number of tokens")
        self._every, self._progress_bar, self._tokens = every_n_steps, progress_bar, tokens
        self._interval, self._logs = 1, False
        self._timing = False  # this step
        self._since: float | None = None  # while the clock runs
        self._listeners: list[Listener] = []
        self._close()

    def _forget(self) -> None:
        """Begin to count anew."""
        self._crossed.forget()
        self._seconds, self._batches, self._samples, self._tokens_seen = 0.0, 0, 0, 0
        self._timed_seconds, self._timed_batches = 0.0, 0

    def _listen(self, trainer: pl.Trainer) -> list[Listener]:
        """Listen to the strategy's devices."""
        raise NotImplementedError

    def _streamers(self, trainer: pl.Trainer) -> list[Streamer]:
        """The strategy's streaming engines."""
        raise NotImplementedError

    def _collect(self, device: int, ended: list[Range]) -> None:
        """Take ranges of a device."""
        raise NotImplementedError

    def _step_over(self, trainer: pl.Trainer) -> None:
        """A step is over; ranges were collected if they had ended."""

    def _figures(self, trainer: pl.Trainer) -> dict[str, float]:
        """The figures of the batches since `_forget`; what is timed is of those that were."""
        raise NotImplementedError

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        if not isinstance(trainer.strategy, self.watches):
            raise ConfigurationError(
                f"{type(self).__name__} watches {self.watches.__name__}, but the Trainer has "
                f"{type(trainer.strategy).__name__}: leave it out"
            )
        every: int = self._every or trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._interval = every or 1  # as in Lightning, 0 keeps figures from loggers, and not from the progress bar
        self._logs = bool(every and trainer.loggers)
        if self._logs or self._progress_bar:
            self._listeners = self._listen(trainer)
            self._time(False)
        elif every:
            rank_zero_warn(f"{type(self).__name__} shows nothing: there is no logger, and progress_bar=False")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._listeners:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._time((step + 2) % min(self._interval, TIMED_ONE_IN) == 0)
        if self._since is None:
            self._crossed.skip(self._streamers(trainer))
            self._since = time.perf_counter()

    def _time(self, timing: bool) -> None:
        """Listen, or do not."""
        self._timing = timing
        for listener in self._listeners:
            (listener.reopen if timing else listener.close)()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._since is None or batch is None:
            return
        self._since = self._take(trainer, self._since)
        self._batches += 1
        self._timed_batches += self._timing
        size = batch_size(batch)
        self._samples += size if isinstance(size, int) else 0
        self._tokens_seen += 0 if self._tokens is None else self._tokens(batch)
        loop = trainer.fit_loop.epoch_loop
        if loop._should_accumulate():
            return
        self._step_over(trainer)
        step = loop._batches_that_stepped
        if (step + 1) % self._interval == 0 or trainer.should_stop:
            self._show(trainer, pl_module, step)
            self._forget()

    def _take(self, trainer: pl.Trainer, since: float) -> float:
        """Count what has happened by now; returns when that is."""
        now = time.perf_counter()
        self._seconds += now - since
        self._timed_seconds += (now - since) * self._timing
        self._crossed.count(self._streamers(trainer))
        for device, listener in enumerate(self._listeners):
            self._collect(device, listener.collect())
        return now

    def _show(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int) -> None:
        figures = self._figures(trainer) | {"seconds_per_batch": self._seconds / self._batches}
        if self._samples:
            figures["samples_per_second"] = self._samples / self._seconds
        if self._tokens is not None:
            figures["tokens_per_second"] = float(self._tokens_seen) / self._seconds
        host = resident_bytes()
        if host is not None:
            figures["host_gb"] = host / 1e9
        named = {f"{self.prefix}/{name}": value for name, value in figures.items()}
        for logger in trainer.loggers if self._logs else ():
            logger.log_metrics(dict(named), step=step)
        if self._progress_bar:
            pl_module.log_dict(named, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)

    def _pause(self, trainer: pl.Trainer) -> None:
        """Stop the clock until the next batch begins."""
        if self._since is not None:
            self._take(trainer, self._since)
            self._since = None
            self._time(False)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        self._time(False)
        self._listeners, self._since, self._crossed = [], None, Crossed()
        self._forget()


class OffloadMonitor(_Monitor):
    """Logs what `OffloadStrategy` does, every so many steps, as means over them, or over those of them that are timed:
    one of twenty, or more where figures come more often.

    - `stall_percent` of the time in which the device waits, and its parts: `transfer_stall_percent` (for weights),
      `gradient_stall_percent` (for gradients to leave) and `update_stall_percent` (for the optimizer on the host)
    - `h2d_gb_per_s`, `d2h_gb_per_s`: 10^9 bytes of weights and of gradients that cross per second; `h2d_busy_percent`,
      `d2h_busy_percent`: how much of the time that takes
    - `update_seconds`: of the optimizer on the host, or from its first byte to its last where the device makes it, per
      batch
    - `device_peak_gb`: the most memory that tensors took on the device; `host_gb`: what the process takes of the host's
    - `seconds_per_batch`, `samples_per_second`, and with `tokens` also `tokens_per_second`: without validation, what
      happens between epochs, and loading the first batch after them

    Args:
        every_n_steps: how often; by default the Trainer's `log_every_n_steps`, where 0 keeps figures from loggers.
            Batches that accumulate gradients are parts of one step.
        progress_bar: also show them there.
        tokens: how many tokens a batch has; a tensor on the device is waited for when figures are shown.

    Raises:
        ConfigurationError: at the start of training, with another strategy.
    """

    prefix = "offload"
    watches = OffloadStrategy

    @override
    def _forget(self) -> None:
        super()._forget()
        self._spent: defaultdict[str, float] = defaultdict(float)

    @override
    def _listen(self, trainer: pl.Trainer) -> list[Listener]:
        self._last_wait: Range | None = None
        self._overlaps = False
        self._tails: list[tuple[Range, Mark]] = []
        strategy: Any = trainer.strategy
        return [strategy.streamer.device.ranges.listen((Kind.STALL, Kind.TRANSFER, Kind.GRADIENT, Kind.UPDATE))]

    @override
    def _streamers(self, trainer: pl.Trainer) -> list[Streamer]:
        strategy: Any = trainer.strategy
        return [strategy.streamer]

    @override
    def _collect(self, device: int, ended: list[Range]) -> None:
        for each in ended:
            self._spent[f"stall {each.what}" if each.kind is Kind.STALL else each.kind.value] += each.seconds
            self._overlaps |= each.kind is Kind.UPDATE
            if each.kind is Kind.STALL and each.what == FOR_GRADIENTS:
                self._last_wait = each

    @override
    def _step_over(self, trainer: pl.Trainer) -> None:
        if self._timing and self._last_wait is not None and not self._overlaps:
            # The optimizer has stepped over published gradients; before, the host waited for the last of them.
            (streamer,) = self._streamers(trainer)
            self._tails.append((self._last_wait, streamer.device.mark()))
        self._last_wait = None

    @override
    def _figures(self, trainer: pl.Trainer) -> dict[str, float]:
        (streamer,), spent = self._streamers(trainer), self._spent
        come = [(wait, mark) for wait, mark in self._tails if mark.query()]
        self._tails = [each for each in self._tails if each not in come]
        optimizer = sum(mark.seconds_since(wait.end) for wait, mark in come)
        waits = {
            "transfer": spent[f"stall {FOR_TRANSFER}"],
            "gradient": spent[f"stall {FOR_GRADIENTS}"],
            "update": spent[f"stall {FOR_UPDATE}"] + optimizer,
        }
        figures = self._crossed.rates(self._seconds)
        if self._timed_batches:
            percent = 100 / self._timed_seconds
            figures["stall_percent"] = sum(waits.values()) * percent
            figures |= {f"{name}_stall_percent": seconds * percent for name, seconds in waits.items()}
            for way, kind in (("h2d", Kind.TRANSFER), ("d2h", Kind.GRADIENT)):
                figures[f"{way}_busy_percent"] = spent[kind.value] * percent
            figures["update_seconds"] = (spent[Kind.UPDATE.value] + optimizer) / self._timed_batches
        peak = streamer.device.peak_bytes()
        return figures if peak is None else figures | {"device_peak_gb": peak / 1e9}


class PipelineMonitor(_Monitor):
    """Logs what `PipelineStrategy` does, every so many steps, as means over them, or over those of them that are timed:
    one of twenty, or more where figures come more often.

    - `bubble_percent` of the devices' time between a batch's first op and the first device's last one, in which no op
      runs or an op waits for another stage; `device_0_busy_percent` and so on: the part in which one computes
    - with `window=` also `stall_percent`: the part, of all devices, in which ops wait for weights, or for gradients to
      leave. It, the bubbles and the mean of the busy parts make up 100
    - with `window=` also `h2d_gb_per_s`, `d2h_gb_per_s`: 10^9 bytes of weights and of gradients that cross per second,
      the sum of all devices
    - `pipeline_seconds`: from the first op to the last, per batch
    - `device_0_peak_gb` and so on: the most memory that tensors took on each device; `host_gb`: of the host
    - `seconds_per_batch`, `samples_per_second`, and with `tokens` also `tokens_per_second`: without validation, what
      happens between epochs, and loading the first batch after them

    Args:
        every_n_steps: how often; by default the Trainer's `log_every_n_steps`, where 0 keeps figures from loggers.
            Batches that accumulate gradients are parts of one step.
        progress_bar: also show them there.
        tokens: how many tokens a batch has; a tensor on the device is waited for when figures are shown.

    Raises:
        ConfigurationError: at the start of training, with another strategy.
    """

    prefix = "pipeline"
    watches = PipelineStrategy

    @override
    def _listen(self, trainer: pl.Trainer) -> list[Listener]:
        strategy: Any = trainer.strategy
        listeners = [device.ranges.listen((Kind.OP, Kind.STALL)) for device in strategy.runner.devices]
        self._ended: Sequence[list[Range]] = [[] for _ in listeners]
        return listeners

    @override
    def _streamers(self, trainer: pl.Trainer) -> list[Streamer]:
        strategy: Any = trainer.strategy
        streamed = strategy.runner.streamed
        return [] if streamed is None else streamed.streamers

    @override
    def _collect(self, device: int, ended: list[Range]) -> None:
        self._ended[device] += ended

    @override
    def _figures(self, trainer: pl.Trainer) -> dict[str, float]:
        strategy: Any = trainer.strategy
        over = not self._timing and not any(listener.waiting for listener in self._listeners)
        times, self._ended = PipelineTimes.read(self._ended, over=over)
        streams = bool(self._streamers(trainer))
        figures = times.figures(streams=streams)
        if streams:
            figures |= self._crossed.rates(self._seconds)
        peaks = {f"device_{i}_peak_gb": device.peak_bytes() for i, device in enumerate(strategy.runner.devices)}
        return figures | {name: peak / 1e9 for name, peak in peaks.items() if peak is not None}

"""Callbacks that watch the engines, for loggers and the progress bar.

They look at counters and at moments of the device's streams that have come, so they never wait for the device; and they
neither read weights nor gradients, so updates go on overlapping with backward and with the next forward.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from ramtorch_core import ConfigurationError, Streamer
from ramtorch_core.errors import check_count, check_function
from ramtorch_core.pipeline import batch_size
from ramtorch_core.traces import FOR_GRADIENTS, FOR_STAGE, FOR_TRANSFER, FOR_UPDATE, Kind, Listener, Mark, Range
from ramtorch_lightning._lightning import pl
from ramtorch_lightning.offload import OffloadStrategy
from ramtorch_lightning.pipeline import PipelineStrategy

__all__ = ["OffloadMonitor", "PipelineMonitor"]

_STATISTICS = Path("/proc/self/statm")


class _Monitor(pl.Callback):
    """What both monitors share: the clock, batches and samples, and where figures go.

    Time counts from the end of a batch to that of the next one, with loading data but without validation and what
    happens between epochs.
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
        self._listeners: list[Listener] = []
        self._forget()

    def _forget(self) -> None:
        """Begin to count anew."""
        self._seconds, self._batches, self._samples, self._tokens_seen = 0.0, 0, 0, 0

    def _listen(self, trainer: pl.Trainer) -> list[Listener]:
        """Listen to the strategy's devices."""
        raise NotImplementedError

    def _count(self, trainer: pl.Trainer) -> None:
        """A batch is over: take what is known of it."""
        raise NotImplementedError

    def _figures(self, trainer: pl.Trainer) -> dict[str, float]:
        """The figures of the batches since `_forget`."""
        raise NotImplementedError

    def _resume(self, trainer: pl.Trainer) -> None:
        """The clock runs again; what happened since it stopped does not count."""
        self._since = time.perf_counter()
        for listener in self._listeners:
            listener.collect()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        if not isinstance(trainer.strategy, self.watches):
            raise ConfigurationError(
                f"{type(self).__name__} watches {self.watches.__name__}, but the Trainer has "
                f"{type(trainer.strategy).__name__}: leave it out"
            )
        self._listeners = self._listen(trainer)
        self._resume(trainer)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._resume(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._listeners:
            self._resume(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now
        self._batches += 1
        size = batch_size(batch)
        self._samples += size if isinstance(size, int) else 0
        self._tokens_seen += 0 if self._tokens is None else self._tokens(batch)
        self._count(trainer)
        if self._batches < (self._every or trainer.log_every_n_steps or 1):  # type: ignore[attr-defined]
            return
        figures = self._figures(trainer) | {"seconds_per_batch": self._seconds / self._batches}
        if self._samples:
            figures["samples_per_second"] = self._samples / self._seconds
        if self._tokens_seen:
            figures["tokens_per_second"] = self._tokens_seen / self._seconds
        host = _resident_bytes()
        if host is not None:
            figures["host_gb"] = host / 1e9
        named = {f"{self.prefix}/{name}": value for name, value in figures.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        if self._progress_bar:
            pl_module.log_dict(named, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)
        self._forget()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        self._forget()


class OffloadMonitor(_Monitor):
    """Logs what `OffloadStrategy` does, every so many batches, as means over them.

    - `stall_percent` of the time in which the device waits, and its parts: `transfer_stall_percent` (for weights),
      `gradient_stall_percent` (for gradients to leave) and `update_stall_percent` (for the optimizer on the host)
    - `h2d_gb_per_s`, `d2h_gb_per_s`: gigabytes that cross per second; `h2d_busy_percent`, `d2h_busy_percent`: how much
      of the time that takes
    - `update_seconds`: of the optimizer on the host, per batch
    - `device_peak_gb`: the most memory that tensors took on the device; `host_gb`: what the process takes of the host's
    - `seconds_per_batch`, `samples_per_second`, and with `tokens` also `tokens_per_second`

    Args:
        every_n_steps: batches; by default the Trainer's `log_every_n_steps`.
        progress_bar: also show them there.
        tokens: how many tokens a batch has.

    Raises:
        ConfigurationError: at the start of training, with another strategy.
    """

    prefix = "offload"
    watches = OffloadStrategy

    @override
    def _forget(self) -> None:
        super()._forget()
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._tails: list[tuple[Range, Mark]] = []

    @override
    def _listen(self, trainer: pl.Trainer) -> list[Listener]:
        strategy: Any = trainer.strategy
        self._streamer: Streamer = strategy.streamer
        return [self._streamer.device.ranges.listen()]

    @override
    def _resume(self, trainer: pl.Trainer) -> None:
        super()._resume(trainer)
        self._before = self._copied()

    @override
    def _count(self, trainer: pl.Trainer) -> None:
        copied = self._copied()
        for name, value in copied.items():
            self._bytes[name] += value - (self._before[name] if value >= self._before[name] else 0)
        self._before = copied
        ended = self._listeners[0].collect()
        for each in ended:
            key = f"stall {each.what}" if each.kind is Kind.STALL else each.kind.value
            self._spent[key] += each.seconds
        waits = [each for each in ended if each.kind is Kind.STALL and each.what == FOR_GRADIENTS]
        if waits and not any(each.kind is Kind.UPDATE for each in ended):
            # The optimizer has stepped over published gradients; before, the host waited for the last of them.
            last = max(waits, key=lambda each: each.ended)
            self._tails.append((last, self._streamer.device.mark()))

    @override
    def _figures(self, trainer: pl.Trainer) -> dict[str, float]:
        spent, device = self._spent, self._streamer.device
        optimizer = sum(mark.seconds_since(last.end) for last, mark in self._tails if mark.query())
        waits = {
            "transfer": spent[f"stall {FOR_TRANSFER}"],
            "gradient": spent[f"stall {FOR_GRADIENTS}"],
            "update": spent[f"stall {FOR_UPDATE}"] + optimizer,
        }
        percent = 100 / self._seconds
        figures = {"stall_percent": sum(waits.values()) * percent}
        figures |= {f"{name}_stall_percent": seconds * percent for name, seconds in waits.items()}
        for way, kind in (("h2d", Kind.TRANSFER), ("d2h", Kind.GRADIENT)):
            figures[f"{way}_gb_per_s"] = self._bytes[way] / 1e9 / self._seconds
            figures[f"{way}_busy_percent"] = spent[kind.value] * percent
        figures["update_seconds"] = (spent[Kind.UPDATE.value] + optimizer) / self._batches
        peak = device.peak_bytes()
        return figures if peak is None else figures | {"device_peak_gb": peak / 1e9}

    def _copied(self) -> dict[str, int]:
        """Bytes that have crossed so far."""
        streamer = self._streamer
        return {
            "h2d": streamer.window.copied_bytes if streamer.groups else 0,
            "d2h": streamer.gradients.copied_bytes,
        }

    @override
    def _close(self) -> None:
        super()._close()
        self.__dict__.pop("_streamer", None)


class PipelineMonitor(_Monitor):
    """Logs what `PipelineStrategy` does, every so many batches, as means over them.

    - `bubble_percent` of the devices' time between a batch's first op and the first device's last one, in which no op
      computes; `device_0_busy_percent` and so on: the part in which one does
    - `pipeline_seconds`: from the first op to the last, per batch
    - `device_0_peak_gb` and so on: the most memory that tensors took on each device; `host_gb`: of the host
    - `seconds_per_batch`, `samples_per_second`, and with `tokens` also `tokens_per_second`

    Args:
        every_n_steps: batches; by default the Trainer's `log_every_n_steps`.
        progress_bar: also show them there.
        tokens: how many tokens a batch has.

    Raises:
        ConfigurationError: at the start of training, with another strategy.
    """

    prefix = "pipeline"
    watches = PipelineStrategy

    @override
    def _listen(self, trainer: pl.Trainer) -> list[Listener]:
        strategy: Any = trainer.strategy
        listeners = [device.ranges.listen() for device in strategy.runner.devices]
        self._ended: list[list[Range]] = [[] for _ in listeners]
        return listeners

    @override
    def _resume(self, trainer: pl.Trainer) -> None:
        super()._resume(trainer)
        self._ended = [[] for _ in self._listeners]

    @override
    def _count(self, trainer: pl.Trainer) -> None:
        for ended, listener in zip(self._ended, self._listeners, strict=True):
            ended += listener.collect()

    @override
    def _figures(self, trainer: pl.Trainer) -> dict[str, float]:
        strategy: Any = trainer.strategy
        lanes = [_batches(ended) for ended in self._ended]
        complete = min(map(len, lanes)) - 1  # the device may be at work on the last one
        figures: dict[str, float] = {}
        if complete > 0:
            self._ended = [list(itertools.chain.from_iterable(lane[complete:])) for lane in lanes]
            total = sum(batch[-1].end.seconds_since(batch[0].start) for batch in map(_ops, lanes[0][:complete]))
            busy = [sum(map(_busy, lane[:complete])) / total for lane in lanes]
            figures["bubble_percent"] = 100 * (1 - sum(busy) / len(busy))
            figures |= {f"device_{i}_busy_percent": 100 * part for i, part in enumerate(busy)}
            figures["pipeline_seconds"] = total / complete
        peaks = {f"device_{i}_peak_gb": device.peak_bytes() for i, device in enumerate(strategy.runner.devices)}
        return figures | {name: peak / 1e9 for name, peak in peaks.items() if peak is not None}


def _ops(ended: Sequence[Range]) -> list[Range]:
    return [each for each in ended if each.kind is Kind.OP]


def _batches(ended: Sequence[Range]) -> list[list[Range]]:
    """Ranges of one device, in the order in which they began, by batch; each begins with the first microbatch."""
    ordered = sorted(ended, key=lambda each: each.begun)
    ops = [str(each.what) for each in _ops(ordered)]
    first = min((op for op in ops if op.endswith("F0")), key=lambda op: int(op[:-2]), default="")
    batches: list[list[Range]] = []
    for each in ordered:
        if each.kind is Kind.OP and str(each.what) == first:
            batches.append([])
        if batches:
            batches[-1].append(each)
    return batches


def _busy(ended: Sequence[Range]) -> float:
    """Seconds in which ops computed, instead of waiting for another stage inside of an op."""
    waited = sum(each.seconds for each in ended if each.kind is Kind.STALL and each.what == FOR_STAGE)
    return sum(op.seconds for op in _ops(ended)) - waited


def _resident_bytes() -> int | None:
    """Bytes of the host's memory that this process takes, or None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        import resource

        return int(_STATISTICS.read_text().split()[1]) * resource.getpagesize()
    return None

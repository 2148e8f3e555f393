"""What a step logs per microbatch, and its replay as the log of one batch."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from ramtorch_lightning._lightning import pl

__all__ = ["LogCapture"]

_current = threading.local()


@dataclass
class _Entry:
    """One `self.log` of a step: the n-th of its name in each microbatch."""

    name: str
    options: dict[str, Any]
    values: dict[int, Any] = field(default_factory=dict)
    """Microbatch -> value."""
    sizes: dict[int, int | None] = field(default_factory=dict)
    """Microbatch -> the `batch_size` it gave."""


class LogCapture:
    """Stands in for `LightningModule.log` while microbatches run, and then logs once what they logged.

    Means are weighted by what the microbatch weighs, usually its size (by `batch_size` where it is given), sums are
    added, minima and maxima taken over the microbatches. A metric object has seen every microbatch already and is
    logged as it is. Arguments are checked in the call, so that an error points at the user's line.
    """

    def __init__(self, module: pl.LightningModule, weights: Sequence[float]) -> None:
        self._module = module
        self._weights = weights
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._counts: list[dict[str, int]] = [{} for _ in weights]
        self._lock = threading.Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, `module.log` (and `log_dict`, which calls it) is captured."""
        if len(self._weights) == 1:  # the one call that Lightning expects
            yield
            return
        object.__setattr__(self._module, "log", self._log)
        try:
            yield
        finally:
            object.__delattr__(self._module, "log")

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Inside, in the calling thread, calls count for microbatch `index`; what it logged before is forgotten."""
        with self._lock:
            self._counts[index].clear()
            for entry in self._entries.values():
                entry.values.pop(index, None)
                entry.sizes.pop(index, None)
        _current.index = index
        try:
            yield
        finally:
            _current.index = None

    def replay(self) -> None:
        """Log every entry once, in the order in which the first microbatch that has it logged it."""
        for entry in self._entries.values():
            order = sorted(entry.values)
            order = [m for m in order if entry.sizes[m] or self._weights[m]] or order  # what weighs nothing may be NaN
            if not order:
                continue
            weights = [entry.sizes[m] or self._weights[m] for m in order]
            options = dict(entry.options)
            if any(size is not None for size in entry.sizes.values()):
                options["batch_size"] = sum(weights)
            value = _merge([entry.values[m] for m in order], weights, options.get("reduce_fx", "mean"))
            self._module.log(entry.name, value, **options)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"log() takes at most {2 + len(_POSITIONAL)} positional arguments")
        options = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
        index: int | None = getattr(_current, "index", None)
        trainer = self._module._trainer
        if index is None or (trainer is not None and trainer._results is None):
            # A thread of the user's, or a step that cannot log: Lightning says so.
            type(self._module).log(self._module, name, value, **options)
            return
        _check(name, value, value)
        if not options.get("enable_graph"):
            value = _detach(value)
        with self._lock:
            count = self._counts[index][name] = self._counts[index].get(name, 0) + 1
            size = options.pop("batch_size", None)
            entry = self._entries.setdefault((name, count), _Entry(name, options))
            entry.values[index] = value
            entry.sizes[index] = size


_POSITIONAL = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
"""The parameters of `LightningModule.log` after name and value."""


def _check(name: Any, value: Any, whole: Any) -> None:
    if isinstance(value, dict):
        for item in value.values():
            if isinstance(item, dict):
                raise ValueError(f"`self.log({name}, {whole})` was called, but nested dictionaries cannot be logged")
            _check(name, item, whole)
    elif not isinstance(value, numbers.Number | Metric | Tensor):
        kind = type(value).__name__
        raise ValueError(f"`self.log({name}, {whole})` was called, but `{kind}` values cannot be logged")
    elif isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"`self.log({name}, {whole})` was called, but a logged tensor must have one element, not {value.numel()}: "
            f"try `.mean()`"
        )


def _detach(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _detach(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value


def _merge(values: Sequence[Any], weights: Sequence[float], reduce: Any) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _merge([value[key] for value in values], weights, reduce) for key in first}
    if isinstance(first, Metric) or len(values) == 1:
        return first
    name = getattr(reduce, "__name__", str(reduce)).lower()
    if any(isinstance(value, Tensor) for value in values):
        device = next(value.device for value in values if isinstance(value, Tensor))
        stacked = torch.stack([torch.as_tensor(value, device=device).reshape(()) for value in values])
        if name in ("min", "max", "sum"):
            return getattr(torch, name)(stacked)
        stacked = stacked if stacked.dtype == torch.float64 else stacked.float()
        if len(set(weights)) == 1:
            return stacked.mean()
        share = torch.tensor(weights, dtype=stacked.dtype) / sum(weights)
        return (stacked * share.to(device, non_blocking=True)).sum()
    if name == "sum":
        return sum(values)
    if name in ("min", "max"):
        return min(values) if name == "min" else max(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

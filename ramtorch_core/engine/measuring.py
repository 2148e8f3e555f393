"""Measures what chunks cost in steps that run anyway: nothing is computed twice, and results stay as they are."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ramtorch_core.engine.backward import current_task
from ramtorch_core.engine.calibration import Calibration, describe
from ramtorch_core.engine.census import Chunk
from ramtorch_core.engine.footprints import Footprint, Storages, bytes_once
from ramtorch_core.engine.laps import Lap, compute_of, read_visits
from ramtorch_core.engine.modules import tensors_in
from ramtorch_core.engine.rates import Rates
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.visits import Activations
from ramtorch_core.memory.ranges import Listener

__all__ = ["Measuring"]


class Measuring:
    """Watches the steps of a streamer.

    Args:
        train: steps have backwards.
    """

    def __init__(self, streamer: Streamer, *, train: bool) -> None:
        self._streamer, self._train = streamer, train
        self._watch: _Activations | None = None
        self._listener: Listener | None = None
        self.laps: list[Lap] = []

    def begin_activations(self) -> None:
        """Count activations until `end_activations`, in one step."""
        self._watch = _Activations(self._streamer)
        self._streamer._entrances.around_visit = self._watch.visit
        self._streamer._visits.saved.note = self._watch.note

    def end_activations(self) -> None:
        """Idempotent."""
        self._streamer._entrances.around_visit = None
        self._streamer._visits.saved.note = None

    def begin_times(self) -> None:
        """Time visits, and note the most memory that is taken, from here on."""
        device = self._streamer.device
        device.synchronize()
        device.forget_peak()
        self._listener = device.ranges.listen()

    def end_lap(self) -> None:
        """A step is over; waits for the device."""
        if self._listener is not None:
            device = self._streamer.device
            device.synchronize()
            lap = read_visits(self._listener.collect(), asynchronous=device.asynchronous, train=self._train)
            if lap is not None:
                self.laps.append(lap)

    def calibration(self, rates: Rates) -> Calibration | None:
        """What was found; None if some chunk was never visited, or no step was seen."""
        streamer = self._streamer
        if not self.laps or not streamer.groups or streamer.never_visited():
            return None
        footprints = {} if self._watch is None else self._watch.per_pass()
        recomputed = self._train and streamer._visits.activations is Activations.CHECKPOINT
        measured = tuple(
            describe(
                group,
                footprints.get(chunk.index, Footprint()),
                *compute_of(group, self.laps, recomputed=recomputed),
            )
            for group, chunk in streamer._inventory.chunk_of.items()
        )
        outside = statistics.median(lap.outside for lap in self.laps)
        return Calibration(
            rates=rates,
            chunks=measured,
            outside=outside,
            window=len(streamer.window.slots),
            peak_bytes=streamer.device.peak_bytes(),
        )

    def close(self) -> None:
        """Leave the streamer alone. Idempotent."""
        self.end_activations()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class _Activations:
    """What chunks save for backward, or would save if they were not checkpointed, and what goes into them."""

    def __init__(self, streamer: Streamer) -> None:
        self._totals: dict[int, Footprint] = defaultdict(Footprint)
        self._calls = Counter[int]()
        stays: Storages = {}
        bytes_once(streamer._inventory.rest.buffer, stays)  # small weights are there anyway
        self._saved, self._inputs = dict(stays), dict(stays)
        self._inside = threading.local()  # microbatches may run in threads of their own
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def visit(self, chunk: Chunk, args: Any, kwargs: Any) -> Iterator[None]:
        """Around a forward visit."""
        if current_task() != -1 or not torch.is_grad_enabled():
            yield
            return
        outer: Chunk | None = getattr(self._inside, "chunk", None)
        with self._mutex, torch._C.DisableTorchFunction():
            self._calls[chunk.index] += 1
            total = self._totals[chunk.index]
            total.boundary += sum(_bytes(tensor, self._inputs) for tensor in tensors_in((args, kwargs)))
        self._inside.chunk = chunk
        try:
            yield
        finally:
            self._inside.chunk = outer

    def note(self, tensor: Tensor) -> None:
        """A tensor is saved."""
        chunk: Chunk | None = getattr(self._inside, "chunk", None)
        if chunk is not None and current_task() == -1:
            with self._mutex, torch._C.DisableTorchFunction():
                self._totals[chunk.index].kept += _bytes(tensor, self._saved)

    def per_pass(self) -> dict[int, Footprint]:
        """By index of the chunk, for one pass over the chunks."""
        passes = statistics.median_low(self._calls.values()) if self._calls else 1
        return {
            index: Footprint(total.kept // passes, total.boundary // passes) for index, total in self._totals.items()
        }


def _bytes(tensor: Tensor, known: Storages) -> int:
    """As `bytes_once`; 0 for tensors without a storage of their own."""
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return bytes_once(tensor, known)
    return 0

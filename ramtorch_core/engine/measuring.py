"""Measures what chunks cost in steps that run anyway: nothing is computed twice, and results stay as they are."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ramtorch_core.engine.backward import current_task
from ramtorch_core.engine.calibration import Calibration, describe, gets_gradients
from ramtorch_core.engine.census import Chunk
from ramtorch_core.engine.footprints import Counts, Footprint
from ramtorch_core.engine.laps import Lap, compute_of, read_visits
from ramtorch_core.engine.peaks import PeakWatch
from ramtorch_core.engine.rates import Rates
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.timed_passes import WORK_BYTES, Deliveries, Issue, Pacing, least_issue
from ramtorch_core.memory.ranges import Kind, Listener, Moment

__all__ = ["AHEAD", "PLAIN", "Measuring"]


PLAIN = 2
"""Timed steps that run as always: how long they take, the host and updates."""
AHEAD = 2
"""Timed steps after those in which the host is ahead of the device, so that no kernel waits to be launched: compute."""
ROOM = 4 * WORK_BYTES
"""Device memory that the steps before must have left for what puts the host ahead."""


class Measuring:
    """Watches the steps of a streamer.

    Args:
        train: steps have backwards.

    Attributes:
        laps: of the plain steps that were timed.
        seconds: of each of them, from nothing under way until the host went on and the device had computed; updates
            may have run on.
        held: updates waited for the norm of all gradients, in the step whose memory was noted.
    """

    def __init__(self, streamer: Streamer, *, train: bool) -> None:
        self._streamer, self._train = streamer, train
        self._watch: _Activations | None = None
        self._listener: Listener | None = None
        self._pacing: Listener | None = None
        self._peaks: PeakWatch | None = None
        self._deliveries = Deliveries()
        self._since = Moment()
        self._timed = 0
        self.laps: list[Lap] = []
        self.seconds: list[float] = []
        self.held = False
        self._undisturbed: list[Lap] = []
        self._updates: dict[object, list[float]] = defaultdict(list)  # chunk -> seconds of each of its updates

    def begin_activations(self) -> None:
        """Count activations until `end_activations`, in one step."""
        self._watch = _Activations(self._streamer)
        self._streamer._entrances.around_visit = self._watch.visit
        self._streamer._visits.saved.note = self._watch.note

    def end_activations(self) -> None:
        """Idempotent."""
        self._streamer._entrances.around_visit = None
        self._streamer._visits.saved.note = None

    def begin_peaks(self) -> None:
        """Note the most memory that is taken until `end_peaks`, in one step; asking for it takes the host time."""
        streamer = self._streamer
        streamer.device.forget_peak()
        self._peaks = PeakWatch(streamer.device)
        vars(streamer)["begin_lending"] = self._begin_lending
        vars(streamer.updates)["begin"] = self._begin_updates

    def end_peaks(self) -> None:
        """Idempotent."""
        if self._peaks is not None:
            self._peaks.close()
            vars(self._streamer).pop("begin_lending", None)
            vars(self._streamer.updates).pop("begin", None)

    def begin_times(self) -> None:
        """Time the next steps, first `PLAIN` and then, on a device that computes beside the host, `AHEAD` others."""
        self._wait()
        self._listener = self._streamer.device.ranges.listen()
        self._listener.waiting = self._deliveries
        self._since = Moment()

    def end_lap(self) -> None:
        """A step is over; waits for its updates and the device, so that nothing of it is left in the next one."""
        if self._listener is None:
            return
        device = self._streamer.device
        device.record().synchronize()
        now = Moment()
        self._wait()
        ended = self._listener.collect()
        lap = read_visits(ended, asynchronous=device.asynchronous, train=self._train)
        if self._pacing is not None:
            self._undisturbed += [lap] if lap is not None else []
        elif lap is not None:
            self.laps.append(lap)
            self.seconds.append(now.seconds_since(self._since))
            for update in (each for each in ended if each.kind is Kind.UPDATE):
                self._updates[update.what].append(update.seconds)
        self._timed += 1
        if self._timed == PLAIN and device.asynchronous:
            self._get_ahead()
        if self._timed == PLAIN + AHEAD:
            self._end_times()
        self._since = Moment()

    def update_seconds(self) -> float:
        """Of the updates on the host that follow one backward."""
        return sum(map(statistics.median, self._updates.values()))

    def calibration(self, rates: Rates) -> Calibration | None:
        """What was found; None if some chunk was never visited, or no step was seen."""
        streamer = self._streamer
        if not self.laps or not streamer.groups or streamer.never_visited():
            return None
        footprints = {} if self._watch is None else self._watch.per_pass()
        laps = self._undisturbed or self.laps
        measured = tuple(
            describe(group, footprints.get(chunk.index, Footprint()), compute_of(group, laps))
            for group, chunk in streamer._inventory.chunk_of.items()
        )
        outside = statistics.median(lap.outside for lap in laps)
        return Calibration(
            rates=rates,
            chunks=measured,
            outside=outside,
            ahead=0.0 if self._train else outside,
            window=len(streamer.window.slots),
            peaks=None if self._peaks is None else self._peaks.peaks(),
            awaited=gets_gradients(streamer),
            issue=least_issue(self._deliveries.ends) if streamer.device.asynchronous else Issue(),
        )

    def close(self) -> None:
        """Leave the streamer alone. Idempotent."""
        self.end_activations()
        self.end_peaks()
        self._end_times()

    def _end_times(self) -> None:
        for listener in (self._listener, self._pacing):
            if listener is not None:
                listener.close()
        self._listener = self._pacing = None

    def _wait(self) -> None:
        self._streamer.updates.wait()
        self._streamer.device.synchronize()

    def _get_ahead(self) -> None:
        """From the next step on the host is ahead; not where what keeps the device busy might find no memory."""
        device, peaks = self._streamer.device, None if self._peaks is None else self._peaks.peaks()
        usable = device.usable_bytes()
        if self._listener is None or peaks is None or usable is None or usable < max(astuple(peaks)) + ROOM:
            return
        try:
            pacing = Pacing(device, least_issue(self._deliveries.ends))
        except torch.OutOfMemoryError:  # though so much is free, in pieces
            return
        self._pacing = device.ranges.listen()
        self._pacing.waiting = pacing
        self._listener.waiting = deque()  # the host's time is not that of other steps any more

    def _begin_lending(self) -> None:
        """Instead of the streamer's method, which tells that a backward begins."""
        self._backward_begins()
        type(self._streamer).begin_lending(self._streamer)

    def _begin_updates(self, *optimizers: Optimizer, hold: bool = False) -> None:
        """Instead of the method of its updates, with which loops without a Trainer begin a backward."""
        self._backward_begins()
        self.held = hold
        updates = self._streamer.updates
        type(updates).begin(updates, *optimizers, hold=hold)

    def _backward_begins(self) -> None:
        if self._peaks is not None:
            self._peaks.backward_begins()


class _Activations:
    """What chunks save for backward, or would save if they were not checkpointed, and what goes into them."""

    def __init__(self, streamer: Streamer) -> None:
        self._totals: dict[int, Footprint] = defaultdict(Footprint)
        self._calls = Counter[int]()
        self._counts = Counts(streamer._inventory.rest.buffer)  # small weights are there anyway
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
            self._counts.given(self._totals[chunk.index], (args, kwargs))
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
                self._counts.saved(self._totals[chunk.index], tensor)

    def per_pass(self) -> dict[int, Footprint]:
        """By index of the chunk, for one pass over the chunks."""
        passes = statistics.median_low(self._calls.values()) if self._calls else 1
        return {
            index: Footprint(total.kept // passes, total.boundary // passes, total.recomputed // passes)
            for index, total in self._totals.items()
        }

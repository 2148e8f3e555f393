"""Passes over a streamed model in which the device waits for nobody, so that what is timed is compute alone.

Gradients are dropped where backward leaves them, so nothing is copied to the host and nothing updated. The device gets
some work in advance, as much as the host needs to issue a pass: the host then is ahead, and no kernel waits to be
launched. Waits for weights, which stream as always, are timed apart. The host is timed in other passes, without work in
advance: behind a full queue of the device it waits.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ramtorch_core.engine.footprints import Run
from ramtorch_core.engine.laps import Lap, read_waits, within
from ramtorch_core.engine.updates import Updates
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import Kind, Range
from ramtorch_core.plan.itinerary import Direction, Visit

FACTOR = 4096
LONGEST = 0.25
"""Seconds of work in advance. A host that needs longer for a pass is ahead of the device only for the first chunks."""
FIRST = 8
"""Visits whose issuing is timed: later ones may find the device's queue full, and wait."""


@dataclass(frozen=True, slots=True)
class TimedPass:
    """Seconds of one forward and backward.

    Attributes:
        lap: of compute; a backward begins with the recompute of a checkpoint.
        issue_forward, issue_backward: of the host per visit, likewise; 0 where the host computes itself.
        issue_outside: of the host between visits.
        host: of the host, for all of it.
    """

    lap: Lap
    issue_forward: float
    issue_backward: float
    issue_outside: float
    host: float


def time_passes(run: Run, count: int) -> list[TimedPass]:
    """Time so many passes of the device, and of the host, which tell how far ahead it has to be."""
    device = run.streamer.device
    with _without_updates(run):
        if not device.asynchronous:
            return [_time(run, None, 0.0) for _ in range(count + 1)][1:]
        hosts = [_time(run, None, 0.0) for _ in range(count + 1)][1:]
        ahead, seconds = _Ahead(device), min(LONGEST, statistics.median(each.host for each in hosts))
        passes = [_time(run, ahead, seconds) for _ in range(count)]
    return [replace(host, lap=each.lap) for host, each in zip(hosts, passes, strict=True)]


@contextmanager
def _without_updates(run: Run) -> Iterator[None]:
    """Inside, gradients are dropped, and masters are known to stay as they are."""
    streamer = run.streamer
    passes, conservative = streamer._backwards, streamer.conservative
    updates, passes.updates = passes.updates, cast(Updates, _Dropping())
    streamer.conservative = False
    try:
        yield
    finally:
        passes.updates, streamer.conservative = updates, conservative


class _Dropping:
    """Stands where updates are, and takes every gradient."""

    def take(self, _group: Any, bucket: dict[Any, Any], *, whole: bool) -> None:
        bucket.clear()

    def backward_over(self) -> None:
        pass

    def drop(self) -> None:
        pass


class _Ahead:
    """Work for the device, while the host gets ahead."""

    def __init__(self, device: Device) -> None:
        self._factor = torch.zeros(FACTOR, FACTOR, device=device.torch)
        self._product = torch.empty_like(self._factor)
        self._multiply()
        begun = device.mark()
        self._multiply()
        end = device.mark()
        device.synchronize()
        self._seconds = max(1e-4, end.seconds_since(begun))

    def work(self, seconds: float) -> None:
        """Issue so much of it."""
        for _ in range(math.ceil(seconds / self._seconds)):
            self._multiply()

    def _multiply(self) -> None:
        with torch.no_grad():
            torch.mm(self._factor, self._factor, out=self._product)


class _Deliveries(deque[Range]):
    """Notes when the host comes to the end of each visit."""

    def __init__(self) -> None:
        super().__init__()
        self.visits: list[tuple[Direction, float]] = []

    def append(self, ended: Range) -> None:
        if isinstance(ended.what, Visit):
            self.visits.append((ended.what.direction, time.perf_counter()))
        super().append(ended)


def _time(run: Run, ahead: _Ahead | None, seconds: float) -> TimedPass:
    device = run.streamer.device
    device.synchronize()
    listener = device.ranges.listen()
    deliveries = listener.waiting = _Deliveries()
    try:
        if ahead is not None:
            ahead.work(seconds)
        start, begun = device.mark(), time.perf_counter()
        loss = run.forward()
        if not loss.requires_grad:
            raise ConfigurationError("the loss has no gradient: no parameter that it depends on is trained")
        loss.backward()
        end, host = device.mark(), time.perf_counter() - begun
        device.synchronize()
        ended = listener.collect()
    finally:
        listener.close()
    lap, waits = Lap(), read_waits(ended, asynchronous=device.asynchronous)
    for visit in (each for each in ended if each.kind is Kind.VISIT):
        waited = sum(wait.seconds for wait in waits if within(wait, visit))
        assert isinstance(visit.what, Visit)
        lap.visits[visit.what] += max(0.0, visit.seconds - waited)
    waited = sum(wait.seconds for wait in waits)
    lap.outside = max(0.0, end.seconds_since(start) - waited - sum(lap.visits.values()))
    issuing = _issuing(deliveries.visits, begun) if device.asynchronous else (0.0, 0.0, 0.0)
    return TimedPass(lap, *issuing, host)


def _issuing(visits: Sequence[tuple[Direction, float]], begun: float) -> tuple[float, float, float]:
    """Seconds of the host per forward visit, per backward visit, and between the visits of a pass that began then."""
    laps: list[float] = []
    between, last = 0.0, begun
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        ends = [at for which, at in visits if which is direction]
        steps = [later - earlier for earlier, later in itertools.pairwise(ends[: FIRST + 1])]
        first = ends[0] - last if ends else 0.0
        laps.append(statistics.median(steps) if steps else first)
        between += max(0.0, first - laps[-1])
        last = ends[-1] if ends else last
    return laps[0], laps[1], between

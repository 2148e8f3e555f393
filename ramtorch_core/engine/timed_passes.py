"""Passes over a streamed model in which the device waits for nobody, so that what is timed is compute alone.

Gradients are dropped where backward leaves them, so nothing is copied to the host and nothing updated. The device gets
some work in advance, as much as the host needs to issue a pass: the host then is ahead, and no kernel waits to be
launched. Waits for weights, which stream as always, are timed apart. The host is timed in other passes, without work in
advance: behind a full queue of the device it waits.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import torch

from ramtorch_core.engine.backward import current_task
from ramtorch_core.engine.footprints import Run
from ramtorch_core.engine.laps import Lap, read_waits
from ramtorch_core.engine.updates import Updates
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import FOR_TRANSFER, Kind, Range
from ramtorch_core.plan.itinerary import Direction, Visit

FACTOR = 4096
WORK_BYTES = 2 * 4 * FACTOR**2
"""Of device memory, for what keeps it busy."""
LONGEST = 0.25
"""Seconds of work in advance. A host that needs longer for a pass is ahead of the device only for the first chunks."""
FIRST = 8
"""Visits whose issuing is timed."""
MARGIN = 2
"""Work before a visit, as a multiple of what the host typically needs to issue it."""
FOR_HOST = "for the host to get ahead"


class Part(Enum):
    """What the host issues one after the other."""

    FORWARD = Direction.FORWARD.value
    RECOMPUTE = "recompute"
    BACKWARD = Direction.BACKWARD.value


@dataclass(frozen=True, slots=True)
class Issue:
    """Seconds of the host; 0 where they are not known, or the host computes itself.

    Attributes:
        forward, recompute, backward: to issue the compute of one visit, and of the recompute that begins a backward.
        begin: per microbatch, before it issues the first visit.
        loss: per microbatch, to issue what is between forwards and backwards.
    """

    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0
    begin: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class TimedPass:
    """Seconds of one forward and backward: of compute, of the host to issue it, and of the host for all of it."""

    lap: Lap
    issue: Issue
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
    passes, inventory, conservative = streamer._backwards, streamer._inventory, streamer.conservative
    updates, passes.updates = passes.updates, cast(Updates, _Dropping())
    streamer.conservative = False
    vars(inventory)["let_host_write"] = lambda: None  # nobody does, so the host need not wait for copies of masters
    try:
        yield
    finally:
        passes.updates, streamer.conservative = updates, conservative
        del vars(inventory)["let_host_write"]


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
        with torch.inference_mode(False):
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
        with torch.inference_mode(False), torch.no_grad():
            torch.mm(self._factor, self._factor, out=self._product)


class Deliveries(deque[Range]):
    """Notes when the host comes to the end of each visit, and of each recompute, by a clock that stops while it waits.

    Attributes:
        ends: the parts, and seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[Part, float]] = []
        self._waited = 0.0

    def append(self, ended: Range) -> None:
        """Some range has ended on the host's side."""
        if ended.kind is Kind.STALL:
            self._waited += ended.waited
        elif isinstance(ended.what, Visit):
            self.ends.append((Part(ended.what.direction.value), time.perf_counter() - self._waited))
        elif ended.kind is Kind.RECOMPUTE:
            self.ends.append((Part.RECOMPUTE, time.perf_counter() - self._waited))
        super().append(ended)


class Pacing(deque[Range]):
    """Gives the device work before each visit, for longer than the host needs to issue it, so that it is ahead.

    In training steps the host also waits, and what it had in advance is used up; so each visit gets its own. Those who
    read the ranges see the work as a stall. It takes the place of a listener's `waiting`.

    Args:
        issue: what the host needs.
    """

    def __init__(self, device: Device, issue: Issue) -> None:
        super().__init__()
        self._ranges, self._ahead = device.ranges, _Ahead(device)
        self._forward, self._backward = (
            min(LONGEST, MARGIN * seconds) for seconds in (issue.forward, issue.recompute + issue.backward)
        )

    def append(self, ended: Range) -> None:
        """Some range has ended on the host's side; not kept."""
        if ended.what == FOR_TRANSFER:  # a visit begins
            with self._ranges.span(Kind.STALL, FOR_HOST, shown=False):
                self._ahead.work(self._forward if current_task() == -1 else self._backward)


def _time(run: Run, ahead: _Ahead | None, seconds: float) -> TimedPass:
    device = run.streamer.device
    device.synchronize()
    listener = device.ranges.listen()
    deliveries = listener.waiting = Deliveries()
    try:
        if ahead is not None:
            ahead.work(seconds)
        start, begun = device.mark(), time.perf_counter()
        loss = run.forward()
        middle, until = device.mark(), device.ranges.tick()
        if not loss.requires_grad:
            raise ConfigurationError("the loss has no gradient: no parameter that it depends on is trained")
        loss.backward()
        end, host = device.mark(), time.perf_counter() - begun
        device.synchronize()
        ended = listener.collect()
    finally:
        listener.close()
    lap, waits = Lap(), read_waits(ended, asynchronous=device.asynchronous)
    recomputes = [each for each in ended if each.kind is Kind.RECOMPUTE]
    computed = sum(lap.add(each, recomputes, waits) for each in ended if each.kind is Kind.VISIT)
    waited = sum(wait.seconds for wait in waits)
    lap.outside = max(0.0, end.seconds_since(start) - waited - computed)
    before = sum(wait.seconds for wait in waits if wait.ended < until)
    forwards = sum(seconds for visit, seconds in lap.visits.items() if visit.direction is Direction.FORWARD)
    lap.ahead = max(0.0, middle.seconds_since(start) - before - forwards)
    return TimedPass(lap, issuing(deliveries.ends, begun) if device.asynchronous else Issue(), host)


def issuing(ends: Sequence[tuple[Part, float]], begun: float) -> Issue:
    """What the host needs, from the moments at which it came to the ends of parts of a pass that began then.

    Medians of the first visits: later ones may find the device's queue full, and wait.
    """
    laps, around = _laps(ends, begun)
    typical = {part: statistics.median(seconds[:FIRST]) for part, seconds in laps.items() if seconds}
    besides = [max(0.0, seconds - typical.setdefault(part, seconds)) for part, seconds in around]
    begin, loss = [*besides, 0.0, 0.0][:2]
    forward, recompute, backward = (typical.get(part, 0.0) for part in Part)
    return Issue(forward, recompute, backward, begin, loss)


def least_issue(ends: Sequence[tuple[Part, float]]) -> Issue:
    """The same from steps as they run, whose queue may be full at any time: lower quartiles, of visits alone."""
    laps, _ = _laps(ends, 0.0)
    least = {part: sorted(seconds)[len(seconds) // 4] for part, seconds in laps.items() if seconds}
    return Issue(*(least.get(part, 0.0) for part in Part))


_Laps = dict[Part, list[float]]


def _laps(ends: Sequence[tuple[Part, float]], begun: float) -> tuple[_Laps, list[tuple[Part, float]]]:
    """Seconds of each part; apart those of the first parts of the forwards and of the backwards, and what is before."""
    laps: _Laps = {part: [] for part in Part}
    around: list[tuple[Part, float]] = []
    before, last = None, begun
    for part, at in ends:
        if before is None or (before is Part.FORWARD) is not (part is Part.FORWARD):
            around.append((part, at - last))
        else:
            laps[part].append(at - last)
        before, last = part, at
    return laps, around

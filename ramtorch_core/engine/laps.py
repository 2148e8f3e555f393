"""What ranges tell of a step: seconds of compute per visit, without the waits inside."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ramtorch_core.memory.ranges import FOR_STAGE, Kind, Range
from ramtorch_core.memory.weights import WeightGroup
from ramtorch_core.plan.itinerary import Direction, Visit
from ramtorch_core.plan.schedule import Op

__all__ = ["Compute", "Lap", "compute_of", "op_seconds", "read_visits", "read_waits", "within"]


@dataclass(slots=True)
class Lap:
    """Seconds of one pass: of each visit, of the recompute in a chunk's backward visit, and of compute in no visit.

    `passes` is how many there were in the step; `ahead` is the part of `outside` that belongs to the forward, if known.
    """

    visits: dict[Visit, float] = field(default_factory=lambda: defaultdict(float))
    recomputes: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    outside: float = 0.0
    passes: int = 1
    ahead: float = 0.0

    def add(self, visit: Range, recomputes: Sequence[Range], waits: Sequence[Range]) -> float:
        """Count a visit, without the waits in it; returns its seconds."""
        assert isinstance(visit.what, Visit)
        compute = _compute(visit, waits)
        self.visits[visit.what] += compute
        for each in recomputes:
            if each.what == visit.what.chunk and within(each, visit):
                self.recomputes[visit.what.chunk] += _compute(each, waits)
        return compute


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one chunk; `backward` is without the recompute."""

    forward: float
    recompute: float
    backward: float


def op_seconds(ended: Sequence[Range]) -> list[tuple[Op, float]]:
    """The ops of a pipeline among the ranges of one device, with their seconds, without waits for other stages."""
    waits = [each for each in ended if each.kind is Kind.STALL and each.what == FOR_STAGE]
    return [(each.what, _compute(each, waits)) for each in ended if isinstance(each.what, Op)]


def read_waits(ended: Sequence[Range], *, asynchronous: bool) -> list[Range]:
    """Those in which compute waited: stalls, and where nothing is asynchronous the copies too."""
    kinds = (Kind.STALL,) if asynchronous else (Kind.STALL, Kind.TRANSFER, Kind.GRADIENT)
    return [each for each in ended if each.kind in kinds]


def within(inner: Range, outer: Range) -> bool:
    """Whether `inner` began and ended inside `outer`."""
    return outer.begun < inner.begun and inner.ended < outer.ended


def compute_of(group: WeightGroup, laps: Sequence[Lap]) -> Compute:
    """Medians. Where nothing was recomputed, a recompute is expected to take as long as a forward."""
    forward, both = (
        statistics.median(lap.visits.get(Visit(direction, group.index), 0.0) for lap in laps)
        for direction in (Direction.FORWARD, Direction.BACKWARD)
    )
    seen = [lap.recomputes[group.index] for lap in laps if group.index in lap.recomputes]
    recompute = statistics.median(seen) if seen else forward
    return Compute(forward, recompute, max(0.0, both - recompute * bool(seen)))


def _compute(of: Range, waits: Sequence[Range]) -> float:
    return max(0.0, of.seconds - sum(wait.seconds for wait in waits if within(wait, of)))


def read_visits(ended: Sequence[Range], *, asynchronous: bool, train: bool) -> Lap | None:
    """The mean pass over the chunks in a step, of which only ranges are known; None if there was none.

    A step has one pass or several. A training pass is a run of forward visits and the backward visits that follow;
    forwards that come first and have no backward, those of an evaluation, do not count. What happens between two
    passes, and before and after them, does not either.
    """
    visits = sorted((each for each in ended if each.kind is Kind.VISIT), key=lambda each: each.begun)
    waits = read_waits(ended, asynchronous=asynchronous)
    recomputes = [each for each in ended if each.kind is Kind.RECOMPUTE]
    lap, counts = Lap(), Counter[Visit]()
    for run in _passes(visits, train):
        seconds = 0.0
        for visit in run:
            seconds += lap.add(visit, recomputes, waits)
            assert isinstance(visit.what, Visit)
            counts[visit.what] += 1
        first, last = run[0], max(run, key=lambda each: each.ended)
        waited = sum(wait.seconds for wait in waits if first.begun < wait.begun and wait.ended < last.ended)
        lap.outside += max(0.0, last.end.seconds_since(first.start) - waited - seconds)
    direction = Direction.BACKWARD if train else Direction.FORWARD
    passes = [count for visit, count in counts.items() if visit.direction is direction]
    if not passes:
        return None
    count = statistics.median_low(passes)
    return Lap(
        {visit: seconds / count for visit, seconds in lap.visits.items()},
        {chunk: seconds / count for chunk, seconds in lap.recomputes.items()},
        lap.outside / count,
        count,
    )


def _passes(visits: Sequence[Range], train: bool) -> list[list[Range]]:
    """The visits of each pass, in order."""
    if not train:
        return [list(visits)] if visits else []
    runs: list[tuple[list[Range], list[Range]]] = []
    for visit in visits:
        assert isinstance(visit.what, Visit)
        forward = visit.what.direction is Direction.FORWARD
        if not runs or (forward and runs[-1][1]):
            runs.append(([], []))
        runs[-1][0 if forward else 1].append(visit)
    found = []
    for forwards, backwards in runs:
        most = max(Counter(each.what for each in backwards).values(), default=0)
        seen, kept = Counter[object](), []
        for each in reversed(forwards):
            seen[each.what] += 1
            if seen[each.what] <= most:
                kept.append(each)
        if backwards:
            found.append([*reversed(kept), *backwards])
    return found

"""What a run of the clock looked like: spans, the gaps between them with their causes, and peaks of what was held."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum

from ramtorch_core.simulate.clock import COMPUTE, Kind, Times, Work


class Cause(Enum):
    """Why a compute stream did nothing: a stall waits for a copy or an update, a bubble for another stage."""

    STALL = "stall"
    BUBBLE = "bubble"


@dataclass(frozen=True, slots=True)
class Span:
    """A task on a resource, from `start` to `end`, in seconds; `seconds` is its duration at full speed."""

    resource: str
    label: str
    kind: Kind
    start: float
    end: float
    seconds: float
    uses: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Gap:
    """A time, in seconds, in which a compute stream waited; `reason` says for what."""

    resource: str
    cause: Cause
    reason: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Holding:
    """`amount` of something at `place`, from the start of task `since` to the end of task `until` (None: for good)."""

    place: str
    amount: float
    since: int
    until: int | None


@dataclass(frozen=True)
class Timeline:
    """Spans and gaps, cut to the window from `start` to `end` in seconds, in the order of their resources.

    Attributes:
        resources: their names, in the order in which charts show them.
        peaks: place -> the largest amount held there at once, in the whole run.
        capacities: units per second of what was shared.
    """

    start: float
    end: float
    resources: tuple[str, ...]
    spans: tuple[Span, ...]
    peaks: dict[str, float]
    capacities: dict[str, float]
    explain: Callable[[], Iterable[Gap]] = field(repr=False, compare=False)
    """The gaps of the whole run. Of many runs that are compared, few are asked."""

    @functools.cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Where compute streams wait."""
        cut = (replace(g, start=max(g.start, self.start), end=min(g.end, self.end)) for g in self.explain())
        return tuple(gap for gap in cut if gap.end > gap.start)

    @property
    def seconds(self) -> float:
        """The length of the window."""
        return self.end - self.start

    def busy(self, *resources: str, kinds: AbstractSet[Kind] = frozenset(Kind)) -> float:
        """Part of the window, 0 to 1, that the resources' work fills at full speed; their mean if there are several.

        Args:
            kinds: what counts.
        """
        total = sum(
            span.seconds * (_inside(span.start, span.end, self) / (span.end - span.start))
            for span in self.spans
            if span.resource in resources and span.kind in kinds and span.end > span.start
        )
        return total / (self.seconds * len(resources)) if self.seconds and resources else 0.0

    def used(self, capacity: str) -> float:
        """Part of a shared capacity, 0 to 1, that was used on average; 0 of one that has no limit."""
        if capacity not in self.capacities or not self.seconds:
            return 0.0
        total = sum(
            rate * span.seconds * (_inside(span.start, span.end, self) / (span.end - span.start))
            for span in self.spans
            for name, rate in span.uses
            if name == capacity and span.end > span.start
        )
        return total / (self.capacities[capacity] * self.seconds)

    def waited(self, cause: Cause) -> float:
        """Seconds that compute streams waited for `cause`, added up over them."""
        return sum(gap.end - gap.start for gap in self.gaps if gap.cause is cause)


REASONS = {
    Kind.TRANSFER: "for a transfer",
    Kind.GRADIENT: "for gradients to leave",
    Kind.STATE: "for optimizer state",
    Kind.UPDATE: "for an update",
    Kind.SEND: "for another stage",
    Kind.ISSUE: "for the host to issue it",
}


def timeline(
    work: Work, times: Times, holdings: Iterable[Holding] = (), start: float = 0.0, end: float | None = None
) -> Timeline:
    """Cut a run to a window; by default it ends with the last task."""
    last = max(times.end, default=0.0)
    end = last if end is None else end
    names = dict.fromkeys(task.resource for task in work.tasks if task.resource)
    resources = tuple(dict.fromkeys([*(name for name in work.order if name in names), *names]))
    spans = tuple(
        Span(task.resource, task.label, task.kind, times.start[n], times.end[n], task.seconds, task.uses)
        for n, task in enumerate(work.tasks)
        if task.resource and times.end[n] > max(start, times.start[n]) and times.start[n] < end
    )
    streams = dict.fromkeys(task.resource for task in work.tasks if task.kind in COMPUTE)

    def explain() -> Iterable[Gap]:
        for stream in streams:
            yield from _gaps(work, times, stream, max(last, end))

    return Timeline(start, end, resources, spans, _peaks(times, holdings), work.capacities, explain)


def _gaps(work: Work, times: Times, stream: str, last: float) -> Iterable[Gap]:
    clock = 0.0
    for n, task in enumerate(work.tasks):
        if task.resource == stream:
            if times.start[n] > clock:
                yield from _explain(work, times, stream, n, clock)
            clock = times.end[n]
    computed = max(times.end[n] for n, task in enumerate(work.tasks) if task.kind in COMPUTE)
    if computed > clock:
        yield Gap(stream, Cause.BUBBLE, REASONS[Kind.SEND], clock, computed)
    if last > max(clock, computed):
        yield Gap(stream, Cause.STALL, _tail(work, times), max(clock, computed), last)


def _explain(work: Work, times: Times, stream: str, number: int, clock: float) -> Iterable[Gap]:
    """The gap before a task: first, as long as another stage kept it waiting, a bubble; the rest is a stall."""
    needs = list(_real(work, work.tasks[number].after))
    start = times.start[number]
    stage = [
        times.end[n] for n in needs if work.tasks[n].kind in COMPUTE | {Kind.SEND} and work.tasks[n].resource != stream
    ]
    copies = [(times.end[n], work.tasks[n].kind) for n in needs if work.tasks[n].kind in REASONS.keys() - {Kind.SEND}]
    until = min(start, max([clock, *stage]))
    latest = max(copies, key=lambda item: item[0], default=(0.0, Kind.SEND))
    if latest[0] < start:
        until = start
    if until > clock:
        yield Gap(stream, Cause.BUBBLE, REASONS[Kind.SEND], clock, until)
    if start > until:
        yield Gap(stream, Cause.STALL, REASONS[latest[1]], until, start)


def _real(work: Work, needs: Sequence[int]) -> Iterable[int]:
    """The tasks behind joins."""
    for need in needs:
        if work.tasks[need].kind is Kind.JOIN:
            yield from _real(work, work.tasks[need].after)
        else:
            yield need


def _tail(work: Work, times: Times) -> str:
    """What ends last."""
    latest = max((n for n, task in enumerate(work.tasks) if task.resource), key=lambda n: times.end[n])
    return REASONS.get(work.tasks[latest].kind, "for the end")


def _peaks(times: Times, holdings: Iterable[Holding]) -> dict[str, float]:
    """At one moment what earlier tasks hold goes before what later ones take; a task holds even if it takes no time."""
    changes: dict[str, list[tuple[float, int, int, float]]] = {}
    for held in holdings:
        place = changes.setdefault(held.place, [])
        place.append((times.start[held.since], held.since, 0, held.amount))
        if held.until is not None:
            place.append((times.end[held.until], held.until, 1, -held.amount))
    peaks = {}
    for name, moments in changes.items():
        level = peak = 0.0
        for *_, amount in sorted(moments):
            level += amount
            peak = max(peak, level)
        peaks[name] = peak
    return peaks


def _inside(start: float, end: float, window: Timeline) -> float:
    return max(0.0, min(end, window.end) - max(start, window.start))

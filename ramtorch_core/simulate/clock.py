"""A virtual clock: tasks on resources, run as early as their order, their needs and shared capacities allow.

A resource does one task at a time. It takes them in the order in which they were added, as a stream does, unless it was
declared `free`: then it takes, of those that are ready, the one with the least key. A capacity is what tasks of several
resources share while they run together (the bandwidth of the host's memory): when they want more than there is, all of
them slow down in proportion. What one capacity slows down wants less of the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ramtorch_core.errors import ConfigurationError


class Kind(Enum):
    """What a task does; the value is its one-letter form in text charts."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    LOSS = "L"
    TRANSFER = "t"
    GRADIENT = "g"
    STATE = "s"
    UPDATE = "u"
    SEND = ">"
    ISSUE = "i"
    JOIN = "."


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.LOSS})


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work: `seconds` at full speed on `resource`, once the tasks with the numbers `after` have ended.

    `uses` gives per capacity the units per second that the task takes at full speed. A join has no resource and no
    duration.
    """

    resource: str
    label: str
    kind: Kind
    seconds: float
    after: tuple[int, ...]
    uses: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Times:
    """Per task, by number: when it was started and when it ended, in seconds."""

    start: tuple[float, ...]
    end: tuple[float, ...]


Key = Callable[[int, int, Callable[[int], bool]], tuple[int, ...]]
"""(task, position in the order of becoming ready, whether a task has ended) -> the least goes first."""


class Work:
    """Tasks, in an order in which each needs only earlier ones, so that no resource can wait forever.

    Args:
        capacities: units per second of what is shared.
        free: resources that choose among their ready tasks, each with the key that decides.

    Attributes:
        order: names of resources, in the order in which charts show them; others come after.
        until: task -> two others. After the end of the first it is not needed any more: if its turn comes later, it
            waits for the second, and takes no time.
    """

    def __init__(self, capacities: Mapping[str, float] | None = None, free: Mapping[str, Key] | None = None) -> None:
        self.capacities, self.free = dict(capacities or {}), dict(free or {})
        self.tasks: list[Task] = []
        self.order: list[str] = []
        self.until: dict[int, tuple[int, int]] = {}

    def add(
        self,
        resource: str,
        label: str,
        kind: Kind,
        seconds: float,
        after: Iterable[int | None] = (),
        uses: Mapping[str, float] | None = None,
    ) -> int:
        """The number of a new task; None in `after` is ignored.

        Raises:
            ConfigurationError: the duration is negative, infinite or no number.
        """
        if not (0 <= seconds < math.inf):
            raise ConfigurationError(f"'{label}' takes {seconds} seconds: times must be finite and not negative")
        needs = tuple(sorted({task for task in after if task is not None}))
        assert not needs or needs[-1] < len(self.tasks), "a task needs earlier tasks only"
        shared = tuple((name, rate) for name, rate in (uses or {}).items() if name in self.capacities and rate > 0)
        self.tasks.append(Task(resource, label, kind, seconds, needs, shared))
        return len(self.tasks) - 1

    def join(self, after: Iterable[int | None]) -> int:
        """The number of a moment: when all of `after` have ended."""
        return self.add("", "", Kind.JOIN, 0.0, after)

    def run(self) -> Times:
        """Start every task as early as possible; deterministic.

        Raises:
            ConfigurationError: times that add up to more than a number can hold.
        """
        times = _Run(self).times()
        if not math.isfinite(max(times.end, default=0.0)):
            raise ConfigurationError("the times add up to more than a number can hold: use a larger unit")
        return times


class _Run:
    """One run of the clock."""

    def __init__(self, work: Work) -> None:
        self.work, self.now = work, 0.0
        count = len(work.tasks)
        self.start, self.end, self.ended = [0.0] * count, [0.0] * count, [False] * count
        self.missing = [len(task.after) for task in work.tasks]
        self.followers: list[list[int]] = [[] for _ in work.tasks]
        self.queues: dict[str, deque[int]] = {}
        self.pools: dict[str, list[tuple[int, int]]] = {name: [] for name in work.free}
        self.busy: set[str] = set()
        self.arrivals = 0
        self.active: dict[int, list[float]] = {}  # task -> [seconds left at full speed, since when, speed, its end]
        for number, task in enumerate(work.tasks):
            for need in task.after:
                self.followers[need].append(number)
            if task.resource and task.resource not in work.free:
                self.queues.setdefault(task.resource, deque()).append(number)

    def times(self) -> Times:
        joins = [n for n, task in enumerate(self.work.tasks) if not task.resource and not task.after]
        touched = {*self.queues, *self.pools}
        for number, task in enumerate(self.work.tasks):
            if task.resource in self.pools and not task.after:
                self._arrive(number)
        for number in joins:
            self._finish(number, touched)
        self._dispatch(touched)
        while self.active:
            self._share()
            self.now = min(entry[3] for entry in self.active.values())
            touched = set()
            for number in [n for n, entry in self.active.items() if entry[3] <= self.now]:
                del self.active[number]
                self.busy.discard(self.work.tasks[number].resource)
                self._finish(number, touched)
            self._dispatch(touched)
        assert all(self.ended)
        return Times(tuple(self.start), tuple(self.end))

    def _finish(self, number: int, touched: set[str]) -> None:
        """A task has ended; note the resources that may have something to start."""
        stack = [number]
        while stack:
            done = stack.pop()
            self.end[done], self.ended[done] = self.now, True
            task = self.work.tasks[done]
            if task.resource:
                touched.add(task.resource)
            else:
                self.start[done] = self.now
            for follower in self.followers[done]:
                self.missing[follower] -= 1
                if self.missing[follower] == 0:
                    resource = self.work.tasks[follower].resource
                    if not resource:
                        stack.append(follower)
                        continue
                    touched.add(resource)
                    if resource in self.pools:
                        self._arrive(follower)

    def _arrive(self, number: int) -> None:
        self.pools[self.work.tasks[number].resource].append((number, self.arrivals))
        self.arrivals += 1

    def _dispatch(self, touched: set[str]) -> None:
        """Start what can start now; tasks without duration end at once."""
        while touched:
            again: set[str] = set()
            for resource in sorted(touched):
                while resource not in self.busy and (number := self._next(resource)) is not None:
                    needless = self._is_needless(number)
                    if needless and self._put_off(number):
                        continue
                    self.start[number] = self.now
                    seconds = 0.0 if needless else self.work.tasks[number].seconds
                    if seconds == 0:
                        self._finish(number, again)
                    else:
                        self.busy.add(resource)
                        self.active[number] = [seconds, self.now, 1.0, self.now + seconds]
            touched = again

    def _is_needless(self, number: int) -> bool:
        over = self.work.until.get(number, (None,))[0]
        return over is not None and self.ended[over] and self.end[over] < self.now

    def _put_off(self, number: int) -> bool:
        """Let a needless task come again when what it waits for has ended; False if that is so."""
        _, until = self.work.until[number]
        if self.ended[until]:
            return False
        self.missing[number] = 1
        self.followers[until].append(number)
        return True

    def _next(self, resource: str) -> int | None:
        pool = self.pools.get(resource)
        if pool is not None:
            if not pool:
                return None
            key = self.work.free[resource]
            chosen = min(pool, key=lambda entry: key(entry[0], entry[1], self._has_ended))
            pool.remove(chosen)
            return chosen[0]
        queue = self.queues[resource]
        return queue.popleft() if queue and self.missing[queue[0]] == 0 else None

    def _has_ended(self, number: int) -> bool:
        return self.ended[number]

    def _share(self) -> None:
        """Set the speed of every active task from now on."""
        speeds = dict.fromkeys(self.active, 1.0)
        for _ in self.work.capacities:
            wanted = dict.fromkeys(self.work.capacities, 0.0)
            for number, speed in speeds.items():
                for name, rate in self.work.tasks[number].uses:
                    wanted[name] += rate * speed
            scarcest = max(wanted, key=lambda name: wanted[name] / self.work.capacities[name])
            share = self.work.capacities[scarcest] / wanted[scarcest] if wanted[scarcest] else 1.0
            if share >= 1:
                break
            for number in speeds:
                if any(name == scarcest for name, _ in self.work.tasks[number].uses):
                    speeds[number] *= share
        for number, entry in self.active.items():
            speed = speeds[number]
            if speed != entry[2]:
                left = max(0.0, entry[0] - (self.now - entry[1]) * entry[2])
                entry[:] = [left, self.now, speed, self.now + left / speed]

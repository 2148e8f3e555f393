"""Follows a learned itinerary: issues its transfers as slots become free, and notes what really happens.

At the first visit of a step the itinerary of the last step that began alike is taken as the prediction. When the
program leaves it, the rest of the plan is dropped, chunks are loaded on demand until the step ends, and the new
itinerary is learned. Leaving the plan costs time, never correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ramtorch_core.memory.ranges import Kind, Range, finish
from ramtorch_core.memory.weights import WeightGroup
from ramtorch_core.memory.window import Slot, Window
from ramtorch_core.plan.itinerary import Direction, Itinerary, Visit
from ramtorch_core.plan.transfers import Transfer, TransferPlan, plan_transfers


@dataclass(eq=False, slots=True)
class OpenVisit:
    """A visit under way: its position in the step, and the slot that holds its chunk."""

    group: WeightGroup
    direction: Direction
    position: int
    slot: Slot
    step: object  # of which step: one that was abandoned has nothing left to close
    range: Range | None


_Beginning = tuple[object, Visit, bool]


class Masters(Protocol):
    """Who knows the state of the groups' masters."""

    def refresh(self, group: WeightGroup) -> bool:
        """Bring a group's arena up to date before a copy; whether the group had been written."""

    def is_pending(self, group: WeightGroup) -> bool:
        """Whether an update of the group is under way, so that it cannot be copied now."""

    def wait(self, group: WeightGroup) -> None:
        """Wait until it can."""


class Follower:
    """The visits of one window.

    Args:
        groups: by index, as visits name them.

    Attributes:
        forwards: how many forward visits each chunk has had in the step under way, recomputation not counted.
    """

    def __init__(self, window: Window, groups: Sequence[WeightGroup], masters: Masters) -> None:
        self.window, self.groups, self._masters = window, groups, masters
        self.forwards: Counter[int] = Counter()
        self.visits: list[Visit] = []  # of the step under way
        self.transfers: list[Transfer] = []  # issued by plan, and on demand
        self.last: tuple[Itinerary, tuple[Transfer, ...]] = ((), ())
        self.visited: set[int] = set()
        self.on_demand = 0  # copies that no plan foresaw, over the whole life
        self._ended: list[bool] = []
        self._step = object()
        self._plan: TransferPlan | None = None
        self._issued = 0
        self._order = list(range(len(window.slots)))  # by number in transfers: index of the slot
        self._clock = 0
        self._backward: OpenVisit | None = None
        self._beginning: _Beginning | None = None
        self._previous: object = None
        self._learned: dict[_Beginning, TransferPlan] = {}
        self._successor: dict[object, TransferPlan] = {}

    def open(self, group: WeightGroup, direction: Direction) -> OpenVisit:
        """Begin a visit: afterwards the current stream may read the group's weights in the visit's slot.

        A backward visit ends when the next visit begins, at the latest.

        Raises:
            WindowError: every slot is in use by visits that run inside one another.
        """
        self.close_backward()
        self._masters.wait(group)
        visit, position = Visit(direction, group.index), len(self.visits)
        if direction is Direction.FORWARD and torch._C._current_graph_task_id() == -1:
            self.forwards[group.index] += 1
        if position == 0:
            self._beginning = (self._previous, visit, torch.is_grad_enabled())
            likely = self._learned.get(self._beginning) or self._learned.get((None, *self._beginning[1:]))
            if likely is None or likely is not self._plan:  # else it was begun by `prefetch`
                self._begin_plan(likely)
        self.visits.append(visit)
        self.visited.add(group.index)
        self._ended.append(False)
        slot = self._planned_slot(position, visit) or self._slot_on_demand(group, position)
        self._clock += 1
        self.window.acquire(slot, self._clock)
        shown = self.window.device.ranges.begin(Kind.VISIT, visit)
        opened = OpenVisit(group, direction, position, slot, self._step, shown)
        if direction is Direction.BACKWARD:
            self._backward = opened
        return opened

    def close(self, opened: OpenVisit) -> None:
        """End a visit: its slot may be overwritten after the work issued so far. Idempotent."""
        if opened is self._backward:
            self._backward = None
        if opened.step is self._step and not self._ended[opened.position]:
            self._ended[opened.position] = True
            finish(opened.range)
            self.window.release(opened.slot)
            self._issue()

    def keep_open(self, opened: OpenVisit) -> None:
        """The next visits run inside this one, so they do not end it."""
        if self._backward is opened:
            self._backward = None

    def may_close(self, opened: OpenVisit) -> None:
        """The visits inside are over: the next one ends this backward visit."""
        self.close_backward()
        self._backward = opened

    def close_backward(self) -> None:
        """End the backward visit under way, if there is one."""
        if self._backward is not None:
            self.close(self._backward)

    def finish_step(self) -> None:
        """The step is over: learn its itinerary. What the slots hold is not trusted in the next step."""
        self.close_backward()
        if not self.visits or not all(self._ended):
            return
        itinerary = tuple(self.visits)
        if self._beginning is not None:
            known = self._learned.get(self._beginning)
            if known is None or known.itinerary != itinerary:
                known = self._learned[self._beginning] = plan_transfers(itinerary, len(self.window.slots))
            self._successor[self._beginning[0]] = known
        self._previous = (itinerary[0], len(itinerary))
        self.last = (itinerary, tuple(self.transfers))
        self._clear()

    def prefetch(self) -> None:
        """Between two steps: start the copies that the next one needs first, if it is like the last that came here."""
        if not self.visits and self._plan is None:
            self._begin_plan(self._successor.get(self._previous))
            self._issue()

    def abandon_step(self) -> None:
        """The step failed: close what is open and learn nothing."""
        for slot in self.window.slots:
            while slot.in_use:
                self.window.release(slot)
        self._backward, self._previous = None, None
        self._clear()

    def _clear(self) -> None:
        self.visits, self.transfers, self._ended, self._plan = [], [], [], None
        self.forwards.clear()
        self._step = object()
        self.window.forget()

    def _begin_plan(self, plan: TransferPlan | None) -> None:
        """A plan does not care which slot has which number: its first copies go to those used longest ago."""
        self._plan, self._issued = plan, 0
        self._order = sorted(range(len(self.window.slots)), key=lambda index: self.window.slots[index].last_use)

    def _slot(self, number: int) -> Slot:
        return self.window.slots[self._order[number]]

    def _planned_slot(self, position: int, visit: Visit) -> Slot | None:
        plan = self._plan
        if plan is None:
            return None
        if position < len(plan.itinerary) and plan.itinerary[position] == visit:
            self._issue()
            slot = self._slot(plan.slot_of_visit[position])
            self._freshen(self.groups[visit.chunk])
            if slot.group is self.groups[visit.chunk]:
                return slot
            if not slot.in_use:  # written since it was copied
                self._load(Transfer(visit.chunk, plan.slot_of_visit[position], needed_by=position, after=position - 1))
                self.on_demand += 1
                return slot
        self._plan = None
        return None

    def _slot_on_demand(self, group: WeightGroup, position: int) -> Slot:
        self._freshen(group)
        slot = self.window.find(group)
        if slot is not None:
            return slot
        slot = self.window.victim()
        self._load(Transfer(group.index, self._order.index(slot.index), needed_by=position, after=position - 1))
        self.on_demand += 1
        return slot

    def _issue(self) -> None:
        """Start every planned transfer whose slot is free."""
        while self._plan is not None and self._issued < len(self._plan.transfers):
            transfer = self._plan.transfers[self._issued]
            may_start = transfer.after < 0 or (transfer.after < len(self._ended) and self._ended[transfer.after])
            group = self.groups[transfer.chunk]
            if not may_start or self._slot(transfer.slot).in_use or self._masters.is_pending(group):
                return
            self._issued += 1
            self._freshen(group)
            self._load(transfer)

    def _freshen(self, group: WeightGroup) -> None:
        """What a slot holds of a group that was written since is out of date."""
        if self._masters.refresh(group):
            self.window.forget(group)

    def _load(self, transfer: Transfer) -> None:
        group = self.groups[transfer.chunk]
        self.window.forget(group)
        self.window.load(group, self._slot(transfer.slot))
        self.transfers.append(transfer)

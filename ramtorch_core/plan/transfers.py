"""From visits and slots to transfers. The eviction rule lives here and nowhere else.

A transfer copies a chunk into a slot before the visit that needs it, and may start as soon as the last visit that used
the slot's former content has ended. The runtime executes the list as it stands; it never searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramtorch_core.errors import PlanError
from ramtorch_core.plan.itinerary import Visit

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy `chunk` into `slot` for visit number `needed_by`, once visit number `after` has ended (-1: at once)."""

    chunk: int
    slot: int
    needed_by: int
    after: int

    def __str__(self) -> str:
        return f"chunk {self.chunk} -> slot {self.slot} after visit {self.after} for visit {self.needed_by}"


@dataclass(frozen=True, slots=True)
class SlotState:
    """What the eviction rule may know of a slot: its last use so far, and the next use of its content (or `NEVER`)."""

    slot: int
    last_use: int
    next_use: int


EvictionRule = Callable[[Sequence[SlotState]], int]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Transfers in the order in which they are issued, and for each visit the slot that holds its chunk."""

    itinerary: tuple[Visit, ...]
    slots: int
    transfers: tuple[Transfer, ...]
    slot_of_visit: tuple[int, ...]


def farthest_next_use(states: Sequence[SlotState]) -> int:
    """Evict what is needed again last, as L. A. Belady's MIN (1966), but never what the visit just before used.

    That slot would be free only when the copy is needed, so that nothing could hide the copy; where passes in one
    direction follow each other, MIN would choose it each time. Of all rules that spare it, this one needs the fewest
    copies. Among chunks that are never needed again the one used longest ago goes first: its slot is free the earliest.
    """
    latest = max(state.last_use for state in states)
    free = [state for state in states if state.last_use < latest] or states
    return max(free, key=lambda state: (state.next_use, -state.last_use, -state.slot)).slot


def plan_transfers(itinerary: Sequence[Visit], slots: int, evict: EvictionRule = farthest_next_use) -> TransferPlan:
    """The transfers that serve `itinerary` from `slots` empty slots.

    A visit whose chunk is still in a slot needs no transfer. Costs O(visits x slots).

    Raises:
        PlanError: `slots` is less than 1, or `evict` names a slot that does not exist.
    """
    if slots < 1:
        raise PlanError(f"{slots} slots cannot hold a chunk: at least 1 is needed")
    next_use = _next_uses(itinerary)
    holds: list[int | None] = [None] * slots
    last_use = [-1] * slots
    upcoming = [NEVER] * slots
    transfers, slot_of_visit = [], []
    for position, visit in enumerate(itinerary):
        if visit.chunk in holds:
            slot = holds.index(visit.chunk)
        else:
            slot = evict([SlotState(s, last_use[s], upcoming[s]) for s in range(slots)])
            if not 0 <= slot < slots:
                raise PlanError(f"the eviction rule chose slot {slot} of {slots}")
            transfers.append(Transfer(visit.chunk, slot, needed_by=position, after=last_use[slot]))
            holds[slot] = visit.chunk
        last_use[slot], upcoming[slot] = position, next_use[position]
        slot_of_visit.append(slot)
    return TransferPlan(tuple(itinerary), slots, tuple(transfers), tuple(slot_of_visit))


def check_transfers(plan: TransferPlan) -> None:
    """Replay `plan` and prove that every visit finds its chunk and no transfer overwrites a chunk that is still needed.

    Raises:
        PlanError: naming the visit or transfer, with the visits printed and the bad one in brackets.
    """
    holds: list[int | None] = [None] * plan.slots
    last_use = [-1] * plan.slots
    waiting = list(plan.transfers)
    if len(plan.slot_of_visit) != len(plan.itinerary):
        raise PlanError(f"{len(plan.slot_of_visit)} slots are given for {len(plan.itinerary)} visits")
    for position, visit in enumerate(plan.itinerary):
        while waiting and waiting[0].needed_by <= position:
            transfer = waiting.pop(0)
            if not 0 <= transfer.slot < plan.slots:
                raise PlanError(_marked(plan, position, f"{transfer} names a slot that does not exist"))
            if transfer.after < last_use[transfer.slot]:
                reason = f"{transfer} overwrites a chunk that visit {last_use[transfer.slot]} still uses"
                raise PlanError(_marked(plan, position, reason))
            if transfer.after >= position:
                raise PlanError(_marked(plan, position, f"{transfer} waits for its own visit or a later one"))
            holds[transfer.slot] = transfer.chunk
        slot = plan.slot_of_visit[position]
        if not 0 <= slot < plan.slots or holds[slot] != visit.chunk:
            found = holds[slot] if 0 <= slot < plan.slots else "nothing"
            raise PlanError(_marked(plan, position, f"visit {position} finds {found} in slot {slot}"))
        last_use[slot] = position
    if waiting:
        raise PlanError(f"{waiting[0]} serves no visit of {len(plan.itinerary)}")


def _next_uses(itinerary: Sequence[Visit]) -> list[int]:
    """For each visit the position of the next visit of the same chunk, or `NEVER`."""
    result, seen = [NEVER] * len(itinerary), dict[int, int]()
    for position in range(len(itinerary) - 1, -1, -1):
        chunk = itinerary[position].chunk
        result[position] = seen.get(chunk, NEVER)
        seen[chunk] = position
    return result


def _marked(plan: TransferPlan, position: int, reason: str) -> str:
    cells = [f"[{visit}]" if i == position else str(visit) for i, visit in enumerate(plan.itinerary)]
    return f"{reason}\n{' '.join(cells)}"

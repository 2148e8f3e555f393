"""The visits of one GPU, laid out as work: transfers into its window, compute, and gradients on their way out.

The rules are those of the engine (`engine/follow.py`, `memory/window.py`, `memory/gradients.py`): transfers run in the
order of the plan, each once the host has issued the visit that ends its slot's former use; a visit waits for its
transfer; compute waits before the gradients of more than `GRADIENTS_IN_FLIGHT` chunks would be on their way. The host
issues one visit of a lane after the other: the device can begin what has been issued so far, and ends no visit before
it is issued to its end.

Memory is counted in the order in which it is allocated, that of compute: an allocator knows no other time. A gradient
keeps its place until the copies of the two after it have begun, or the backward is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ramtorch_core.plan.itinerary import Direction, Visit
from ramtorch_core.plan.transfers import Transfer, plan_transfers
from ramtorch_core.simulate.clock import Kind, Work
from ramtorch_core.simulate.costs import BOTH_WAYS, HOST_MEMORY, INWARD, ChunkCost, traffic
from ramtorch_core.simulate.timeline import Holding

GRADIENTS_IN_FLIGHT = 2


class Lane:
    """One GPU: its streams, its window, and what it holds.

    Args:
        name: distinguishes the resources of several GPUs; empty for the only one.
        chunks: costs, by index.
        window: slots; fewer are allocated when fewer chunks stream.
        resident: indices of chunks that are never copied.
        asynchronous: copies go on beside compute.
        shared: per direction, the name of what issues visits, where several GPUs share it; by default each has its own.

    Attributes:
        compute, h2d, d2h: names of the streams.
        issuing: name of the host's thread that issues the rest.
        bus, inward: the capacities that its copies in both directions share, and those to the device.
        memory: place of the bytes that come and go; `weight_bytes` are there at any time.
        issued: the last thing that the host did.
        updated: chunk -> the task that last wrote its master.
        stale: chunks whose masters the host casts again before it copies them.
        holdings: what is held when.
        transfers: how many copies into slots were planned.
    """

    def __init__(
        self,
        work: Work,
        name: str,
        chunks: Sequence[ChunkCost],
        *,
        window: int,
        resident: frozenset[int] = frozenset(),
        asynchronous: bool = True,
        shared: Mapping[Direction, str] | None = None,
    ) -> None:
        prefix = f"{name} " if name else ""
        self.compute, self.h2d, self.d2h = (f"{prefix}{stream}" for stream in ("compute", "H2D", "D2H"))
        if not asynchronous:
            self.h2d = self.d2h = self.compute
        self.issuing, self._shared = f"{prefix}issuing", shared or {}
        work.order += [*self._shared.values(), self.issuing, self.compute, self.h2d, self.d2h]
        self.memory, self._place = f"{prefix}bytes", f"{prefix}chunks"
        self.bus, self.inward = f"{prefix}{BOTH_WAYS}", f"{prefix}{INWARD}"
        self.work, self.chunks, self.resident = work, chunks, resident
        streamed = [chunk for index, chunk in enumerate(chunks) if index not in resident]
        self.slots = min(window, len(streamed))
        slot_bytes = max((chunk.weight_bytes for chunk in streamed), default=0)
        self.weight_bytes = self.slots * slot_bytes + sum(chunks[index].resident_bytes for index in resident)
        self.holdings: list[Holding] = []
        self.updated: dict[int, int] = {}
        self.stale: set[int] = set()
        self.transfers = 0
        self._freed: dict[int, int] = {}  # slot -> the end of the last visit that used it
        self._moving: deque[tuple[int, float, int]] = deque()  # copies of gradients, their bytes, and since when
        self._gates: list[int] = []  # what must have ended before compute goes on
        self._rooms: list[int] = []  # and before the host does
        self.issued: int | None = None
        self._copied: int | None = None  # the last transfer
        self._reads_master: int | None = None  # the last one that reads masters
        self.begin(())

    def begin(self, itinerary: Iterable[Visit], since: int | None = None) -> None:
        """Plan the transfers of the next visits, which come after `since`. What the slots hold is not trusted."""
        plan = plan_transfers([v for v in itinerary if v.chunk not in self.resident], max(1, self.slots))
        order = sorted(range(max(1, self.slots)), key=lambda slot: self._freed.get(slot, -1))  # longest free first
        self._slot_of_visit = tuple(order[slot] for slot in plan.slot_of_visit)
        self._itinerary, self._since = plan.itinerary, since
        transfers = [replace(transfer, slot=order[transfer.slot]) for transfer in plan.transfers]
        self._waiting = deque(transfers)
        self._visits: list[int] = []  # ends of the streamed visits so far
        self._content: dict[int, int] = {}  # slot -> the transfer that filled it
        self._last = _last_uses(self._slot_of_visit, transfers)
        self.transfers += len(plan.transfers)

    def spend(self, seconds: float, label: str, after: Iterable[int | None] = ()) -> None:
        """The host does something that is no work for the device."""
        if seconds:
            waits = [self.issued, self._since, *self._rooms, *after]
            self._rooms = []
            self.issued = self.work.add(self.issuing, label, Kind.ISSUE, seconds, waits)

    def let_host_write(self) -> None:
        """The host waits until no transfer reads a master."""
        if self._reads_master is not None:
            self._rooms.append(self._reads_master)

    def visit(
        self,
        chunk: int,
        direction: Direction,
        kind: Kind,
        seconds: float,
        label: str,
        after: Iterable[int | None] = (),
        *,
        issue: float = 0.0,
        known: int | None = None,
    ) -> int:
        """The next visit: `seconds` of compute with the chunk's weights. Returns its task.

        Args:
            issue: seconds that the host takes to issue it.
            known: the task after which the host can.
        """
        if chunk not in self.resident and not self._visits:
            self.copy_ahead()
        needs = [*after, self.issued, self._since]
        if issue:
            update = None if chunk in self.resident else self.updated.get(chunk)
            needs.append(self.issue(issue, label, [known, update], direction))
        if chunk in self.resident:
            task = self.step(kind, seconds, label, needs)
            self.issued_too(task, issue)
            return task
        position = len(self._visits)
        assert self._itinerary[position] == Visit(direction, chunk), "visits follow the itinerary"
        slot = self._slot_of_visit[position]
        task = self.step(kind, seconds, label, [*needs, self._content[slot]])
        self._freed[slot] = self.issued_too(task, issue)
        self._visits.append(self._freed[slot])
        if position in self._last:
            self.holdings.append(Holding(self._place, 1, self._content[slot], task))
        self.copy_ahead()
        return task

    def issue(self, seconds: float, label: str, after: Iterable[int | None], direction: Direction) -> int:
        """The host issues compute; what begins to be issued can begin. Returns that moment."""
        waits = [self.issued, self._since, *self._rooms, *after]
        self._rooms = []
        shared = self._shared.get(direction)
        begin = self.work.join(waits) if shared is None else self.work.add(shared, "", Kind.ISSUE, 0.0, waits)
        self.issued = self.work.add(shared or self.issuing, f"i{label}", Kind.ISSUE, seconds, [begin])
        return begin

    def issued_too(self, task: int, issue: float) -> int:
        """The end of compute that the host took some time to issue: when both are over."""
        return self.work.add(self.compute, "", Kind.ISSUE, 0.0, [task, self.issued]) if issue else task

    def step(self, kind: Kind, seconds: float, label: str, after: Iterable[int | None] = (), **more: Any) -> int:
        """Compute that needs no chunk's weights; `more` as for `Work.add`. Returns its task."""
        gates, self._gates = self._gates, []
        return self.work.add(self.compute, label, kind, seconds, [*after, *gates], **more)

    def recall(self, chunk: int, visit: int, arrived: int) -> int:
        """Bring the sum on the host back, in the order of compute, to be added to after `visit`. Returns the task."""
        cost = self.chunks[chunk]
        uses = traffic(cost.gradient_bytes, cost.recall, HOST_MEMORY, self.bus, self.inward)
        return self.step(Kind.GRADIENT, cost.recall, f"g{chunk}", [visit, arrived], uses=uses)

    def send_gradient(
        self,
        chunk: int,
        visit: int,
        *,
        add: bool = False,
        back: bool = False,
        room: int | None = None,
        rounded: bool = False,
        nbytes: float | None = None,
        since: int | None = None,
    ) -> int:
        """Move the gradient that `visit` produced to the host. Returns the task.

        Args:
            add: to what is there.
            back: bring what is there back instead, and add to it on the GPU.
            room: the task that makes room for it; until then, the host issues nothing else.
            rounded: it leaves in the master's dtype too, beside a sum in a wider one.
            nbytes: that it takes on the GPU, by default what a backward leaves.
            since: the task since which it is there, by default `visit`.
        """
        cost = self.chunks[chunk]
        seconds = (cost.accumulate or cost.gradient) if add else cost.gradient
        came, left = cost.added_bytes if add else (cost.gradient_bytes * back, cost.gradient_bytes * (not back))
        if rounded:
            left += cost.own_gradient_bytes
            seconds *= left / cost.gradient_bytes
        uses = traffic(came + left, seconds, HOST_MEMORY, self.bus) | traffic(came, seconds, self.inward)
        needs = [visit, room, self.issued]
        task = self.work.add(self.d2h, f"g{chunk}", Kind.GRADIENT, seconds, needs, uses)
        if room is not None:
            self._gates.append(room)
            self._rooms.append(room)
        self._moving.append((task, cost.left_bytes if nbytes is None else nbytes, visit if since is None else since))
        if len(self._moving) > GRADIENTS_IN_FLIGHT:
            moved, held, began = self._moving.popleft()
            self._gates.append(moved)
            self.hold(held, began, visit)
        return task

    def all_sent(self, last: int) -> None:
        """The backward that ends with the visit `last` is over, and with it all gradients are gone."""
        while self._moving:
            _, held, began = self._moving.popleft()
            self.hold(held, began, last)
        self._gates = []

    def copy_ahead(self) -> None:
        """Issue the transfers whose slots are free once the visits so far are over."""
        while self._waiting and self._waiting[0].after < len(self._visits):
            self._copy(self._waiting.popleft())

    def hold(self, nbytes: float, since: int, until: int | None) -> None:
        """Bytes on the GPU from the start of one task to the end of another."""
        if nbytes:
            self.holdings.append(Holding(self.memory, nbytes, since, until))

    def peak_chunks(self, peaks: dict[str, float]) -> int:
        """The largest number of chunks that were on the GPU at once, resident ones included."""
        return len(self.resident) + int(peaks.get(self._place, 0))

    def peak_bytes(self, peaks: dict[str, float]) -> float:
        """The most bytes in use on the GPU at once."""
        return self.weight_bytes + peaks.get(self.memory, 0.0)

    def _copy(self, transfer: Transfer) -> None:
        cost = self.chunks[transfer.chunk]
        former = self._visits[transfer.after] if transfer.after >= 0 else self._freed.get(transfer.slot)
        if transfer.chunk in self.stale:
            self.stale.remove(transfer.chunk)
            uses = traffic(cost.master_bytes + cost.weight_bytes, cost.recast, HOST_MEMORY)
            waits = [self.issued, self._since, self.updated.get(transfer.chunk)]
            self.issued = self.work.add(self.issuing, f"c{transfer.chunk}", Kind.ISSUE, cost.recast, waits, uses)
        needs = [self._since, self.issued, self._copied, former, self.updated.get(transfer.chunk)]
        uses = traffic(cost.weight_bytes, cost.transfer, HOST_MEMORY, self.bus, self.inward)
        task = self.work.add(self.h2d, f"t{transfer.chunk}", Kind.TRANSFER, cost.transfer, needs, uses)
        self._content[transfer.slot] = self._copied = task
        if cost.weight_bytes >= cost.master_bytes:
            self._reads_master = task


def _last_uses(slot_of_visit: Sequence[int], transfers: Sequence[Transfer]) -> frozenset[int]:
    """Positions of visits after which a slot's content is not used again."""
    replaced = frozenset(transfer.after for transfer in transfers if transfer.after >= 0)
    return replaced.union({slot: position for position, slot in enumerate(slot_of_visit)}.values())

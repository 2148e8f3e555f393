"""The visits of one GPU, laid out as work: transfers into its window, compute, and gradients on their way out.

The rules are those of the engine (`engine/follow.py`, `memory/window.py`, `memory/gradients.py`): transfers run in the
order of the plan, each after the visit that ends its slot's former use; a visit waits for its transfer; compute waits
before the gradients of more than `GRADIENTS_IN_FLIGHT` chunks would be on their way. The host issues one visit after
the other: the device can begin what has been issued so far, and ends no visit before it is issued to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.plan.itinerary import Direction, Visit
from ramtorch_core.plan.transfers import Transfer, plan_transfers
from ramtorch_core.simulate.clock import Kind, Work
from ramtorch_core.simulate.costs import BOTH_WAYS, HOST_MEMORY, ChunkCost, traffic
from ramtorch_core.simulate.timeline import Holding

GRADIENTS_IN_FLIGHT = 2


class Lane:
    """One GPU: its streams, its window, and what it holds.

    Args:
        name: distinguishes the resources of several GPUs; empty for the only one.
        chunks: costs, by index.
        window: slots; fewer are allocated when fewer chunks stream.
        resident: indices of chunks that are never copied.

    Attributes:
        compute, h2d, d2h: names of the streams.
        issuing: name of the host's thread that issues the visits.
        bus: the capacity that its copies in both directions share.
        memory: place of the bytes that come and go; `weight_bytes` are there at any time.
        updated: chunk -> the task that last wrote its master.
        holdings: what is held when.
        transfers: how many copies into slots were planned.

    Raises:
        ConfigurationError: `window` is less than 1.
    """

    def __init__(
        self, work: Work, name: str, chunks: Sequence[ChunkCost], *, window: int, resident: frozenset[int] = frozenset()
    ) -> None:
        if window < 1:
            raise ConfigurationError(f"window={window}: at least 1 slot is needed; 2 let copies overlap compute")
        prefix = f"{name} " if name else ""
        self.compute, self.h2d, self.d2h = (f"{prefix}{stream}" for stream in ("compute", "H2D", "D2H"))
        self.issuing = f"{prefix}issuing"
        work.order += [self.issuing, self.compute, self.h2d, self.d2h]
        self.memory, self._place, self.bus = f"{prefix}bytes", f"{prefix}chunks", f"{prefix}{BOTH_WAYS}"
        self.work, self.chunks, self.resident = work, chunks, resident
        streamed = [chunk for index, chunk in enumerate(chunks) if index not in resident]
        self.slots = min(window, len(streamed))
        slot_bytes = max((chunk.weight_bytes for chunk in streamed), default=0)
        self.weight_bytes = self.slots * slot_bytes + sum(chunks[index].resident_bytes for index in resident)
        self.holdings: list[Holding] = []
        self.updated: dict[int, int] = {}
        self.transfers = 0
        self._freed: dict[int, int] = {}  # slot -> the last visit that used it
        self._moving: deque[int] = deque()
        self._gates: list[int] = []  # what must have ended before compute goes on
        self._rooms: list[int] = []  # and before the host does
        self._issued: int | None = None  # the last visit, on the host's side
        self.begin(())

    def begin(self, itinerary: Iterable[Visit], since: int | None = None) -> None:
        """Plan the transfers of the next visits, which come after `since`. What the slots hold is not trusted."""
        plan = plan_transfers([v for v in itinerary if v.chunk not in self.resident], max(1, self.slots))
        self._slot_of_visit, self._itinerary, self._since = plan.slot_of_visit, plan.itinerary, since
        self._waiting = deque(plan.transfers)
        self._visits: list[int] = []  # tasks of the streamed visits so far
        self._content: dict[int, int] = {}  # slot -> the transfer that filled it
        self._last = _last_uses(plan.slot_of_visit, plan.transfers)
        self.transfers += len(plan.transfers)

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
    ) -> int:
        """The next visit: `seconds` of compute with the chunk's weights. Returns its task.

        Args:
            issue: seconds that the host takes to issue it.
        """
        needs = [*after, self._since]
        if issue:
            waits = [self._issued, self._since, *self._rooms]
            if chunk not in self.resident:
                waits.append(self.updated.get(chunk))
            needs.append(self.work.join(waits))
            self._rooms = []
            self._issued = self.work.add(self.issuing, f"i{label}", Kind.ISSUE, issue, waits)
        task = self._compute(chunk, direction, kind, seconds, label, needs)
        if issue:
            self.work.add(self.compute, "", Kind.ISSUE, 0.0, [self._issued])
        return task

    def _compute(
        self, chunk: int, direction: Direction, kind: Kind, seconds: float, label: str, needs: list[int | None]
    ) -> int:
        if chunk in self.resident:
            return self.step(kind, seconds, label, needs)
        position = len(self._visits)
        assert self._itinerary[position] == Visit(direction, chunk), "visits follow the itinerary"
        while self._waiting and self._waiting[0].needed_by == position:
            self._copy(self._waiting.popleft())
        slot = self._slot_of_visit[position]
        task = self.step(kind, seconds, label, [*needs, self._content[slot]])
        self._visits.append(task)
        self._freed[slot] = task
        if position in self._last:
            self.holdings.append(Holding(self._place, 1, self._content[slot], task))
        return task

    def step(self, kind: Kind, seconds: float, label: str, after: Iterable[int | None] = ()) -> int:
        """Compute that needs no chunk's weights. Returns its task."""
        gates, self._gates = self._gates, []
        return self.work.add(self.compute, label, kind, seconds, [*after, *gates])

    def send_gradient(self, chunk: int, visit: int, *, add: bool = False, room: int | None = None) -> int:
        """Move the gradient that `visit` produced to the host. Returns the task.

        Args:
            add: to what is there.
            room: the task that makes room for it; until then, the host issues nothing else.
        """
        cost = self.chunks[chunk]
        seconds = (cost.accumulate or 2 * cost.gradient) if add else cost.gradient
        uses = traffic(cost.gradient_bytes * (1 + add), seconds, HOST_MEMORY, self.bus)
        needs = [visit, room, self._issued]
        task = self.work.add(self.d2h, f"g{chunk}", Kind.GRADIENT, seconds, needs, uses)
        if room is not None:
            self._gates.append(room)
            self._rooms.append(room)
        self._moving.append(task)
        if len(self._moving) > GRADIENTS_IN_FLIGHT:
            self._gates.append(self._moving.popleft())
        return task

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
        needs = [self._since, former, self.updated.get(transfer.chunk)]
        uses = traffic(cost.weight_bytes, cost.transfer, HOST_MEMORY, self.bus)
        task = self.work.add(self.h2d, f"t{transfer.chunk}", Kind.TRANSFER, cost.transfer, needs, uses)
        self._content[transfer.slot] = task


def _last_uses(slot_of_visit: Sequence[int], transfers: Sequence[Transfer]) -> frozenset[int]:
    """Positions of visits after which a slot's content is not used again."""
    replaced = frozenset(transfer.after for transfer in transfers if transfer.after >= 0)
    return replaced.union({slot: position for position, slot in enumerate(slot_of_visit)}.values())

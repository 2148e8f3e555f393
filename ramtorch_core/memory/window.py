"""The window: a device's slots, allocated once, and the copies into them.

Per slot two events, and nothing else, order the streams:
  loaded  recorded on the copy stream after the copy; compute waits for it before it reads.
  free    recorded on the compute stream when a visit ends; the copy stream waits for it before it overwrites.
A third, `begun`, tells others who use the bus that a copy is under way.
No tensor here is ever handed back to the allocator while a step runs, so no `record_stream` is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ramtorch_core.errors import WindowError
from ramtorch_core.memory.device import COMPLETE, Device, Event
from ramtorch_core.memory.ranges import FOR_TRANSFER, Kind
from ramtorch_core.memory.weights import WeightGroup


class Slot:
    """One reusable device buffer: which group it holds, and the events that make it safe to read or to overwrite."""

    def __init__(self, index: int, buffer: Tensor) -> None:
        self.index, self.buffer = index, buffer
        self.group: WeightGroup | None = None
        self.begun: Event = COMPLETE
        self.loaded: Event = COMPLETE
        self.free: Event = COMPLETE
        self.users = 0  # visits under way; more than one when a chunk runs inside itself
        self.last_use = -1
        self._views: dict[WeightGroup, tuple[object, list[Tensor]]] = {}

    @property
    def in_use(self) -> bool:
        """Whether a visit under way reads the slot."""
        return self.users > 0

    def views(self, group: WeightGroup) -> list[Tensor]:
        """The group's weights inside this slot, without gradient history, made once per layout."""
        made = self._views.get(group)
        if made is None or made[0] is not group.arena:
            with torch.inference_mode(False), torch.no_grad():
                made = (group.arena, [weight.view(self.buffer) for weight in group.weights])
            self._views[group] = made
        return made[1]


class Window:
    """`slots` buffers of `nbytes` bytes each on `device`.

    Args:
        poison: fill a slot with NaN before each copy into it; for tests that prove the ordering.
    """

    def __init__(self, device: Device, slots: int, nbytes: int, *, poison: bool = False) -> None:
        self.device, self.nbytes, self.poison = device, nbytes, poison
        self.stream = device.stream()
        self.copied_bytes = 0
        with torch.inference_mode(False):
            buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device.torch) for _ in range(slots)]
        self.slots = [Slot(index, buffer) for index, buffer in enumerate(buffers)]
        for slot in self.slots:
            slot.free = device.record()  # what used this memory before, and gave it back, may still run

    def find(self, group: WeightGroup) -> Slot | None:
        """The slot that holds `group` or will, its copy being under way."""
        return next((slot for slot in self.slots if slot.group is group), None)

    def victim(self) -> Slot:
        """For a visit that no plan foresaw: an empty slot, else the one used longest ago, never one in use.

        Raises:
            WindowError: every slot is in use.
        """
        candidates = [slot for slot in self.slots if not slot.in_use]
        if not candidates:
            held = ", ".join(f"'{slot.group.name}'" for slot in self.slots if slot.group is not None)
            raise WindowError(
                f"all {len(self.slots)} slots are in use, by {held}: chunks that run inside one another need a slot "
                f"each. Raise window= by one, or let the inner modules be part of the outer chunk."
            )
        return min(candidates, key=lambda slot: (slot.group is not None, slot.last_use))

    def load(self, group: WeightGroup, slot: Slot) -> None:
        """Start copying `group` into `slot`, after what still reads the slot."""
        assert group.arena is not None and group.nbytes <= self.nbytes
        with torch.no_grad(), self.device.on(self.stream):
            self.device.wait(slot.free, self.stream)
            if self.poison:
                slot.buffer.fill_(255)
            slot.begun = self.device.record(self.stream)
            with self.device.ranges.span(Kind.TRANSFER, group.index):
                slot.buffer[: group.nbytes].copy_(group.arena.flat, non_blocking=True)
            slot.loaded = group.copied = self.device.record(self.stream, blocking=True)
        slot.group = group
        self.copied_bytes += group.nbytes

    def under_way(self) -> Event | None:
        """The end of the copy that uses the bus now; None if there is none. Any thread may ask."""
        return next((slot.loaded for slot in self.slots if slot.begun.query() and not slot.loaded.query()), None)

    def acquire(self, slot: Slot, clock: int) -> None:
        """Let the calling thread's stream read `slot` from now on, after earlier visits on other streams."""
        with self.device.ranges.waiting(FOR_TRANSFER):
            self.device.wait(slot.loaded)
            self.device.wait(slot.free)
        slot.users += 1
        slot.last_use = clock

    def release(self, slot: Slot) -> None:
        """The work issued so far is the last that reads `slot` in this visit."""
        slot.free = self.device.record()
        slot.users = max(0, slot.users - 1)

    def forget(self, group: WeightGroup | None = None) -> None:
        """What the slots hold of `group` (default: of every group) is out of date."""
        for slot in self.slots:
            if group is None or slot.group is group:
                slot.group = None

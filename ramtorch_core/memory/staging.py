"""Staging: page-locked host buffers through which gradients reach the updates that consume them.

A buffer holds one group's gradients, one behind the other, in the dtypes in which backward produced them. Their number
bounds the host memory that gradients take; a backward that is ahead of the updates waits for one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ramtorch_core.memory.device import Device
from ramtorch_core.memory.host import Arena
from ramtorch_core.memory.ranges import FOR_UPDATE, Kind
from ramtorch_core.memory.weights import WeightGroup

STAGING_BUFFERS = 4
"""How many groups' gradients may wait on the host for their updates. At the end of a backward that is faster than the
updates they are all full, and the next forward meets no group that is older; more would only take memory."""


class Staging:
    """Buffers of one size, allocated when they are first needed.

    Args:
        nbytes: of one buffer.
        count: how many there may be.
    """

    def __init__(self, device: Device, nbytes: int, count: int) -> None:
        self.device, self.nbytes, self.count = device, nbytes, count
        self.allocated = 0
        self._free: list[Arena] = []
        self._changed = threading.Condition()

    def take(self) -> Arena:
        """A free buffer; waits for one if all are in use.

        Raises:
            HostMemoryError: the system refuses the memory.
        """
        with self._changed:
            if not self._free and self.allocated < self.count:
                buffer = Arena(self.nbytes, self.device)
                self.allocated += 1
                return buffer
            if not self._free:
                with self.device.ranges.span(Kind.STALL, FOR_UPDATE):
                    self._changed.wait_for(lambda: self._free)
            return self._free.pop()

    def give(self, buffer: Arena) -> None:
        """Return a buffer that nobody reads any more."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def host_bytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return self.allocated * self.nbytes


class Stagings(dict[WeightGroup | None, Staging]):
    """The buffers of an engine: those that all groups share, under None, and those of single groups."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def of(self, group: WeightGroup, needed: int, groups: Sequence[WeightGroup], *, apart: bool) -> Staging:
        """What the group uses of them, with at least `needed` bytes.

        Args:
            groups: all that share a few buffers.
            apart: it has one of its own, since all groups wait at once.
        """
        key = group if apart else None
        staging = self.get(key)
        if staging is None or staging.nbytes < needed:
            nbytes = needed if apart else max([needed, *(group.nbytes for group in groups)])
            staging = self[key] = Staging(self._device, nbytes, 1 if apart else min(STAGING_BUFFERS, len(groups)))
        return staging

    def host_bytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return sum(staging.host_bytes() for staging in self.values())

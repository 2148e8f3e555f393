"""Buffers on the device through which sums in host memory pass, to be added to or rounded there.

What is on the host comes in on a stream of its own while the piece before it leaves, so that both directions of the bus
are busy; one piece in, then out, would leave one of them idle at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ramtorch_core.memory.device import Device, Event, Stream

BOUNCE_BYTES = 32 << 20
"""Of all buffers."""
BUFFERS = 2


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    left: Event  # after it, the buffer may be filled


class Bounce:
    """Buffers on the device, allocated when they are first needed.

    Args:
        outward: the stream on which pieces leave; it is the current one whenever a method is called.
    """

    def __init__(self, device: Device, outward: Stream | None) -> None:
        self._device, self._outward = device, outward
        self._inward = device.stream()
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def wait(self, event: Event) -> None:
        """What comes in from now on comes after `event`."""
        self._device.wait(event, self._inward)

    def pieces(
        self, dtype: torch.dtype, *along: Tensor, load: Callable[[Tensor, tuple[Tensor, ...]], None] | None = None
    ) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Cut vectors of the same length into pieces, each with a buffer of that length.

        What is issued between one piece and the next on the stream on which they leave may read and write the buffer.

        Args:
            load: fills a buffer from the pieces of the vectors, on the stream on which they come in.
        """
        if not self._buffers:
            memory = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, device=self._device.torch)
            free = self._device.record(self._outward)
            self._buffers = [_Buffer(part, free) for part in memory.chunk(BUFFERS)]
        count = BOUNCE_BYTES // BUFFERS // dtype.itemsize
        for pieces in zip(*(vector.split(count) for vector in along), strict=True):
            buffer = self._buffers[self._turn]
            self._turn = (self._turn + 1) % BUFFERS
            filled = buffer.memory.view(dtype)[: len(pieces[0])]
            if load is not None:
                with self._device.on(self._inward):
                    self._device.wait(buffer.left, self._inward)
                    load(filled, pieces)
                    come = self._device.record(self._inward)
                self._device.wait(come, self._outward)
            yield filled, pieces
            buffer.left = self._device.record(self._outward)

    def release(self) -> None:
        """Let the buffers go, after all copies have ended."""
        self._buffers = []

"""Buffers on the device through which what is in host memory passes, to be added to, or cast, on its way.

A piece comes in, is worked on, and leaves, on three streams: both directions of the bus are busy, and neither waits
until the small kernel of a piece finds room between those of compute, which for a large matrix product takes as long as
the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ramtorch_core.memory.device import Device, Event, Stream

BOUNCE_BYTES = 96 << 20
"""Of all buffers."""
BUFFERS = 3

Act = Callable[..., object]
"""(buffer, piece of each vector) -> whatever."""


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    left: Event  # after it, the buffer may be filled


class Bounce:
    """Buffers on the device, allocated when they are first needed.

    Args:
        outward: the stream on which pieces leave.
    """

    def __init__(self, device: Device, outward: Stream | None) -> None:
        self._device, self._outward = device, outward
        self._inward, self._between = device.stream(), device.stream()
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def begin(self, *, host: Event, device: Event) -> None:
        """What comes in from now on comes after `host`, and is worked on after `device`."""
        self._device.wait(host, self._inward)
        self._device.wait(device, self._between)

    def pass_through(
        self, dtype: torch.dtype, along: tuple[Tensor, ...], *, load: Act | None, act: Act, store: Act
    ) -> None:
        """Cut vectors of the same length into pieces, and give each piece a buffer of that length.

        Args:
            along: on the host or on the device.
            load: fills the buffer from what is on the host; None leaves that to `act`.
            act: on the device.
            store: copies the buffer to the host.
        """
        device = self._device
        if not self._buffers:
            with device.on(self._outward):
                memory = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, device=device.torch)
                free = device.record(self._outward)
            self._buffers = [_Buffer(part, free) for part in memory.chunk(BUFFERS)]
        count = BOUNCE_BYTES // BUFFERS // dtype.itemsize
        for pieces in zip(*(vector.split(count) for vector in along), strict=True):
            buffer = self._buffers[self._turn]
            self._turn = (self._turn + 1) % BUFFERS
            filled = buffer.memory[: count * dtype.itemsize].view(dtype)[: len(pieces[0])]
            before = buffer.left
            if load is not None:
                before = self._issue(self._inward, before, load, filled, pieces)
            before = self._issue(self._between, before, act, filled, pieces)
            buffer.left = self._issue(self._outward, before, store, filled, pieces)

    def _issue(
        self, stream: Stream | None, after: Event, act: Act, buffer: Tensor, pieces: tuple[Tensor, ...]
    ) -> Event:
        with self._device.on(stream):
            self._device.wait(after, stream)
            act(buffer, *pieces)
            return self._device.record(stream)

    def synchronize(self) -> None:
        """Wait for what comes in and is worked on, which an error may have left without anything that leaves."""
        for stream in (self._inward, self._between):
            self._device.record(stream).synchronize()

    def release(self) -> None:
        """Let the buffers go."""
        self._buffers = []

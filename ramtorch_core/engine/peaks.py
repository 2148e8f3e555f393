"""The device memory of a step at the moments in which plans differ, as the allocator counts it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ramtorch_core.engine.backward import current_task
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import FOR_TRANSFER, Kind, Range

__all__ = ["PeakWatch", "Peaks"]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes that tensors took on the device.

    Attributes:
        before: when the first forward visit of a pass began; slots, resident chunks and inputs are there.
        forward: the most until the first backward visit began: activations are there, and the loss.
        backward: the most afterwards, until the next pass.
    """

    before: int
    forward: int
    backward: int


class PeakWatch(deque[Range]):
    """Looks at the memory when a forward begins, and when the first visit of its backward does, until `close`.

    Memory is given and taken in the order in which the host issues work, so the device need not be waited for.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._listener = device.ranges.listen()
        self._listener.waiting = self
        self._backward: bool | None = None  # which phase goes on
        self._before = self._most_forward = self._most_backward = 0

    def append(self, ended: Range) -> None:
        """Some range has ended on the host's side; not kept."""
        if ended.kind is Kind.VISIT or ended.what == FOR_TRANSFER:
            backward = current_task() != -1
            if backward is not self._backward:
                self._turn(backward)

    def peaks(self) -> Peaks | None:
        """What was seen so far; None where the device does not tell."""
        peak = self._device.peak_bytes()
        if self._backward is None or peak is None:
            return None
        forward, backward = (self._most_forward, peak) if self._backward else (peak, self._before)
        return Peaks(self._before, max(forward, self._most_forward), max(backward, self._most_backward))

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._listener.close()

    def _turn(self, backward: bool) -> None:
        """The other phase begins."""
        peak, now = self._device.peak_bytes(), self._device.allocated_bytes()
        if peak is None or now is None:
            return
        if backward:
            self._most_forward = max(self._most_forward, peak)
        elif self._backward:
            self._most_backward = max(self._most_backward, peak)
        if not backward:
            self._before = now if self._backward is None else min(self._before, now)
        self._backward = backward
        self._device.forget_peak()

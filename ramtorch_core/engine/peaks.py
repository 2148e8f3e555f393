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
        forward: the most until the last forward visit was over.
        loss: the most from there until the backward began: activations are there, and what autocast has cast.
        turn: the most from there to the first backward visit; 0 if nobody told when the backward began, and `loss`
            includes it.
        first: the most in the first backward visit, in which a part of the loss may still be there.
        backward: the most afterwards, until the next pass.
    """

    before: int
    forward: int = 0
    loss: int = 0
    turn: int = 0
    first: int = 0
    backward: int = 0


_FORWARD, _LOSS, _TURN, _FIRST, _OTHERS = range(5)


class PeakWatch(deque[Range]):
    """Looks at the memory between the phases of a step, until `close`.

    Memory is given and taken in the order in which the host issues work, so the device need not be waited for.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._listener = device.ranges.listen()
        self._listener.waiting = self
        self._open = True
        self._phase = -1
        self._before = 0
        self._most = [0] * 5

    def append(self, ended: Range) -> None:
        """Some range has ended on the host's side; not kept."""
        backward = current_task() != -1 and self._phase >= _FORWARD
        if ended.what == FOR_TRANSFER:  # a visit begins
            phase = min(max(self._phase + 1, _FIRST), _OTHERS) if backward else _FORWARD
            if phase != self._phase:
                self._turn(phase)
        elif ended.kind is Kind.VISIT and not backward and self._phase == _FORWARD:
            self._turn(_LOSS)  # unless another forward visit comes

    def backward_begins(self) -> None:
        """The forward is over, with its loss; for those who know."""
        if self._phase == _LOSS:
            self._turn(_TURN)

    def peaks(self) -> Peaks | None:
        """What was seen so far; None where the device does not tell."""
        self._note()
        return None if self._phase < 0 else Peaks(self._before, *self._most)

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._note()
        self._open = False
        self._listener.close()

    def _note(self) -> None:
        """The most so far belongs to this phase."""
        peak = self._device.peak_bytes()
        if self._open and self._phase >= 0 and peak is not None:
            self._most[self._phase] = max(self._most[self._phase], peak)

    def _turn(self, phase: int) -> None:
        """The next phase begins."""
        now = self._device.allocated_bytes()
        if now is None:
            return
        if self._phase == _LOSS and phase == _FORWARD:  # what seemed to be the loss was between two visits
            self._phase = _FORWARD
        elif phase == _FORWARD:
            self._before = now if self._phase < 0 else min(self._before, now)
        self._note()
        self._phase = phase
        self._device.forget_peak()

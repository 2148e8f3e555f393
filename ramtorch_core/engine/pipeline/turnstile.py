"""Admits the ops of a schedule in exactly its order, one lane per device."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from ramtorch_core.memory.ranges import Kind, Range, Ranges, finish
from ramtorch_core.plan.schedule import Op, Schedule

__all__ = ["Aborted", "Order", "Phase", "Recorder", "Turnstile"]

Phase: TypeAlias = Literal["F", "B", "W"]
"""F, the backward (B, or I where it is split), or W."""

Recorder: TypeAlias = Callable[[Op, float, float], None]
"""Takes an op and the times, in seconds of `time.perf_counter`, when its host work began and ended."""


class Aborted(BaseException):
    """The step was given up because of an error elsewhere. No `Exception`: user code must not catch it."""


class Gate:
    """The place of one op in its lane."""

    __slots__ = ("baton", "following", "lane", "op", "place")

    def __init__(self, op: Op, lane: int, place: int, baton: bool) -> None:
        self.op = op
        self.lane = lane
        self.place = place
        self.baton = baton
        """The op runs only while its thread has the baton."""
        self.following: Gate | None = None
        """The next in the lane."""


class Order:
    """A schedule as turnstiles follow it, the same in every step.

    Args:
        exclusive: all ops need the baton, not only forwards: no two ops run side by side.
    """

    def __init__(self, schedule: Schedule, exclusive: bool = True) -> None:
        self.lanes = len(schedule.lanes)
        self.gates: dict[tuple[Phase, int, int], Gate] = {}
        for lane, ops in enumerate(schedule.lanes):
            gates = [Gate(op, lane, place, exclusive or op.kind == "F") for place, op in enumerate(ops)]
            for gate, following in zip(gates, [*gates[1:], None], strict=True):
                gate.following = following
                self.gates[_key(gate.op)] = gate


class Turnstile:
    """Each op waits until it is next in its lane and, if it may run user code, for the one baton.

    User code runs in one thread at a time: it shares Python objects and, on the host, generators of random numbers.
    Apart from that nothing but the lanes orders the ops.

    Args:
        order: of the ops.
        sticky: a thread that ends an op keeps the baton for its next op, if that may begin, where the host itself
            computes and to wake another thread costs as much as a small op. Otherwise the baton goes round, so that no
            device waits for the host to have taken one microbatch through all others.
        recorder: is told when each op began and ended.
        ranges: per stage, where its ops are shown and timed, if somebody wants to know as the step begins.
    """

    def __init__(
        self,
        order: Order,
        sticky: bool = True,
        recorder: Recorder | None = None,
        ranges: Sequence[Ranges] = (),
    ) -> None:
        self.error: BaseException | None = None
        self._mutex = threading.Lock()
        self._sticky = sticky
        self._gates = order.gates
        self._ended = [0] * order.lanes
        """Per lane, how many of its ops have ended."""
        self._baton_taken = False
        self._waiting: dict[Gate, threading.Lock] = {}
        """Held locks, each released to admit the thread that waits before the gate."""
        self._for_baton: deque[Gate] = deque()
        """Those that wait for the baton alone."""
        self._recorder = recorder
        self._ranges = ranges
        self._noting = recorder is not None or any(device.wanted for device in ranges)
        self._shown: dict[Gate, Range] = {}
        self._begun: dict[Gate, float] = {}

    def enter(self, phase: Phase, stage: int, microbatch: int, after: int | None = None) -> None:
        """Block until it is this op's turn. Raises `Aborted` when the step was given up.

        Args:
            after: `leave` first the op of the same phase and microbatch on this stage.
        """
        gate = self._gates[phase, stage, microbatch]
        left = None if after is None else self._gates[phase, after, microbatch]
        if left is not None and self._noting:
            self._note_end(left)
        admitted: threading.Lock | None = None
        with self._mutex:
            if self.error is not None:
                raise Aborted
            if left is not None:
                self._end(left)
            is_next = self._ended[gate.lane] == gate.place
            if not is_next or (gate.baton and self._baton_taken):
                admitted = self._waiting[gate] = threading.Lock()
                admitted.acquire()
                if is_next:
                    self._for_baton.append(gate)
            elif gate.baton:
                self._baton_taken = True
            if self._for_baton:
                self._hand_over()
        if admitted is not None:
            admitted.acquire()
            if self.error is not None:
                raise Aborted
        if self._noting:
            self._note_begin(gate)

    def leave(self, phase: Phase, stage: int, microbatch: int) -> None:
        """End this op's turn and admit the next op of its lane. The thread enters another op next, or calls `rest`."""
        gate = self._gates[phase, stage, microbatch]
        if self._noting:
            self._note_end(gate)
        with self._mutex:
            if self.error is None:
                self._end(gate)

    def rest(self) -> None:
        """The calling thread enters no op for now."""
        with self._mutex:
            self._hand_over()

    def abort(self, error: BaseException) -> None:
        """Give the step up: every thread that waits, or comes later, gets `Aborted`. The first error is kept."""
        with self._mutex:
            if self.error is not None:
                return
            self.error = error
            for gate in list(self._waiting):
                self._admit(gate)

    def _note_begin(self, gate: Gate) -> None:
        if self._recorder is not None:
            self._begun[gate] = time.perf_counter()
        if self._ranges:
            shown = self._ranges[gate.op.stage].begin(Kind.OP, gate.op)
            if shown is not None:
                self._shown[gate] = shown

    def _note_end(self, gate: Gate) -> None:
        if self._recorder is not None:
            self._recorder(gate.op, self._begun.pop(gate), time.perf_counter())
        if self._shown:
            finish(self._shown.pop(gate, None))

    def _end(self, gate: Gate) -> None:
        if gate.baton:
            self._baton_taken = False
        self._ended[gate.lane] = gate.place + 1
        following = gate.following
        if following in self._waiting:
            if following.baton:
                self._for_baton.append(following)
            else:
                self._admit(following)
        if not (gate.baton and self._sticky):
            self._hand_over()

    def _hand_over(self) -> None:
        """The baton, if no thread has it, goes to the one that has waited longest for it alone."""
        if self._for_baton and not self._baton_taken and self.error is None:
            self._baton_taken = True
            self._admit(self._for_baton.popleft())

    def _admit(self, gate: Gate) -> None:
        self._waiting.pop(gate).release()


def _key(op: Op) -> tuple[Phase, int, int]:
    return ("B" if op.kind == "I" else op.kind, op.stage, op.microbatch)

"""Admits the ops of a schedule in exactly its order, one lane per device."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from ramtorch_core.memory.ranges import Kind, Range, Ranges, finish
from ramtorch_core.plan.schedule import Op, Schedule

__all__ = ["Aborted", "Phase", "Recorder", "Turnstile"]

Phase: TypeAlias = Literal["F", "B", "W"]
"""F, the backward (B, or I where it is split), or W."""

Recorder: TypeAlias = Callable[[Op, float, float], None]
"""Takes an op and the times, in seconds of `time.perf_counter`, when its host work began and ended."""


class Aborted(BaseException):
    """The step was given up because of an error elsewhere. No `Exception`: user code must not catch it."""


class _Gate:
    """The place of one op in its lane."""

    __slots__ = ("admitted", "baton", "begun", "following", "is_next", "op", "range", "waiting")

    def __init__(self, op: Op, baton: bool, following: "_Gate | None") -> None:
        self.op = op
        self.baton = baton
        """The op runs only while its thread has the baton."""
        self.following = following
        self.is_next = False
        """All ops before it in its lane have ended."""
        self.waiting = False
        """A thread waits for `admitted`."""
        self.admitted = threading.Lock()
        self.admitted.acquire()
        self.range: Range | None = None
        self.begun = 0.0


class Turnstile:
    """Each op waits until it is next in its lane and, if it may run user code, for the one baton.

    User code runs in one thread at a time: it shares Python objects and, on the host, generators of random numbers.
    Apart from that nothing but the lanes orders the ops.

    Args:
        exclusive: all ops need the baton, not only forwards: no two ops run side by side.
        sticky: a thread that ends an op keeps the baton for its next op, if that may begin, where the host itself
            computes and to wake another thread costs as much as a small op. Otherwise the baton goes round, so that no
            device waits for the host to have taken one microbatch through all others.
        recorder: is told when each op began and ended.
        ranges: per stage, where its ops are shown and timed.
    """

    def __init__(
        self,
        schedule: Schedule,
        exclusive: bool = True,
        sticky: bool = True,
        recorder: Recorder | None = None,
        ranges: Sequence[Ranges] | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._mutex = threading.Lock()
        self._sticky = sticky
        self._baton_taken = False
        self._for_baton: deque[_Gate] = deque()
        """Those that wait for the baton alone."""
        self._gates: dict[tuple[Phase, int, int], _Gate] = {}
        self._recorder = recorder
        self._ranges = ranges
        for lane in schedule.lanes:
            following: _Gate | None = None
            for op in reversed(lane):
                following = self._gates[_key(op)] = _Gate(op, exclusive or op.kind == "F", following)
            if following is not None:
                following.is_next = True

    def enter(self, phase: Phase, stage: int, microbatch: int) -> None:
        """Block until it is this op's turn. Raises `Aborted` when the step was given up."""
        gate = self._gates[phase, stage, microbatch]
        with self._mutex:
            if self.error is not None:
                raise Aborted
            waits = not gate.is_next or (gate.baton and self._baton_taken)
            if waits:
                gate.waiting = True
                if gate.is_next:
                    self._for_baton.append(gate)
            elif gate.baton:
                self._baton_taken = True
            self._hand_over()
        if waits:
            gate.admitted.acquire()
            if self.error is not None:
                raise Aborted
        if self._recorder is not None:
            gate.begun = time.perf_counter()
        if self._ranges is not None:
            gate.range = self._ranges[stage].begin(Kind.OP, gate.op)

    def leave(self, phase: Phase, stage: int, microbatch: int) -> None:
        """End this op's turn and admit the next op of its lane. The thread enters another op next, or calls `rest`."""
        gate = self._gates[phase, stage, microbatch]
        if self._recorder is not None:
            self._recorder(gate.op, gate.begun, time.perf_counter())
        if gate.range is not None:
            finish(gate.range)
            gate.range = None
        following = gate.following
        with self._mutex:
            if self.error is not None:
                return
            if gate.baton:
                self._baton_taken = False
            if following is not None:
                following.is_next = True
                if following.waiting:
                    if following.baton:
                        self._for_baton.append(following)
                    else:
                        self._admit(following)
            if not (gate.baton and self._sticky):
                self._hand_over()

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
            for gate in self._gates.values():
                if gate.waiting:
                    self._admit(gate)

    def _hand_over(self) -> None:
        """The baton, if no thread has it, goes to the one that has waited longest for it alone."""
        if self._for_baton and not self._baton_taken and self.error is None:
            self._baton_taken = True
            self._admit(self._for_baton.popleft())

    def _admit(self, gate: _Gate) -> None:
        gate.waiting = False
        gate.admitted.release()


def _key(op: Op) -> tuple[Phase, int, int]:
    return ("B" if op.kind == "I" else op.kind, op.stage, op.microbatch)

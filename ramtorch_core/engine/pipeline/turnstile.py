"""Admits the ops of a schedule in exactly its order, one lane per device."""

import contextlib
import threading
import time
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


class Turnstile:
    """Each op has one gate, opened by the op before it in its lane and passed by the thread that runs the op.

    Args:
        recorder: is told when each op began and ended.
        ranges: per stage, where its ops are shown and timed.
    """

    def __init__(
        self, schedule: Schedule, recorder: Recorder | None = None, ranges: Sequence[Ranges] | None = None
    ) -> None:
        self.error: BaseException | None = None
        self._mutex = threading.Lock()
        self._gates: dict[tuple[Phase, int, int], threading.Lock] = {}
        self._following: dict[tuple[Phase, int, int], threading.Lock | None] = {}
        self._ops: dict[tuple[Phase, int, int], Op] = {}
        self._recorder = recorder
        self._begun: dict[tuple[Phase, int, int], float] = {}
        self._ranges = ranges
        self._under_way: dict[tuple[Phase, int, int], Range | None] = {}
        for lane in schedule.lanes:
            following: threading.Lock | None = None
            for op in reversed(lane):
                key = _key(op)
                self._ops[key] = op
                self._following[key] = following
                following = self._gates[key] = threading.Lock()
                following.acquire()
            if following is not None:
                following.release()

    def enter(self, phase: Phase, stage: int, microbatch: int) -> None:
        """Block until it is this op's turn. Raises `Aborted` when the step was given up."""
        key = (phase, stage, microbatch)
        self._gates[key].acquire()
        if self.error is not None:
            raise Aborted
        if self._recorder is not None:
            self._begun[key] = time.perf_counter()
        if self._ranges is not None:
            self._under_way[key] = self._ranges[stage].begin(Kind.OP, self._ops[key])

    def leave(self, phase: Phase, stage: int, microbatch: int) -> None:
        """End this op's turn and admit the next op of its lane."""
        key = (phase, stage, microbatch)
        if self._recorder is not None:
            self._recorder(self._ops[key], self._begun.pop(key), time.perf_counter())
        finish(self._under_way.pop(key, None))
        following = self._following[key]
        if following is not None:
            with self._mutex:
                if self.error is None:
                    following.release()

    def abort(self, error: BaseException) -> None:
        """Give the step up: every thread that waits, or comes later, gets `Aborted`. The first error is kept."""
        with self._mutex:
            if self.error is not None:
                return
            self.error = error
            for gate in self._gates.values():
                with contextlib.suppress(RuntimeError):  # already open
                    gate.release()


def _key(op: Op) -> tuple[Phase, int, int]:
    return ("B" if op.kind == "I" else op.kind, op.stage, op.microbatch)

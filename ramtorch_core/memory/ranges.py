"""Ranges: named stretches of a device's work, which profilers show and which listeners time.

Unless a profiler runs or somebody listens, a range costs a look at two flags. Nothing here ever waits for a device: a
listener collects what has ended. A profiler draws a range on a device from the first to the last kernel launched in it,
so the waits of a stream, which launch none, get one at each end, only while a profiler runs.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

import torch
from torch.autograd import profiler
from typing_extensions import Self

MOST_SAMPLES = 100_000
"""A listener that nobody asks forgets older samples."""


class Kind(Enum):
    """What a range is: `what` of a visit is the visit, of an op the op, of a stall the reason, else a chunk's index."""

    VISIT = "visit"
    RECOMPUTE = "recompute"
    OP = "op"
    TRANSFER = "transfer"
    GRADIENT = "gradient"
    UPDATE = "update"
    STALL = "stall"

    def label(self, what: object) -> str:
        """As the simulator labels it: `F3`, `2F0`, `t3`, `g3`, `u3`, `stall for a transfer`; and `r3`, the part of a
        backward visit that recomputes."""
        if self in (Kind.VISIT, Kind.OP):
            return str(what)
        if self is Kind.STALL:
            return f"stall {what}"
        return f"{self.value[0]}{what}" if what != -1 else f"{self.value} of what is in no chunk"


FOR_TRANSFER = "for a transfer"
FOR_GRADIENTS = "for gradients to leave"
FOR_UPDATE = "for an update"
FOR_STAGE = "for another stage"


class Mark(Protocol):
    """A moment of a stream, or of the host."""

    def query(self) -> bool:
        """Whether it has come."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds between two moments that have come, of one kind."""


class Moment:
    """Now, on the host."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        """Always: it has come."""
        return True

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds from `earlier` to here."""
        return self._seconds - earlier._seconds


class Range:
    """A stretch under way, or over; as a context manager it ends with the context.

    Attributes:
        what: the visit or op, the index of a chunk, or a reason.
        start, end: on the device's current stream where it began and ended, or on the host.
        begun, ended: numbers in the order in which all ranges of the device began and ended on the host.
        waited: seconds that the host spent in it, once it is over.
    """

    __slots__ = (
        "_listeners", "_owner", "_record", "_since", "_take",
        "begun", "end", "ended", "kind", "start", "waited", "what",
    )  # fmt: skip

    def __init__(
        self,
        owner: Ranges,
        kind: Kind,
        what: object,
        take: Callable[[], Mark],
        shown: bool,
        listeners: Sequence[Listener],
    ) -> None:
        self._owner, self._take, self._record = owner, take, None
        self.kind, self.what, self._listeners = kind, what, listeners
        if shown:
            self._record = profiler.record_function(kind.label(what))
            self._record.__enter__()
        self.begun, self.ended = owner.tick(), -1
        self._since, self.waited = owner.clock(), 0.0
        self.start = self.end = take()

    @property
    def seconds(self) -> float:
        """How long it took, once it has ended on the device."""
        return self.end.seconds_since(self.start)

    def finish(self) -> None:
        """It ends here."""
        self.end, self.ended = self._take(), self._owner.tick()
        self.waited = self._owner.clock() - self._since
        if self._record is not None:
            self._record.__exit__(None, None, None)
            self._record = None
        for listener in self._listeners:
            listener.waiting.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


class Listener:
    """Gets, once it ends, every range of some kinds that begins between `listen` or `reopen` and `close`."""

    def __init__(self, owner: Ranges, kinds: frozenset[Kind]) -> None:
        self._owner, self.kinds = owner, kinds
        self.waiting: deque[Range] = deque(maxlen=MOST_SAMPLES)

    def collect(self) -> list[Range]:
        """Those that the device has come to the end of, and that were not collected before. Does not wait."""
        ended: list[Range] = []
        still: list[Range] = []
        for _ in range(len(self.waiting)):
            candidate = self.waiting.popleft()
            (ended if candidate.start.query() and candidate.end.query() else still).append(candidate)
        self.waiting.extendleft(reversed(still))
        return ended

    def close(self) -> None:
        """Listen no more; what has begun can still be collected. Idempotent."""
        self._owner.dismiss(self)

    def reopen(self) -> None:
        """Listen again. Idempotent."""
        self._owner.admit(self)


def name_thread() -> None:
    """Call the current thread in profiles, where threads are tracks, as Python does, but for "ramtorch-": 15 bytes."""
    torch._C._set_thread_name(threading.current_thread().name.removeprefix("ramtorch-")[:15])


class Ranges:
    """Those of one device.

    Args:
        mark: takes a moment of the calling thread's current stream.
        touch: launches a kernel there that does nothing; None where there are no streams, whose waits are then not
            shown.
    """

    def __init__(self, mark: Callable[[], Mark], touch: Callable[[], None] | None = None) -> None:
        self._mark, self._touch = mark, touch
        self._listeners: tuple[Listener, ...] = ()
        self._numbers = itertools.count()

    @property
    def wanted(self) -> bool:
        """Whether anybody wants to know about ranges that begin now."""
        return bool(self._listeners) or profiler._is_profiler_enabled

    def begin(self, kind: Kind, what: object, *, host: bool = False, shown: bool = True) -> Range | None:
        """A range begins; None if nobody wants to know. `finish` ends it.

        Args:
            host: take the host's time instead of that of the current stream.
            shown: also in profiles.
        """
        shown = shown and profiler._is_profiler_enabled
        listeners = self._listeners and self.listeners(kind)
        if not shown and not listeners:
            return None
        return Range(self, kind, what, self._mark if listeners and not host else Moment, shown, listeners)

    def span(
        self, kind: Kind, what: object, *, host: bool = False, shown: bool = True
    ) -> AbstractContextManager[object]:
        """The same for the length of a context."""
        return self.begin(kind, what, host=host, shown=shown) or _NOTHING

    def waiting(self, reason: str) -> AbstractContextManager[object]:
        """Around the calls that let the current stream wait, which takes the host no time: a stall.

        Profiles show it on the device, from where the stream begins to wait to where it goes on.
        """
        if self._touch is None or not profiler._is_profiler_enabled:
            return self.span(Kind.STALL, reason, shown=False)
        return self._touched(reason, self._touch)

    @contextlib.contextmanager
    def _touched(self, reason: str, touch: Callable[[], None]) -> Iterator[None]:
        with profiler.record_function(Kind.STALL.label(reason)):
            touch()
            with self.span(Kind.STALL, reason, shown=False):
                yield
            touch()

    def listen(self, kinds: Iterable[Kind] = Kind) -> Listener:
        """Time ranges of these kinds from now on."""
        listener = Listener(self, frozenset(kinds))
        self.admit(listener)
        return listener

    def admit(self, listener: Listener) -> None:
        """What `listen` and `reopen` do."""
        if listener not in self._listeners:
            self._listeners += (listener,)

    def dismiss(self, listener: Listener) -> None:
        """The end of `listen`."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    def listeners(self, kind: Kind) -> list[Listener]:
        """Those that want to know about such ranges."""
        return [listener for listener in self._listeners if kind in listener.kinds]

    def tick(self) -> int:
        """The next number."""
        return next(self._numbers)

    def clock(self) -> float:
        """Seconds of the host."""
        return time.perf_counter()


def finish(begun: Range | None) -> None:
    """End a range that `begin` returned."""
    if begun is not None:
        begun.finish()


_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()

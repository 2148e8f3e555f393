"""A device in virtual time: the real engine runs on it, and everything takes exactly as long as a test says.

It has streams, events and a host that is ahead, like a GPU, and needs none. Tensors are on the CPU and really computed;
durations are looked up: of copies and updates from `Rates`, of compute and of the host from calls of `work` and
`spend`. One clock belongs to the thread that launches, one to the updating thread, and each stream has its own. Nothing
waits and no thread runs, so results are exact and repeatable. Resources do not slow one another down here.

Memory is counted too, as an allocator would see it: what the launching thread allocates, until it lets it go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ramtorch_core import pricing
from ramtorch_core.engine import inventory, measuring, stream, timed_passes, updates
from ramtorch_core.engine.rates import UPDATE_BYTES, Rates
from ramtorch_core.memory import bounce, gradients, staging
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.host import Arena
from ramtorch_core.memory.ranges import FOR_UPDATE, Kind, Range, Ranges
from ramtorch_core.memory.staging import Staging
from ramtorch_core.memory.window import Window
from ramtorch_core.optim.updater import GroupUpdate, Updater

BOUNCE_BYTES = 6144


@dataclass(eq=False)
class Stream:
    """What was issued on it ends at `free`."""

    free: float = 0.0


class At:
    """An event, or a mark."""

    def __init__(self, device: VirtualDevice, seconds: float) -> None:
        self._device, self.seconds = device, seconds

    def synchronize(self) -> None:
        self._device.now = max(self._device.now, self.seconds)

    def query(self) -> bool:
        return self._device.now >= self.seconds

    def seconds_since(self, earlier: At) -> float:
        return self.seconds - earlier.seconds


class VirtualDevice(Device):
    """A CPU that behaves like a GPU.

    Attributes:
        now: seconds, of the thread that acts.
        memory: what tensors take.
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__("cpu")
        self.asynchronous = True
        self.rates, self.now = rates, 0.0
        self.compute = self._current = Stream()
        self.ranges = VirtualRanges(self)
        self.memory = Memory()
        self.copied = 0.0  # seconds of the gradients that were copied so far
        self.arriving = 0  # bytes of the transfer that is issued now
        self.updater: VirtualUpdater

    # ------------------------------------------------------------------ durations

    def spend(self, seconds: float) -> None:
        """The host works."""
        self.now += seconds

    def work(self, seconds: float, issue: float = 0.0) -> None:
        """The current stream gets work, which it may begin at once and ends when the host has issued all of it."""
        end = max(self._current.free, self.now) + seconds
        self.now += issue
        self._current.free = max(end, self.now)

    # ------------------------------------------------------------------ of a GPU

    def stream(self) -> Any:
        return Stream()

    def current_stream(self) -> Any:
        return self._current

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def activate(self) -> None:
        pass

    def generator(self) -> None:
        return None

    def record(self, stream: Any = None, *, blocking: bool = False) -> At:
        return At(self, max((stream or self._current).free, self.now))

    def mark(self) -> Any:
        return self.record()

    def moment(self) -> At:
        return At(self, self.now)

    def wait(self, event: Any, stream: Any = None) -> None:
        if isinstance(event, At):
            stream = stream or self._current
            stream.free = max(stream.free, event.seconds)

    def synchronize(self) -> None:
        self.now = max(self.now, self._current.free)

    def page_lock(self, address: int, nbytes: int) -> bool:
        return False

    def page_unlock(self, address: int) -> None:
        pass

    def free_bytes(self) -> int:
        return 1 << 40

    def total_bytes(self) -> int:
        return 1 << 40

    def usable_bytes(self) -> int:
        return 1 << 40

    def allocated_bytes(self) -> int:
        return self.memory.level()

    def peak_bytes(self) -> int:
        return self.memory.peak

    def forget_peak(self) -> None:
        self.memory.peak = self.memory.level()

    def name(self) -> str:
        return "a device in virtual time"


class VirtualRanges(Ranges):
    """Copies and updates take their time where the engine marks them as ranges."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device.mark)
        self.device = device
        self.updates: dict[int, float] = {}  # chunk -> seconds

    def clock(self) -> float:
        return self.device.now

    def begin(self, kind: Kind, what: Any, *, host: bool = False, shown: bool = True) -> Any:
        listeners, take = self.listeners(kind), self.device.moment if host else self._mark
        inner = Range(self, kind, what, take, False, listeners) if listeners else None
        if kind in (Kind.TRANSFER, Kind.GRADIENT, Kind.UPDATE):
            return _Worked(self, kind, what, inner)
        return inner


class _Worked:
    """A range that takes its time."""

    def __init__(self, ranges: VirtualRanges, kind: Kind, what: int, inner: Range | None) -> None:
        self._ranges, self._kind, self._what, self._inner = ranges, kind, what, inner
        self._before = ranges.device.copied

    def finish(self) -> None:
        device, ranges = self._ranges.device, self._ranges
        if self._kind is Kind.TRANSFER:
            device.work(device.arriving / device.rates.h2d)
        elif self._kind is Kind.GRADIENT:
            device.work(device.copied - self._before)
        else:
            running = device.updater._running
            copied = 12 * (running is not None and running.undo is not None)  # bytes of a master and its moments
            device.spend(ranges.updates.get(self._what, 0.0) * (1 + copied / UPDATE_BYTES))
        if self._inner is not None:
            self._inner.finish()

    def __enter__(self) -> _Worked:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


class VirtualUpdater(Updater):
    """The updating thread in virtual time: what it did by now is worked out when somebody wants to know."""

    def __init__(self, threads: int, ranges: Any, name: str = "ramtorch-updater") -> None:
        super().__init__(threads, ranges, name)
        self.device: VirtualDevice = ranges.device
        self.clock = 0.0
        self._ends: dict[Any, float] = {}
        self._submitted: dict[GroupUpdate, float] = {}

    def submit(self, group_update: GroupUpdate) -> None:
        self.advance(self.device.now)
        self._pending.add(group_update.group)
        self._queue.append(group_update)
        self._submitted[group_update] = self.device.now

    def backward_over(self) -> None:
        self.advance(self.device.now)
        super().backward_over()

    def release(self, scale: float = 1.0) -> None:
        self.advance(self.device.now)
        super().release(scale)
        for waiting in self._queue:
            self._submitted[waiting] = self.device.now

    def is_pending(self, group: Any) -> bool:
        self.advance(self.device.now)
        return any(each.group is group for each in self._queue) or self._ends.get(group, 0.0) > self.device.now

    def wait(self, group: Any = None) -> None:
        self.advance(self.device.now)
        while any(not each.held and group in (None, each.group) for each in self._queue):
            self.step()
        ends = self._ends.values() if group is None else [self._ends.get(group, 0.0)]
        with self._ranges.span(Kind.STALL, FOR_UPDATE, shown=max(ends, default=0.0) > self.device.now):
            self.device.now = max(self.device.now, *ends, 0.0)

    def advance(self, now: float) -> None:
        """Do what begins by `now`."""
        while self._ready() and max(self.clock, min(self._submitted[each] for each in self._ready())) <= now:
            self.step()

    def step(self) -> None:
        """The next update."""
        begun = max(self.clock, min(self._submitted[each] for each in self._ready()))
        before, self.device.now = self.device.now, begun
        chosen = self._next()
        assert chosen is not None
        del self._submitted[chosen]
        with _disable_current_modes():  # memory of the host is not counted
            self._take_on(chosen)
        self.clock = self.device.now
        if chosen in self._queue:  # there was no room to run ahead
            self._submitted[chosen] = self.clock
        else:
            self._ends[chosen.group] = self.clock
        self.device.now = before
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        while self._ready():
            self.step()
        super().close()

    def _ready(self) -> list[GroupUpdate]:
        return [each for each in self._queue if not each.held or self._room is not None]


class VirtualStaging(Staging):
    """Buffers come back when the update in virtual time is over."""

    def __init__(self, device: Any, nbytes: int, count: int) -> None:
        super().__init__(device, nbytes, count)
        self.updater: VirtualUpdater = device.updater
        self._back: dict[Arena, float] = {}

    def take(self) -> Arena:
        self.updater.advance(self.device.now)
        if not self._free and self.allocated == self.count:
            self.updater.step()
        if self._free and self._back[self._free[0]] > self.device.now:
            if self.allocated < self.count:
                self.allocated += 1
                return Arena(self.nbytes, self.device)
            with self.device.ranges.span(Kind.STALL, FOR_UPDATE):
                self.device.now = self._back[self._free[0]]
        return self._free.pop(0) if self._free else super().take()

    def give(self, buffer: Arena) -> None:
        self._back[buffer] = self.device.now
        super().give(buffer)


class VirtualGradients(Gradients):
    """Tells the device what it copies."""

    @property
    def copied_bytes(self) -> int:
        """As the base class counts them."""
        return self._copied

    def recall(self, group: Any, weight: Any) -> Tensor | None:
        known, device = super().recall(group, weight), cast(Any, self.device)
        device.work(0.0 if known is None else known.nbytes / device.rates.h2d)
        return known

    @copied_bytes.setter
    def copied_bytes(self, value: int) -> None:
        device: Any = self.device
        device.copied += (value - getattr(self, "_copied", 0)) / device.rates.d2h
        self._copied = value

    def _move(self, book: Any, run: Any, flat: Tensor) -> None:
        super()._move(book, run, flat)
        device: Any = self.device
        if run.add:
            nbytes = sum(weight.parameter.nbytes for weight in run.weights)
            half = run.weights[0].parameter.dtype.itemsize == 2  # the sum comes in float32, and leaves rounded besides
            came, left = (2 * nbytes, 3 * nbytes) if half else (nbytes, nbytes)
            device.copied += (came + left) / 2 / device.rates.accumulated - left / device.rates.d2h


class VirtualWindow(Window):
    """Tells the device what is copied next."""

    def load(self, group: Any, slot: Any) -> None:
        device: Any = self.device
        device.arriving = group.nbytes
        super().load(group, slot)


class Memory(TorchDispatchMode):
    """Counts bytes of storages that operations inside make, while they live; `stays` is there in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.stays = self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def level(self) -> int:
        """Bytes now."""
        for key in [key for key, (reference, _) in self._known.items() if reference.expired()]:
            del self._known[key]
        return self.stays + sum(nbytes for _, nbytes in self._known.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_cdata(each) for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := _cdata(tensor)) not in given and key not in self._known:
                self._known[key] = StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.level())
        return result


def _cdata(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def running_on(device: VirtualDevice) -> Iterator[None]:
    """Inside, the engine's updates, staging buffers and clocks are virtual."""

    def updater(threads: int, ranges: Any) -> VirtualUpdater:
        device.updater = VirtualUpdater(threads, ranges)
        return device.updater

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(updates, "Updater", updater)
        patch.setattr(staging, "Staging", VirtualStaging)
        patch.setattr(stream, "Gradients", VirtualGradients)
        patch.setattr(inventory, "Window", VirtualWindow)
        patch.setattr(timed_passes, "time", SimpleNamespace(perf_counter=lambda: device.now))
        patch.setattr(timed_passes, "_Ahead", lambda device: SimpleNamespace(work=device.work))
        patch.setattr(measuring, "Moment", device.moment)
        for module in (bounce, pricing):
            patch.setattr(module, "BOUNCE_BYTES", BOUNCE_BYTES)
        patch.setattr(gradients, "SMALL_BYTES", 0)  # large weights move one by one
        yield

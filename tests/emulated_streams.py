"""Vector clocks: what streams and host threads know of one another, and races in the memory that they share.

Every stream and every host thread has a clock. An access to memory that another one has written, or that writes what
another one uses, is a race unless an event, a lock or a wait of the host orders the two. So one run tells of every
order that the events allow, whatever order it had itself.
"""

import contextlib
import itertools
import random
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Clock = dict[str, int]
INWARD = "a copy to the device"
OUTWARD = "a copy to the host"


class Race(AssertionError):
    """Two accesses to the same memory that nothing orders."""


class _Memory:
    """What was done to one block of memory.

    A host that writes what a copy to the device still reads spoils the copy only: it is a race if that is used.
    """

    def __init__(self, start: int, nbytes: int, owner: "Stream | None" = None) -> None:
        self.start, self.stop, self.owner = start, start + nbytes, owner
        self.recorded: set[str] = set()  # streams that `record_stream` named
        self.users: set[str] = set()  # host threads that issued work
        self.done: list[_Access] = []
        self.spoiled: list[tuple[int, int, str]] = []

    def access(self, now: "_Access", clock: Clock) -> None:
        for before in self.done:
            overlap = max(before.low, now.low), min(before.high, now.high)
            known = before.agent == now.agent or clock.get(before.agent, 0) >= before.when
            if overlap[0] < overlap[1] and (now.write or before.write) and not known:
                message = f"{now.what} by {now.agent} meets {before.what} by {before.agent}"
                if before.target is None:
                    raise Race(message)
                before.target.memory.spoiled.append((before.target.low, before.target.high, message))
        for low, high, message in self.spoiled:
            if not now.write and low < now.high and now.low < high:
                raise Race(f"{message}, and {now.what} reads the copy")
        if now.write:
            self.spoiled = [s for s in self.spoiled if not (now.low <= s[0] and s[1] <= now.high)]
        self.done = [before for before in self.done if not now.replaces(before)] + [now]

    def check_freed(self, clock: Clock) -> None:
        """The allocator may hand the memory to work on the owner's stream from now on."""
        assert self.owner is not None
        for before in self.done:
            safe = before.agent in (self.owner.name, *self.recorded) or clock.get(before.agent, 0) >= before.when
            if not safe:
                raise Race(f"memory of {self.owner.name} is freed before {before.what} by {before.agent}")


@dataclass(eq=False)
class _Access:
    memory: _Memory
    low: int
    high: int
    write: bool
    agent: str
    when: int
    what: str
    target: "_Access | None" = None
    """Of a copy to the device that reads here: what it writes there."""

    def replaces(self, before: "_Access") -> bool:
        """Whether who is ordered after this is ordered after that."""
        inside = self.low <= before.low and before.high <= self.high
        return inside and (self.write or (self.agent == before.agent and not before.write))


class Stream:
    """An emulated stream."""

    _numbers = itertools.count()

    def __init__(self, name: str = "") -> None:
        self.name = name or f"stream {next(self._numbers)}"
        self.clock: Clock = {}


class Event:
    """Happens when its stream has come to it."""

    def __init__(self, machine: "Machine", clock: Clock) -> None:
        self._machine, self.clock = machine, clock
        self._asked = machine.random.choice((0, 0, 1, 3))

    def synchronize(self) -> None:
        self._machine.pause()
        self._machine.wait_for("an event", self.clock)

    def query(self) -> bool:
        self._asked -= 1
        if self._asked < 0:
            self._machine.learn(self.clock)
        return self._asked < 0


class Machine:
    """Clocks, memory, and what was found.

    Attributes:
        races: messages.
        waits: where the host waited for the device, and for what.
        late: how long threads pause at the most, in seconds.
    """

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int, late: float = 0.0) -> None:
        """Forget everything; nothing of before may be used again."""
        self.random, self.late = random.Random(seed), late
        self.races: list[str] = []
        self.waits: list[str] = []
        self.compute = Stream("compute")
        self.streams: list[Stream] = [self.compute]
        self._hosts: dict[str, Clock] = {}
        self._locks: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()
        self._locked: list[_Memory] = []
        self._memory: dict[int, _Memory] = {}
        self._current: dict[str, Stream | None] = {}  # autograd computes on the stream of the forward
        self._mutex = threading.RLock()

    # ---------------------------------------------------------------- who and when

    @staticmethod
    def agent() -> str:
        """The host thread; autograd's counts as the one that waits for it."""
        name = threading.current_thread().name
        return name if name.startswith("ramtorch-") else "host"

    def host(self) -> Clock:
        return self._hosts.setdefault(self.agent(), {})

    def learn(self, clock: Clock) -> None:
        """The calling thread knows that this is done."""
        with self._mutex:
            _join(self.host(), clock)

    @property
    def stream(self) -> Stream:
        """The current one of the calling thread."""
        return self._current.get(self.agent()) or self.compute

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Work that is issued inside goes to `stream`."""
        agent = self.agent()
        before = self._current.get(agent)
        self._current[agent] = stream or before
        try:
            yield
        finally:
            self._current[agent] = before

    def pause(self) -> None:
        if self.late:
            threading.Event().wait(self.random.random() * self.late)

    def acquire(self, lock: Any) -> None:
        self.learn(self._locks.get(lock, {}))

    def release(self, lock: Any) -> None:
        with self._mutex:
            host = self.host()
            _tick(host, self.agent())
            _join(self._locks.setdefault(lock, {}), host)

    # ---------------------------------------------------------------- memory

    def page_lock(self, address: int, nbytes: int) -> None:
        with self._mutex:
            self._locked.append(_Memory(address, nbytes))

    def page_unlock(self, address: int) -> None:
        """Waits for what still uses the memory."""
        with self._mutex:
            for memory in [memory for memory in self._locked if memory.start == address]:
                self._locked.remove(memory)

    def locked(self, tensor: torch.Tensor) -> _Memory | None:
        """The page-locked memory in which `tensor` is."""
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return None
        at = tensor.data_ptr()
        return next((memory for memory in self._locked if memory.start <= at < memory.stop), None)

    def device_memory(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = _Memory(storage.data_ptr(), storage.nbytes(), self.stream)
            weakref.finalize(storage, self._freed, key, memory)
        return memory

    def _freed(self, key: int, memory: _Memory) -> None:
        with self._mutex:
            if self._memory.pop(key, None) is memory and memory.owner in self.streams:
                clock = dict(memory.owner.clock)
                for user in (self.agent(), *memory.users):  # who counted references down knew what it knew
                    _join(clock, self._hosts.get(user, {}))
                self._note(lambda: memory.check_freed(clock))

    def host_access(self, tensor: torch.Tensor, write: bool, what: str) -> None:
        """The calling thread reads or writes, perhaps in page-locked memory."""
        with self._mutex:
            memory, host = self.locked(tensor), self.host()
            if memory is not None:
                _tick(host, self.agent())
                self._do(memory, tensor, write, self.agent(), host, what)

    def work(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], what: str) -> None:
        """The current stream reads and writes tensors, of the device or page-locked; one of each in a copy."""
        with self._mutex:
            stream = self.stream
            _join(stream.clock, self.host())
            _tick(stream.clock, stream.name)
            for tensor in reads:
                self._do(self._memory_of(tensor), tensor, False, stream.name, stream.clock, what)
            for tensor in writes:
                done = self._do(self._memory_of(tensor), tensor, True, stream.name, stream.clock, what)
                if what == INWARD:
                    self.locked(reads[0]).done[-1].target = done

    def _memory_of(self, tensor: torch.Tensor) -> _Memory:
        memory = self.locked(tensor) or self.device_memory(tensor)
        memory.users.add(self.agent())
        return memory

    def _do(self, memory: _Memory, tensor: torch.Tensor, write: bool, agent: str, clock: Clock, what: str) -> _Access:
        now = _Access(memory, *_span(tensor), write, agent, clock[agent], what)
        self._note(lambda: memory.access(now, clock))
        return now

    # ---------------------------------------------------------------- events and waits

    def record(self, stream: Stream) -> Event:
        with self._mutex:
            _tick(stream.clock, stream.name)
            return Event(self, _join(dict(stream.clock), self.host()))

    def wait(self, stream: Stream, event: Event) -> None:
        with self._mutex:
            _join(stream.clock, event.clock)

    def synchronize(self) -> None:
        for stream in self.streams:
            self.learn(stream.clock)

    def wait_for(self, what: str, clock: Clock | None = None) -> None:
        """The host waits for the current stream, or for what `clock` tells of."""
        clock = self.stream.clock if clock is None else clock
        with self._mutex:
            if self.agent() == "host" and any(self.host().get(agent, 0) < when for agent, when in clock.items()):
                self.waits.append(f"{what} at {_place()}")
            self.learn(clock)

    def _note(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Race as race:
            self.races.append(f"{race} at {_place()}")


def _join(clock: Clock, other: Clock) -> Clock:
    for agent, when in other.items():
        if clock.get(agent, 0) < when:
            clock[agent] = when
    return clock


def _tick(clock: Clock, agent: str) -> None:
    clock[agent] = clock.get(agent, 0) + 1


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    count = 1 + sum((size - 1) * abs(step) for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (count * tensor.itemsize if tensor.numel() else 0)


def _place() -> str:
    frames = [f for f in traceback.extract_stack() if "ramtorch_core" in f.filename]
    return " < ".join(f"{f.name} {f.filename.split('ramtorch_core/')[-1]}:{f.lineno}" for f in reversed(frames[-4:]))

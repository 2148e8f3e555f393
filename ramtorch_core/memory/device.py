"""The only file that names `torch.cuda`: streams, events, page-locking, and their twins that do nothing on the CPU.

The engine runs the same code on every device. On the CPU, and under `FakeTensorMode`, a stream is None, an event is
always complete, and a copy is finished when it returns.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch._guards import detect_fake_mode

from ramtorch_core.errors import ConfigurationError, shown
from ramtorch_core.memory.ranges import Mark, Moment, Ranges

log = logging.getLogger(__name__)

Stream = torch.cuda.Stream


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before the event is done."""

    def query(self) -> bool:
        """Whether the work before the event is done."""


class _Complete:
    """The event of a device on which work is done when the call returns."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


COMPLETE: Event = _Complete()


class _Timed:
    """A moment of a CUDA stream."""

    def __init__(self, stream: Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: _Timed) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000


def parse_device(device: object) -> torch.device:
    """What torch makes of `device`, whether or not this machine has it; an index is that of a CUDA device.

    Raises:
        ConfigurationError: nothing.
    """
    given: Any = f"cuda:{device}" if isinstance(device, int) else device
    try:
        made = torch.device(given)
        index = given.partition(":")[2] if isinstance(given, str) else ""
        if index not in ("", str(made.index)) or (made.index or 0) < 0:
            raise ValueError  # torch counts in eight bits: its cuda:256 is cuda:0
        return made
    except (RuntimeError, TypeError, ValueError):
        hint = "use 'cpu', 'cuda', 'cuda:<index>', an index, or a torch.device"
        raise ConfigurationError(f"device={shown(device)}: {hint}") from None


class Device:
    """One compute device; a CUDA device with streams, or a CPU (or fake) device without.

    Args:
        device: anything `torch.device` takes. `"cuda"` becomes the current CUDA device.

    Attributes:
        ranges: its work, for profilers and listeners.

    Raises:
        ConfigurationError: a CUDA device that this machine does not have, or a kind of device that is not supported.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        resolved = parse_device(device)
        self.fake = detect_fake_mode() is not None
        if resolved.type not in ("cpu", "cuda") and not self.fake:
            raise ConfigurationError(f"device '{resolved}' is not supported: use 'cpu' or 'cuda:<index>'")
        if resolved.type == "cuda" and not self.fake:
            count = torch.cuda.device_count()
            given: int | None = resolved.index
            index = torch.cuda.current_device() if given is None and count else given or 0
            if index >= count:
                raise ConfigurationError(f"device '{resolved}' does not exist: this machine has {count} CUDA devices")
            resolved = torch.device("cuda", index)
        self.torch = resolved
        self.asynchronous = resolved.type == "cuda" and not self.fake
        self.ranges = Ranges(self.mark, self.touch if self.asynchronous else None)

    def __repr__(self) -> str:
        return f"Device({str(self.torch)!r})"

    def stream(self) -> Stream | None:
        """A new stream for copies, whose small kernels go before those of compute that wait for a free processor."""
        return torch.cuda.Stream(self.torch, priority=-1) if self.asynchronous else None

    def current_stream(self) -> Stream | None:
        """The stream on which the calling thread computes now."""
        return torch.cuda.current_stream(self.torch) if self.asynchronous else None

    def on(self, stream: Stream | None) -> AbstractContextManager[object]:
        """Issue work on `stream` (and on this device) inside the context."""
        return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()

    def activate(self) -> None:
        """Make this the current device of the calling thread; its current streams stay as they are."""
        if self.asynchronous:
            torch.cuda.set_device(self.torch)

    def generator(self) -> torch.Generator | None:
        """The generator of this device's random numbers; None on the CPU, whose generator is torch's default one."""
        return torch.cuda.default_generators[self.torch.index] if self.asynchronous else None

    def record(self, stream: Stream | None = None, *, blocking: bool = False) -> Event:
        """An event after all work issued so far on `stream` (default: the current one).

        Args:
            blocking: let a thread that waits for it sleep, instead of keeping a processor busy.
        """
        if not self.asynchronous:
            return COMPLETE
        event = torch.cuda.Event(blocking=blocking)
        event.record(stream or torch.cuda.current_stream(self.torch))
        return event

    def mark(self) -> Mark:
        """The moment when all work issued so far on the current stream is done, for measuring times."""
        return _Timed(torch.cuda.current_stream(self.torch)) if self.asynchronous else Moment()

    def touch(self) -> None:
        """Launch a kernel on the current stream that does nothing, for profiles to show the moment; not into graphs."""
        if self.asynchronous:
            with torch.cuda.device(self.torch):
                if not torch.cuda.is_current_stream_capturing():
                    torch.cuda._sleep(1)  # one clock cycle; needs no tensor, and modes see no operation

    def wait(self, event: Event, stream: Stream | None = None) -> None:
        """Let `stream` (default: the current one) wait for `event`; the calling thread does not wait."""
        if isinstance(event, torch.cuda.Event):
            (stream or torch.cuda.current_stream(self.torch)).wait_event(event)

    def synchronize(self) -> None:
        """Block the calling thread until all work on this device is done."""
        if self.asynchronous:
            torch.cuda.synchronize(self.torch)

    def page_lock(self, address: int, nbytes: int) -> bool:
        """Page-lock host memory in place, exactly `nbytes` bytes; False, and a warning, where that fails.

        A failed call leaves an error behind that the next kernel launch would report as its own; it is cleared here.
        """
        if not self.asynchronous or nbytes == 0:
            return False
        torch.cuda.init()
        with torch.cuda.device(self.torch):  # else a context is made on the thread's current device, whichever that is
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code == 0:
            return True
        log.warning(
            "page-locking %.1f MB of host memory failed (CUDA error %d): copies from it are several times slower. "
            "Raise the limit on locked memory (ulimit -l) or stream fewer weights.",
            nbytes / 1e6,
            code,
        )
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch)
        return False

    def page_unlock(self, address: int) -> None:
        """Undo `page_lock`. Waits for copies that still use the memory."""
        if self.asynchronous:
            with torch.cuda.device(self.torch):
                torch.cuda.cudart().cudaHostUnregister(address)

    def free_bytes(self) -> int | None:
        """Bytes of device memory that are free now, or None where that is not known."""
        return torch.cuda.mem_get_info(self.torch)[0] if self.asynchronous else None

    def total_bytes(self) -> int | None:
        """Bytes of device memory, or None where that is not known."""
        return torch.cuda.mem_get_info(self.torch)[1] if self.asynchronous else None

    def usable_bytes(self) -> int | None:
        """Bytes of device memory that are free, or that this process has; None where that is not known."""
        free = self.free_bytes()
        return None if free is None else free + torch.cuda.memory_reserved(self.torch)

    def allocated_bytes(self) -> int | None:
        """Bytes of device memory that tensors take now, or None where that is not known."""
        return torch.cuda.memory_allocated(self.torch) if self.asynchronous else None

    def peak_bytes(self) -> int | None:
        """The most bytes of device memory that tensors took so far, or None where that is not known."""
        return torch.cuda.max_memory_allocated(self.torch) if self.asynchronous else None

    def forget_peak(self) -> None:
        """Let `peak_bytes` begin anew."""
        if self.asynchronous:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def name(self) -> str:
        """What the device calls itself."""
        return torch.cuda.get_device_name(self.torch) if self.asynchronous else str(self.torch)


def device_count() -> int:
    """How many CUDA devices this process sees."""
    return torch.cuda.device_count()

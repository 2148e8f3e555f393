"""What counters and ranges of the engines say, in the terms that monitors log."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ramtorch_core import Streamer
from ramtorch_core.traces import FOR_STAGE, Kind, Range

__all__ = ["Crossed", "PipelineTimes", "resident_bytes"]

_STATISTICS = Path("/proc/self/statm")


class Crossed:
    """Bytes that cross the bus: of weights to devices, of gradients to the host. Not those of updates on a device."""

    def __init__(self) -> None:
        self._seen: MutableMapping[Any, int] = {}
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self._bytes = {"h2d": 0, "d2h": 0}

    def skip(self, streamers: Iterable[Streamer]) -> None:
        """What has crossed so far does not count."""
        self._seen = WeakKeyDictionary()  # engines replace what counts, and its memory
        for _, counter in _counters(streamers):
            self._seen[counter] = counter.copied_bytes

    def count(self, streamers: Iterable[Streamer]) -> None:
        """What has crossed since `skip`, or since the last time, counts."""
        for way, counter in _counters(streamers):
            self._bytes[way] += counter.copied_bytes - self._seen.get(counter, 0)
            self._seen[counter] = counter.copied_bytes

    def rates(self, seconds: float) -> dict[str, float]:
        """`h2d_gb_per_s` and `d2h_gb_per_s`, in 10^9 bytes per second."""
        return {f"{way}_gb_per_s": nbytes / 1e9 / seconds for way, nbytes in self._bytes.items()}


def _counters(streamers: Iterable[Streamer]) -> Iterator[tuple[str, Any]]:
    for streamer in streamers:
        window = getattr(streamer, "window", None)  # built at the first visit
        if window is not None:
            yield "h2d", window
        yield "d2h", streamer.gradients


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """How some batches went through a pipeline.

    Attributes:
        batches: how many.
        seconds: from the first op of the first device to its last one, all batches together.
        busy: seconds, per device, in which its ops computed.
        stalled: seconds, per device, in which its ops waited for transfers, for gradients to leave, or for updates.
    """

    batches: int
    seconds: float
    busy: list[float]
    stalled: list[float]

    @classmethod
    def read(cls, ended: Sequence[Sequence[Range]], *, over: bool = False) -> tuple[PipelineTimes, list[list[Range]]]:
        """From the ranges of each device; and those that are left: of the last batch, at which a device may work.

        Args:
            over: none works at it any more.
        """
        lanes = [_batches(each) for each in ended]
        complete = max(0, min(map(len, lanes)) - (not over))
        spent = [[_spent(batch) for batch in lane[:complete]] for lane in lanes]
        first = [[each for each in batch if each.kind is Kind.OP] for batch in lanes[0][:complete]]
        times = cls(
            complete,
            sum(ops[-1].end.seconds_since(ops[0].start) for ops in first),
            [sum(busy for busy, _ in lane) for lane in spent],
            [sum(stalled for _, stalled in lane) for lane in spent],
        )
        return times, [list(itertools.chain.from_iterable(lane[complete:])) for lane in lanes]

    def figures(self, *, streams: bool) -> dict[str, float]:
        """Percent of the devices' time; the parts `busy`, `stall` (where chunks stream) and `bubble` make up 100."""
        if not self.seconds:
            return {}
        devices = len(self.busy)
        percent = 100 / self.seconds
        stall = sum(self.stalled) * percent / devices
        figures = {"bubble_percent": 100 - sum(self.busy) * percent / devices - stall}
        if streams:
            figures["stall_percent"] = stall
        figures |= {f"device_{i}_busy_percent": busy * percent for i, busy in enumerate(self.busy)}
        return figures | {"pipeline_seconds": self.seconds / self.batches}


def _batches(ended: Sequence[Range]) -> list[list[Range]]:
    """Ranges of one device, in the order in which they began, by batch; each begins with the first microbatch."""
    ordered = sorted(ended, key=lambda each: each.begun)
    ops = [str(each.what) for each in ordered if each.kind is Kind.OP]
    first = min((op for op in ops if op.endswith("F0")), key=lambda op: int(op[:-2]), default="")
    batches: list[list[Range]] = []
    for each in ordered:
        if each.kind is Kind.OP and str(each.what) == first:
            batches.append([])
        if batches:
            batches[-1].append(each)
    return batches


def _spent(batch: Sequence[Range]) -> tuple[float, float]:
    """Seconds in which the ops of a batch computed, and in which they waited for something else than a stage."""
    busy = stalled = 0.0
    until = -1  # the end of the op that began last; those of one device follow each other
    for each in batch:
        if each.kind is Kind.OP:
            busy, until = busy + each.seconds, each.ended
        elif each.kind is Kind.STALL and each.ended < until:
            busy -= each.seconds
            stalled += each.seconds if each.what != FOR_STAGE else 0.0
    return busy, stalled


def resident_bytes() -> int | None:
    """Bytes of the host's memory that this process takes, or None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        import resource

        return int(_STATISTICS.read_text().split()[1]) * resource.getpagesize()
    return None

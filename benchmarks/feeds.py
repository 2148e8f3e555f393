"""Batches that time the training they feed.

What is timed is the whole optimizer step, from the start of one step to the start of the next: the moment at which the
training loop asks for the step's first batch. On a GPU that moment is an event in the current stream, on a CPU the
clock. Nothing is synchronised within a size, so no system loses its overlap: not that of the host's updates with
backward, nor that with the next forward, nor the launches that run ahead.

It is fair to all alike, since between two such moments lie one forward, one backward and one update of every weight,
whenever a system chooses to do them; none can put off work for longer than a step, because the next forward needs the
weights. The last interval of a size ends where the first batch of the next one is asked for, or one more batch that
nobody trains on.

The loader is the one place that every loop has, Lightning's or a plain one; a hook or callback of the user's own would
change what is measured, because some systems must then take the weights as read or written.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reference import tokens
from torch import Tensor

Record = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """What one optimizer step consumes: `batches` batches of `rows` sequences of `length` tokens."""

    rows: int
    length: int
    batches: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length * self.batches


def size_of(count: int, length: int, most: int) -> Size:
    """The size of a step of `count` tokens, in batches of at most `most` tokens, sequences of at most `length`.

    Raises:
        ValueError: the numbers do not divide.
    """
    length = min(length, count)
    batches = max(1, count // most)
    rows = count // batches // length
    if rows * length * batches != count:
        raise ValueError(
            f"{count} tokens are not {batches} batches of whole sequences of {length}: choose multiples of the "
            f"sequence (--length) and of the batch (--batch-tokens {most})"
        )
    return Size(rows, length, batches)


class Feed:
    """The batches of `steps` optimizer steps of one size; an iterable that the Trainer takes as a loader.

    Attributes:
        losses: per step, the losses of its batches, on the device; the training loop appends to the last.
        on_start: called before the first batch.
        on_end: called when a batch is asked for after the last one; if there is none, the length has no such batch.
    """

    def __init__(self, size: Size, steps: int, device: str) -> None:
        self.size, self.steps, self.device = size, steps, device
        self.losses: list[list[Tensor]] = []
        self.on_start: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] | None = None
        self._marks: list[Any] = []

    def __len__(self) -> int:
        return self.steps * self.size.batches + (self.on_end is not None)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.on_start()
        reset_peaks(self.device)
        x, y = tokens(self.size.rows * self.size.batches, self.size.length)
        parts = list(zip(x.split(self.size.rows), y.split(self.size.rows), strict=True))
        for _ in range(self.steps):
            self._mark()
            self.losses.append([])
            yield from parts
        if self.on_end is not None:
            self.on_end()

    def close(self) -> Record:
        """Wait for the device; the figures of this size: seconds per step, losses per step, peaks in bytes."""
        self._mark()
        if self.device == "cuda":
            torch.cuda.synchronize()
            laps = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self._marks)]
        else:
            laps = [b - a for a, b in itertools.pairwise(self._marks)]
        return {
            "tokens": self.size.tokens,
            "batches": self.size.batches,
            "laps": laps,
            "losses": [float(torch.stack(losses).float().mean()) for losses in self.losses],
            "device_bytes": torch.cuda.max_memory_allocated() if self.device == "cuda" else None,
            "host_bytes": peak_host_bytes(),
        }

    def _mark(self) -> None:
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())


def reset_peaks(device: str) -> None:
    """Start the peaks anew. Where the system does not allow it, the host's peak is that of the process so far."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_host_bytes() -> int | None:
    """The peak of the process's resident set; page-locked memory that is shared memory counts. None outside Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None

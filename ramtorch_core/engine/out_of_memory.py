"""When the device runs out of memory: which knob to turn, and by how much, added to torch's own message."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from ramtorch_core.engine.visits import Activations

if TYPE_CHECKING:
    from ramtorch_core.engine.stream import Streamer

__all__ = ["add_advice", "advise_streaming", "advising"]

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
RESIDENT_TENSORS = 4
"""Of the size of a trained weight: itself, its gradient, and two moments."""


def add_advice(error: BaseException, advice: Callable[[int], str]) -> None:
    """Add what `advice` says to an error, if it is that of a device out of memory. Idempotent.

    Args:
        advice: takes how many bytes were wanted, 0 if the message does not tell.
    """
    if isinstance(error, torch.OutOfMemoryError) and "(ramtorch:" not in (message := str(error)):
        found = _WANTED.search(message)
        wanted = int(float(found[1]) * _UNITS[found[2]]) if found is not None else 0
        error.args = (f"{message}\n(ramtorch: {advice(wanted)})", *error.args[1:])


@contextlib.contextmanager
def advising(advice: Callable[[int], str]) -> Iterator[None]:
    """Errors that pass through get the advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        add_advice(error, advice)
        raise


def advise_streaming(streamer: Streamer, wanted: int = 0) -> str:
    """What frees device memory in a streamed step, cheapest in time first.

    Args:
        wanted: bytes; as many chunks and slots are named as free them.
    """
    census, ways = streamer.census, []
    slots = streamer.window.slots if streamer.groups and streamer._inventory.built else []
    if len(slots) > 2:
        ways.append(_fewer_slots(len(slots), 2, streamer.window.nbytes, wanted))
    sizes = [
        sum(p.nbytes * (RESIDENT_TENSORS if p.requires_grad else 1) for p in chunk.parameters)
        for chunk in census.chunks
        if chunk.resident
    ]
    if sizes:
        mean = max(1, sum(sizes) // len(sizes))
        fewer = min(len(sizes), max(1, math.ceil(wanted / mean)))
        ways.append(
            f"pin {len(sizes) - fewer} chunks instead of {len(sizes)}, which frees {_size(fewer * mean)} with "
            f"gradients and two moments"
        )
    if streamer._visits.activations is Activations.KEEP:
        ways.append(
            f"pass activations='checkpoint': of {len(census.chunks)} chunks only the inputs stay, and the activations "
            f"of one"
        )
    ways.append("cut batches into twice as many microbatches (n_microbatches=), which halves what each of them keeps")
    if len(slots) == 2:
        ways.append(_fewer_slots(2, 1, streamer.window.nbytes, wanted) + ", but then copies and compute take turns")
    largest = max(streamer.groups, key=lambda group: group.nbytes, default=None)
    if largest is not None:
        ways.append(
            f"name smaller chunks (chunks=): the largest, '{largest.name}', takes {_size(largest.nbytes)} a slot"
        )
    held = f"weights hold {_size(streamer.device_weight_bytes())} of {streamer.device.torch}"
    return f"{held}. To lower what is needed, in this order: {'; '.join(ways)}"


def _fewer_slots(count: int, least: int, nbytes: int, wanted: int) -> str:
    fewer = min(count - least, max(1, math.ceil(wanted / max(1, nbytes))))
    return f"pass window={count - fewer} instead of {count}, which frees {_size(fewer * nbytes)}"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"

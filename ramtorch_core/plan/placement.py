"""Where each chunk lives and is updated, so that the slowest of what a step keeps busy is as fast as possible.

A streamed step keeps five things busy at once: the GPU, both directions of the bus, the host's memory, and the
processors that update on the host. In the steady state, with updates that overlap with the backward and the next
forward, a step takes as long as the busiest of them. Each chunk is placed in one of three ways, which load them
differently; per chunk, with `n` microbatches:

| | GPU | to the device | to the host | host memory | host's processors |
| --- | --- | --- | --- | --- | --- |
| HOST | compute | 2n weights | gradient | copies, and the update | update |
| GPU | compute, update | 2n weights, master, state | master, state, shadow | copies | |
| RESIDENT | compute, update | | | | |

The update on the host reads and writes master and state, reads the gradient, and writes the shadow. A chunk without
parameters to update only sends its weights. What this leaves out, waits within a step, is for the simulators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum

from ramtorch_core.errors import ConfigurationError

__all__ = ["Chunk", "Load", "Machine", "Place", "Placement", "Row", "place"]


class Place(Enum):
    """Where a chunk's master and optimizer state are, and where they are updated."""

    HOST = "host"
    """On the host; updated there."""
    GPU = "gpu"
    """On the host; they stream through the GPU to be updated there."""
    RESIDENT = "resident"
    """On the GPU, with the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk.

    Attributes:
        compute: seconds of its forward and backward, per microbatch.
        parameters: that the optimizer updates; 0 if it is frozen.
        weight_bytes: that cross to the device per visit.
        master_bytes: of its weights in the optimizer's dtype. Where that equals `weight_bytes` there is no shadow.
        state_bytes: that the optimizer keeps besides.
        gradient_bytes: that cross to the host, once per step.
    """

    name: str
    compute: float
    parameters: int
    weight_bytes: int
    master_bytes: int
    state_bytes: int = 0
    gradient_bytes: int = 0

    def __post_init__(self) -> None:
        _check(self, "not negative", lambda value: value >= 0)

    @property
    def shadow_bytes(self) -> int:
        """Bytes of the copy that crosses, if that is not the master itself."""
        return 0 if self.weight_bytes == self.master_bytes else self.weight_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of GPU memory that it takes to be resident: master, state, gradient."""
        return self.master_bytes + self.state_bytes + self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured of a machine.

    Attributes:
        h2d, d2h: bytes per second to the device and back, while both directions are busy.
        host_memory: bytes per second of the host's memory, all traffic together.
        host_update, gpu_update: seconds per parameter of the optimizer on the host (when its memory is not the limit)
            and on the GPU.
    """

    h2d: float
    d2h: float
    host_memory: float
    host_update: float
    gpu_update: float

    def __post_init__(self) -> None:
        _check(self, "positive", lambda value: value > 0)


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds per step for which each thing is busy."""

    gpu: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0
    host_memory: float = 0.0
    host_update: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.gpu + other.gpu,
            self.h2d + other.h2d,
            self.d2h + other.d2h,
            self.host_memory + other.host_memory,
            self.host_update + other.host_update,
        )

    def __sub__(self, other: Load) -> Load:
        return self + Load(*(-value for value in other.values()))

    def values(self) -> tuple[float, ...]:
        """All five, in the order of the attributes."""
        return self.gpu, self.h2d, self.d2h, self.host_memory, self.host_update

    @property
    def seconds(self) -> float:
        """Of a step: those of the busiest."""
        return max(self.values())

    @property
    def limit(self) -> str:
        """The busiest, in words."""
        names = ("the GPU", "the bus to the device", "the bus to the host", "host memory", "the host's processor")
        return names[self.values().index(self.seconds)]


@dataclass(frozen=True, slots=True)
class Row:
    """A chunk's place, and why."""

    name: str
    place: Place
    gpu_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """What `place` decided.

    Attributes:
        rows: of the chunks, in their order.
        load: of a step.
        gpu_bytes: of GPU memory that resident chunks, and updates on the GPU, take.
    """

    rows: tuple[Row, ...]
    load: Load
    gpu_bytes: int

    @property
    def seconds(self) -> float:
        """Predicted for a step."""
        return self.load.seconds

    def chosen(self, place: Place) -> tuple[int, ...]:
        """Indices of the chunks that have this place."""
        return tuple(index for index, row in enumerate(self.rows) if row.place is place)


def place(
    chunks: Sequence[Chunk], machine: Machine, *, gpu_bytes: int, microbatches: int = 1, update_bytes: int = 0
) -> Placement:
    """Decide for each chunk, so that the predicted step is as short as possible.

    Resident are the first chunks of those up to some size, since their gradients come last and their weights are
    needed first; updated on the GPU, for the same reason, the first ones of the rest that are trained. All such choices
    are compared, about the square of the number of chunks times the number of their different sizes. For equal chunks
    no other choice is faster. Of those that are equally fast the one that keeps everything less busy is taken.

    Args:
        gpu_bytes: of GPU memory that may be used for this; what the window and activations take is not counted.
        microbatches: per step, each of which visits each chunk twice.
        update_bytes: of GPU memory that updates on the GPU take on top, if there are any.

    Raises:
        ConfigurationError: no chunks, or a number out of range.
    """
    if not chunks or microbatches < 1 or gpu_bytes < 0 or update_bytes < 0:
        raise ConfigurationError(
            f"{len(chunks)} chunks, microbatches={microbatches}, gpu_bytes={gpu_bytes}, update_bytes={update_bytes}: "
            f"there must be a chunk and a microbatch, and no number may be negative"
        )
    loads = [{each: _load(chunk, each, machine, microbatches) for each in Place} for chunk in chunks]
    best: tuple[tuple[float, float, int], list[Place], Load, int] | None = None
    for resident in _resident_choices(chunks):
        used = sum(chunks[index].resident_bytes for index in resident)
        if used > gpu_bytes:
            continue
        places = [Place.RESIDENT if index in resident else Place.HOST for index in range(len(chunks))]
        load = sum((loads[index][each] for index, each in enumerate(places)), Load())
        candidates = [None, *(i for i, each in enumerate(places) if each is Place.HOST and chunks[i].parameters)]
        for index in candidates:
            if index is not None:
                if used + update_bytes > gpu_bytes:
                    break
                load += loads[index][Place.GPU] - loads[index][Place.HOST]
                places[index] = Place.GPU
            taken = used if index is None else used + update_bytes
            rank = (_rounded(load.seconds), _rounded(sum(load.values())), taken)
            if best is None or rank < best[0]:
                best = rank, list(places), load, taken
    assert best is not None, "no chunk resident and none updated on the GPU always fits"
    _, places, _, taken = best
    load = sum((loads[index][each] for index, each in enumerate(places)), Load())
    rows = [
        Row(chunk.name, each, chunk.resident_bytes * (each is Place.RESIDENT), _reason(chunk, each, options, load))
        for chunk, each, options in zip(chunks, places, loads, strict=True)
    ]
    return Placement(tuple(rows), load, taken)


def _check(numbers: Chunk | Machine, what: str, right: Callable[[float], bool]) -> None:
    for each in fields(numbers):
        value = getattr(numbers, each.name)
        if not isinstance(value, str) and not (math.isfinite(value) and right(value)):
            raise ConfigurationError(f"{each.name}={value}: it must be {what}, and finite")


def _load(chunk: Chunk, place: Place, machine: Machine, microbatches: int) -> Load:
    compute = chunk.compute * microbatches
    on_gpu = compute + chunk.parameters * machine.gpu_update
    if place is Place.RESIDENT:
        return Load(gpu=on_gpu)
    state = (chunk.master_bytes + chunk.state_bytes) * bool(chunk.parameters)
    weights, shadow = 2 * microbatches * chunk.weight_bytes, chunk.shadow_bytes * bool(chunk.parameters)
    if place is Place.GPU:
        comes, goes = weights + state, state + shadow
        return Load(on_gpu, comes / machine.h2d, goes / machine.d2h, (comes + goes) / machine.host_memory)
    gradient = chunk.gradient_bytes
    update = 2 * state + gradient * bool(chunk.parameters) + shadow
    return Load(
        compute,
        weights / machine.h2d,
        gradient / machine.d2h,
        (weights + gradient + update) / machine.host_memory,
        chunk.parameters * machine.host_update,
    )


def _resident_choices(chunks: Sequence[Chunk]) -> Iterator[frozenset[int]]:
    """The first chunks among those up to each size; a family that does not depend on how much memory there is."""
    seen = set()
    for limit in sorted({chunk.resident_bytes for chunk in chunks}, reverse=True):
        eligible = [index for index, chunk in enumerate(chunks) if chunk.resident_bytes <= limit]
        for count in range(len(eligible) + 1):
            choice = frozenset(eligible[:count])
            if choice not in seen:
                seen.add(choice)
                yield choice


def _reason(chunk: Chunk, place: Place, loads: dict[Place, Load], total: Load) -> str:
    """What the place costs or saves."""
    if place is Place.RESIDENT:
        return f"takes {_size(chunk.resident_bytes)} of GPU memory; saves its copies and its update on the host"
    if not chunk.parameters:
        return f"frozen: only its weights cross; {total.limit} limits the step"
    other = Place.GPU if place is Place.HOST else Place.HOST
    changed = (total - loads[place] + loads[other]).seconds - total.seconds
    there = "on the GPU" if place is Place.HOST else "on the host"
    effect = (
        f"lengthen the step by {changed * 1e3:.3g} ms" if changed > total.seconds * 1e-9 else "not shorten the step"
    )
    return f"an update {there} would {effect}, which {total.limit} limits"


def _rounded(seconds: float) -> float:
    """To nine digits: what differs by less is equal, whatever order it was added in."""
    return 0.0 if seconds <= 0 else round(seconds, 8 - math.floor(math.log10(seconds)))


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"

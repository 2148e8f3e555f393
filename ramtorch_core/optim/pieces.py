"""Streams weights and their state through a device, in pieces, where torch's fused Adam updates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ramtorch_core.errors import ConfigurationError, shown
from ramtorch_core.memory.device import COMPLETE, Device, Event
from ramtorch_core.memory.host import ALIGNMENT, Arena, aligned
from ramtorch_core.optim.compiled import adam_rates


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """One weight's step, in flat tensors of one size.

    Attributes:
        tensors: on the host, of one dtype: the master and its moments. They go to the device and come back.
        step: its number.
        incoming: a gradient on the host, in the master's dtype.
        grad: a gradient on the device; where there is one on the host too, it is added to that.
        shadow: on the host; gets the new master, rounded to its dtype, which has no more bytes than the master's.
    """

    tensors: tuple[Tensor, ...]
    step: float
    incoming: Tensor | None = None
    grad: Tensor | None = None
    shadow: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` to `stop` of a row, `offset` bytes from the beginning of a piece's tensors."""

    row: Row
    start: int
    stop: int
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of one of the row's tensors."""
        return tensor[self.start : self.stop]


def cut(rows: Sequence[Row], piece_bytes: int) -> Iterator[list[Slice]]:
    """Cut rows into pieces whose tensors have `piece_bytes` bytes at the most.

    A row is cut only at multiples of `ALIGNMENT` bytes, which are whole vectors: each element is updated by the code
    that would update it if the row were whole.
    """
    piece: list[Slice] = []
    used = 0
    for row in rows:
        start, count, itemsize = 0, row.tensors[0].numel(), row.tensors[0].itemsize
        while start < count:
            if used == piece_bytes:
                yield piece
                piece, used = [], 0
            stop = min(count, start + (piece_bytes - used) // itemsize)
            piece.append(Slice(row, start, stop, used))
            used += aligned((stop - start) * itemsize)
            start = stop
    if piece:
        yield piece


def check_piece_bytes(piece_bytes: Any) -> None:
    """Refuse a size at which rows cannot be cut.

    Raises:
        ConfigurationError: it is no multiple of `ALIGNMENT`, or more than a terabyte.
    """
    if not isinstance(piece_bytes, int) or not ALIGNMENT <= piece_bytes <= 1 << 40 or piece_bytes % ALIGNMENT:
        raise ConfigurationError(f"piece_bytes={shown(piece_bytes)}: it must be a multiple of {ALIGNMENT}, up to 2**40")


@dataclass(eq=False, slots=True)
class Slot:
    """Memory for one piece.

    Attributes:
        buffer: on the device, a row of bytes for each tensor of a piece; the last is the gradient's, and the shadow's
            when the gradient has been used.
        staging: page-locked, for gradients on the host that are not.
        loaded: after the copies to the device: the update waits for it, and who writes `staging`.
        free: after the copies to the host: the next load waits for it, and the end of the step.
    """

    buffer: Tensor
    free: Event
    loaded: Event = field(default=COMPLETE)
    staging: Arena | None = None

    def view(self, index: int, piece: Slice, dtype: torch.dtype) -> Tensor:
        """Where the slice's part of tensor `index` is."""
        return _bytes(self.buffer[index], piece, dtype).view(dtype)


class Route:
    """To the device and back: streams, and slots that take turns.

    Per slot two events order the streams; see `Slot`. `send` issues its update on the stream that is current.

    Args:
        tensors: how many a piece has, the last one being the gradient.
        piece_bytes: of each of them.
        slots: how many pieces may be on their way.

    Attributes:
        inward, outward: streams of the copies.
    """

    def __init__(self, device: Device, tensors: int, piece_bytes: int, slots: int) -> None:
        self.device, self.tensors, self.piece_bytes = device, tensors, piece_bytes
        self.inward, self.outward = device.stream(), device.stream()
        self.slots = []
        for _ in range(slots):
            buffer = torch.empty((tensors, piece_bytes), dtype=torch.uint8, device=device.torch)
            # The allocator may have taken the memory from work on this stream that is not over.
            self.slots.append(Slot(buffer, free=device.record(blocking=True)))
        self._turn = 0

    @property
    def last(self) -> Slot:
        """The slot of the piece that was sent last."""
        return self.slots[self._turn % len(self.slots)]

    def wait_for_slot(self) -> None:
        """Block the calling thread until the slot that `send` takes next is free."""
        self.slots[(self._turn + 1) % len(self.slots)].free.synchronize()

    def send(self, piece: Sequence[Slice], options: Mapping[str, Any], *, decoupled: bool = True) -> None:
        """Begin to bring a piece in, update it, and bring it back. Does not wait, but for memory to stage gradients in.

        Args:
            options: of torch's fused kernel.
            decoupled: weight decay as in AdamW, instead of as in Adam.
        """
        self._turn += 1
        self._load(self.last, piece)
        self._update(self.last, piece, options, decoupled)
        self._store(self.last, piece)

    def finish(self) -> None:
        """Wait until everything is back."""
        for slot in self.slots:
            slot.free.synchronize()

    def device_bytes(self) -> int:
        """Bytes of memory on the device."""
        return sum(slot.buffer.nbytes for slot in self.slots)

    def _load(self, slot: Slot, piece: Sequence[Slice]) -> None:
        arriving = [self._staged(slot, each) for each in piece]
        self.device.wait(slot.free, self.inward)
        with self.device.on(self.inward):
            for each, grad in zip(piece, arriving, strict=True):
                for index, tensor in enumerate(each.row.tensors):
                    slot.view(index, each, tensor.dtype).copy_(each.of(tensor), non_blocking=True)
                if grad is not None:
                    slot.view(-1, each, grad.dtype).copy_(grad, non_blocking=True)
            slot.loaded = self.device.record(self.inward)

    def _staged(self, slot: Slot, each: Slice) -> Tensor | None:
        """The gradient on the host, in page-locked memory."""
        if each.row.incoming is None:
            return None
        grad = each.of(each.row.incoming)
        if grad.is_pinned():
            return grad
        if slot.staging is None:
            slot.staging = Arena(self.piece_bytes, self.device)
        slot.loaded.synchronize()  # the copies that read `staging` are over
        return _bytes(slot.staging.flat, each, grad.dtype).view(grad.dtype).copy_(grad)

    def _update(self, slot: Slot, piece: Sequence[Slice], options: Mapping[str, Any], decoupled: bool) -> None:
        self.device.wait(slot.loaded)
        device = self.device.torch
        steps = {s: torch.full((), s, dtype=torch.float32, device=device) for s in {each.row.step for each in piece}}
        count, dtype = len(piece[0].row.tensors), piece[0].row.tensors[0].dtype
        lists = [[slot.view(index, each, dtype) for each in piece] for index in range(count)]
        masters, exp_avgs, exp_avg_sqs, *maximum = lists
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        fused(
            masters,
            [_gradient(slot, each, dtype) for each in piece],
            exp_avgs,
            exp_avg_sqs,
            maximum[0] if maximum else [],
            [steps[each.row.step] for each in piece],
            **options,
        )
        for each, master in zip(piece, masters, strict=True):
            if each.row.shadow is not None:
                slot.view(-1, each, each.row.shadow.dtype).copy_(master)

    def _store(self, slot: Slot, piece: Sequence[Slice]) -> None:
        self.device.wait(self.device.record(), self.outward)
        with self.device.on(self.outward):
            for each in piece:
                for index, tensor in enumerate(each.row.tensors):
                    each.of(tensor).copy_(slot.view(index, each, tensor.dtype), non_blocking=True)
                if (shadow := each.row.shadow) is not None:
                    each.of(shadow).copy_(slot.view(-1, each, shadow.dtype), non_blocking=True)
            slot.free = self.device.record(self.outward, blocking=True)


def fused_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What torch's fused kernel takes of a parameter group's options."""
    return {**adam_rates(group), "amsgrad": group["amsgrad"], "maximize": group["maximize"]}


def _gradient(slot: Slot, each: Slice, dtype: torch.dtype) -> Tensor:
    """The slice's gradient on the device, in the master's dtype."""
    row, place = each.row, slot.view(-1, each, dtype)
    if row.grad is None:
        return place
    grad = each.of(row.grad)
    if row.incoming is not None:
        return place.add_(grad)
    return grad if grad.dtype == dtype else place.copy_(grad)


def _bytes(buffer: Tensor, piece: Slice, dtype: torch.dtype) -> Tensor:
    return buffer[piece.offset : piece.offset + (piece.stop - piece.start) * dtype.itemsize]

"""Where gradients accumulate, and how they reach `.grad`.

A gradient that a visit leaves on the device is copied, on its own stream, into page-locked host memory: one region per
weight, in the master's dtype. If the region already holds a gradient, the sum is formed on the device, piece by piece
through small bounce buffers, and written back; the host never adds. When the backward ends, `finish` waits for the
copies and publishes the regions as `.grad`, with the meaning `.grad` has in torch: added to what is there.

Half-precision masters accumulate in float32 next to their `.grad`, which is rounded from it. So does a sum that was
formed on the device: it is kept in float32 as well, because more may be added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ramtorch_core.memory.bounce import Bounce
from ramtorch_core.memory.device import Device, Event, Stream
from ramtorch_core.memory.gradient_books import Book, Gradient
from ramtorch_core.memory.host import Arena, aligned
from ramtorch_core.memory.ranges import FOR_GRADIENTS, Kind
from ramtorch_core.memory.weights import Weight, WeightGroup, as_vector

SMALL_BYTES = 1 << 20
MAXIMUM_IN_FLIGHT = 2
"""Groups whose gradients may wait on the device for their copy; compute waits, on the device, before a third."""


@dataclass(slots=True)
class _Run:
    """Neighbouring weights whose gradients move in one copy."""

    weights: list[Weight]
    grads: list[Tensor]
    add: bool


class Gradients:
    """Takes gradients off the device and publishes them.

    Args:
        device: where they are produced.

    Attributes:
        hold: keep gradients private until `publish` is called, instead of publishing when the backward ends.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.hold = device, False
        self.stream = device.stream()
        self.copied_bytes = 0
        self._books: dict[WeightGroup, Book] = {}
        self._moving: deque[tuple[Event, Stream | None, list[Tensor]]] = deque()
        self._bounce = Bounce(device, self.stream)

    def receive(self, group: WeightGroup, grads: Sequence[Tensor | None]) -> Event:
        """Start moving `grads`, on the device and produced on the current stream, to the host. Does not wait.

        Args:
            grads: one per weight of `group`, None where there is none.

        Returns an event after the copies.
        """
        book = self._books.get(group)
        if book is None:
            book = self._books[group] = Book(group, self.device)
        pairs = zip(group.weights, grads, strict=True)
        book.admit(weight for weight, grad in pairs if grad is not None or weight.parameter.requires_grad)
        book.forget_withdrawn()
        with torch.inference_mode(False), torch.no_grad():
            runs = list(self._runs(book, dict(zip(group.weights, grads, strict=True))))
            flats = [_flatten(run) for run in runs]
            produced = self.device.record()
            self._bounce.begin(host=book.moved, device=produced)
            with self.device.on(self.stream):
                self.device.wait(produced, self.stream)
                with self.device.ranges.span(Kind.GRADIENT, group.index):
                    for run, flat in zip(runs, flats, strict=True):
                        self._move(book, run, flat)
                moved = book.moved = self.device.record(self.stream)
        self._keep(moved, flats)
        return moved

    def stage(
        self, group: WeightGroup, grads: Mapping[Weight, Tensor], buffer: Arena
    ) -> tuple[Event, dict[Weight, Tensor]]:
        """Start moving `grads` to a staging buffer, one behind the other, instead of publishing them. Does not wait.

        Returns an event after the copies, and flat host tensors in the masters' memory order.
        """
        staged: dict[Weight, Tensor] = {}
        offset = 0
        with torch.inference_mode(False), torch.no_grad():
            flats = [weight.flatten(grad) for weight, grad in grads.items()]
            produced = self.device.record()
            with self.device.on(self.stream):
                self.device.wait(produced, self.stream)
                with self.device.ranges.span(Kind.GRADIENT, group.index):
                    for weight, flat in zip(grads, flats, strict=True):
                        staged[weight] = buffer.flat[offset : offset + flat.nbytes].view(flat.dtype)
                        staged[weight].copy_(flat, non_blocking=True)
                        self.copied_bytes += flat.nbytes
                        offset += aligned(flat.nbytes)
                moved = self.device.record(self.stream, blocking=True)  # the updating thread waits for it
        self._keep(moved, flats)
        return moved, staged

    def is_published(self, group: WeightGroup, weight: Weight) -> bool:
        """Whether `.grad` of the master is a gradient from here, to which the next one will be added on the device."""
        book = self._books.get(group)
        gradient = book.gradients.get(weight) if book is not None else None
        return gradient is not None and not gradient.pending and weight.parameter.grad is gradient.host

    def recall(self, group: WeightGroup, weight: Weight) -> Tensor | None:
        """Take a published gradient back to the device, so that more can be added to it there; None if there is none.

        That of a half-precision weight is in float32.
        """
        if not self.is_published(group, weight):
            return None
        with torch.inference_mode(False), torch.no_grad():
            gradient = self._books[group].gradients.pop(weight)
            weight.parameter.grad = None
            wide = gradient.widened()
            known = (gradient.host if wide is None else wide).to(self.device.torch, non_blocking=True, copy=True)
            return known.float() if _is_half(known.dtype) else known

    def withdraw(self, group: WeightGroup, weights: Iterable[Weight]) -> dict[Weight, Tensor]:
        """Take gradients that were received back, instead of publishing them.

        Returns flat host tensors in the masters' memory order, valid once the copies have been made.
        """
        book = self._books[group]
        hosts = {weight: book.gradients.pop(weight).host for weight in weights}
        return {weight: as_vector(host) for weight, host in hosts.items()}

    def finish(self) -> None:
        """Wait until every gradient has arrived; publish them unless `hold`."""
        with self.device.ranges.span(Kind.STALL, FOR_GRADIENTS):
            self.device.record(self.stream).synchronize()
        self._moving.clear()
        if not self.hold:
            self.publish()

    def publish(self, scale: float = 1.0) -> None:
        """Add every gradient that has arrived, times `scale`, to its master's `.grad`."""
        with torch.inference_mode(False), torch.no_grad():
            for book in self._books.values():
                for weight, gradient in list(book.gradients.items()):
                    if gradient.pending:
                        self._publish(book, weight, gradient, scale)

    def drop(self) -> None:
        """Forget what has arrived but was not published, after an error in the step."""
        self._bounce.synchronize()
        self.device.record(self.stream).synchronize()
        self._moving.clear()
        for book in self._books.values():
            for weight, gradient in list(book.gradients.items()):
                if gradient.pending:
                    del book.gradients[weight]  # if it was published before and being added to, its value is lost

    def waiting(self) -> bool:
        """Whether gradients have arrived, or are on their way, that were not published."""
        return any(gradient.pending for book in self._books.values() for gradient in book.gradients.values())

    def forget(self, group: WeightGroup) -> None:
        """Drop what is kept for a group that changed; published `.grad` tensors stay with their masters.

        Gradients that wait for `publish` are kept until then.
        """
        book = self._books.get(group)
        if book is not None:
            book.gradients = {weight: gradient for weight, gradient in book.gradients.items() if gradient.pending}
            if not book.gradients:
                del self._books[group]

    def release(self) -> None:
        """Forget everything; published `.grad` tensors stay with their masters."""
        self._moving.clear()
        self._books.clear()
        self._bounce.release()

    def host_bytes(self) -> int:
        """Bytes of host memory that gradients occupy."""
        books = self._books.values()
        arenas = {arena for book in books for arena in (book.arena, book.wide_arena) if arena is not None}
        arenas |= {gradient.arena for book in books for gradient in book.gradients.values()}
        return sum(arena.nbytes for arena in arenas)

    def _keep(self, moved: Event, flats: list[Tensor]) -> None:
        """Keep gradients alive while their copies are under way; let compute wait before there are too many."""
        if self.device.asynchronous:
            self._moving.append((moved, self.device.current_stream(), flats))
            while len(self._moving) > MAXIMUM_IN_FLIGHT:
                event, stream, _kept_alive = self._moving.popleft()
                with self.device.ranges.waiting(FOR_GRADIENTS):
                    self.device.wait(event, stream)  # afterwards the allocator may reuse them in compute order

    def _publish(self, book: Book, weight: Weight, gradient: Gradient, scale: float) -> None:
        host, master = gradient.host, weight.parameter
        wide = gradient.wide = gradient.widened()
        total = host if wide is None else wide
        added = master.grad if gradient.withdrawn else None
        if scale != 1.0:
            total.mul_(scale)
        if added is not None:
            total.add_(added)
            master.grad = None
        if wide is not None and (scale != 1.0 or added is not None):
            host.copy_(wide)
        gradient.withdrawn = False
        if master.grad is None:
            master.grad = host
        elif master.grad is not host:
            master.grad.add_(host)
            del book.gradients[weight]
        gradient.pending, gradient.version = False, host._version

    def _runs(self, book: Book, grads: dict[Weight, Tensor | None]) -> Iterator[_Run]:
        """Neighbours in the layout that are small, and move in the same way, move together."""
        run: _Run | None = None
        end = -1
        for weight in book.offsets:
            grad = grads[weight]
            if grad is None:
                continue
            gradient = book.gradients.get(weight)
            published = gradient is not None and not gradient.pending
            add = gradient is not None and not (published and self.hold)
            if gradient is None or not add:
                gradient = book.fresh(weight)
            elif weight.parameter.grad is gradient.host:
                # Autograd may add to `.grad` on the host meanwhile (a regulariser): keep it out of this region.
                weight.parameter.grad, gradient.withdrawn = None, True
            gradient.pending = True
            nbytes = weight.parameter.numel() * weight.parameter.dtype.itemsize
            joins = (
                run is not None
                and gradient.offset == end
                and nbytes < SMALL_BYTES
                and run.add == add
                and book.gradients[run.weights[-1]].arena is gradient.arena
                and run.weights[-1].parameter.dtype == weight.parameter.dtype
                and run.grads[-1].dtype == grad.dtype
                and not _is_half(weight.parameter.dtype)
            )
            if run is not None and joins:
                run.weights.append(weight)
                run.grads.append(grad)
            else:
                if run is not None:
                    yield run
                run = _Run([weight], [grad], add)
            end = gradient.offset + nbytes
        if run is not None:
            yield run

    def _move(self, book: Book, run: _Run, flat: Tensor) -> None:
        """Copy or add one run to its region, on the current (copy) stream."""
        first = book.gradients[run.weights[0]]
        dtype = run.weights[0].parameter.dtype
        if len(run.weights) == 1:
            region = as_vector(first.host)
        else:
            start = first.offset
            region = first.arena.flat[start : start + flat.numel() * dtype.itemsize].view(dtype)
        self.copied_bytes += region.numel() * dtype.itemsize
        if _is_half(dtype) and (run.add or flat.dtype.itemsize > dtype.itemsize):
            self._move_wide(book, run, first, flat, region)
        elif not run.add and flat.dtype == dtype:
            region.copy_(flat, non_blocking=True)
        else:
            self._bounce.pass_through(
                dtype,
                (flat, region),
                load=(lambda buffer, _, host: _load(buffer, host)) if run.add else None,
                act=lambda buffer, piece, _: buffer.add_(piece) if run.add else buffer.copy_(piece),
                store=lambda buffer, _, host: host.copy_(buffer, non_blocking=True),
            )

    def _move_wide(self, book: Book, run: _Run, gradient: Gradient, flat: Tensor, region: Tensor) -> None:
        """Copy or add one weight's gradient to its region, and in float32 next to it."""
        known = gradient.widened() is not None
        if gradient.wide is None:
            gradient.wide = book.widen(run.weights[0])
        self.copied_bytes += gradient.wide.nbytes

        def store(buffer: Tensor, _: Tensor, wide: Tensor, narrow: Tensor) -> None:
            wide.copy_(buffer, non_blocking=True)
            narrow.copy_(buffer.to(narrow.dtype), non_blocking=True)

        self._bounce.pass_through(
            torch.float32,
            (flat, as_vector(gradient.wide), region),
            load=(lambda buffer, _, wide, narrow: _load(buffer, wide if known else narrow)) if run.add else None,
            act=lambda buffer, piece, *_: buffer.add_(piece) if run.add else buffer.copy_(piece),
            store=store,
        )
        gradient.version = gradient.host._version


def _load(buffer: Tensor, host: Tensor) -> None:
    """Bring a piece of what is on the host to the device, where it is widened."""
    buffer.copy_(host if host.dtype == buffer.dtype else host.to(buffer.device, non_blocking=True), non_blocking=True)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _flatten(run: _Run) -> Tensor:
    """The gradients of a run as one vector in the memory order of their masters."""
    flats = [weight.flatten(grad) for weight, grad in zip(run.weights, run.grads, strict=True)]
    return flats[0] if len(flats) == 1 else torch.cat(flats)

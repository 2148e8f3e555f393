"""Updates on the device: masters and state of a group stream through it, in pieces, and meet the gradients there.

Besides the copies of weights, per float32 parameter 12 bytes go to the device and 12 come back, with 2 for a shadow in
half precision. The processors of the host, and most of the traffic of its memory, are spared.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ramtorch_core.memory.device import Device, Event
from ramtorch_core.memory.homes import Homes
from ramtorch_core.memory.ranges import FOR_UPDATE, Kind, finish
from ramtorch_core.memory.weights import Weight, as_vector
from ramtorch_core.optim.pieces import Route, Row, Slice, cut, fused_options
from ramtorch_core.optim.steps import Recipe, WeightUpdate, is_decoupled
from ramtorch_core.optim.updater import GroupUpdate, Updater, note_update

PIECE_BYTES = 1 << 25
"""Of each tensor of a piece: 8 M parameters. Larger copies are hardly faster; smaller ones cost the host more calls."""
PIECES = 3
"""On their way at a time: one comes in, one is updated, one goes back. Each has four tensors on the device."""
MOST_WAITING = 4
"""How many groups' gradients may be on the device for their updates; a backward that is ahead waits for one."""


def updates_on_device(recipe: Recipe, weight: Weight) -> bool:
    """Whether the weight can be updated on the device: by torch's Adam or AdamW, with everything in float32."""
    fits = weight.own_shadow or weight.shadow.dtype.itemsize <= 4
    return fits and is_decoupled(recipe, weight) is not None


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    """What is sent at once, and with which options of the fused kernel."""

    slices: list[Slice]
    options: dict[str, Any]
    decoupled: bool


@dataclass(frozen=True, eq=False, slots=True)
class _Sent:
    """An update whose pieces are all on their way; `back` is after the last copy to the host."""

    update: GroupUpdate
    back: Event


class DeviceUpdater(Updater):
    """Steps groups on the device; the thread only issues copies and kernels, and waits for them.

    A group is pending until everything of it is back on the host. Its masters and state are page-locked afterwards:
    what is not is moved, by value, before its first use, and so again when other state has been loaded. The results are
    those of torch's fused Adam and AdamW on the device, bit for bit.

    Pieces that are on their way are ordered by events. A piece is not sent while a copy of
    weights is under way that a visit needs, so that this one has the bus for itself.

    Args:
        transfer: the end of the copy of weights that is under way now; None if there is none.

    Attributes:
        piece_bytes: of each tensor of a piece; a multiple of 256. To be changed before the first update.
        pieces: how many may be on their way at a time; likewise.
    """

    def __init__(self, device: Device, transfer: Callable[[], Event | None]) -> None:
        super().__init__(1, device.ranges, name="ramtorch-device-updater")
        self.piece_bytes, self.pieces = PIECE_BYTES, PIECES
        self._device, self._transfer = device, transfer
        self._homes = Homes(device)
        self._stream = device.stream()
        self._route: Route | None = None
        self._sent: deque[_Sent] = deque()

    def device_bytes(self) -> int:
        """Bytes of memory on the device that pieces take; 0 before the first update."""
        return 0 if self._route is None else self._route.device_bytes()

    def submit(self, group_update: GroupUpdate) -> None:
        """Update this group once its gradients are there. Waits for an earlier one if too many gradients wait already.

        Raises:
            BaseException: what went wrong in an update before; this one is forgotten.
        """
        with self._changed:
            if len(self._pending) >= MOST_WAITING:
                with self._ranges.span(Kind.STALL, FOR_UPDATE):
                    self._changed.wait_for(lambda: len(self._pending) < MOST_WAITING or self._error is not None)
        super().submit(group_update)

    def close(self) -> None:
        """Finish what was submitted, end the thread, and give the memory on the device back. Idempotent."""
        super().close()
        if self._thread is None:
            self._route = None
            self._homes.release()

    def _next(self) -> GroupUpdate | None:
        while True:
            with self._changed:  # held until something was taken: what is queued may be dropped at any other moment
                if not self._sent or any(not waiting.held for waiting in self._queue):
                    return super()._next()
            self._collect(wait=True)

    def _take_on(self, chosen: GroupUpdate) -> None:
        with torch.inference_mode(False), torch.no_grad():
            pieces = self._pieces_of(chosen)
            if self._route is None:
                self._route = Route(self._device, 4, self.piece_bytes, self.pieces)
            route, shown = self._route, None
            self._device.wait(chosen.group.copied, route.outward)  # until then a copy reads the shadows
            self._device.wait(chosen.arrived, self._stream)
            for piece in pieces:
                route.wait_for_slot()
                self._collect(wait=False)
                if (transfer := self._transfer()) is not None:
                    transfer.synchronize()
                if shown is None:
                    with self._device.on(route.inward):
                        shown = self._ranges.begin(Kind.UPDATE, chosen.group.index)
                with self._device.on(self._stream):
                    route.send(piece.slices, piece.options, decoupled=piece.decoupled)
            with self._device.on(route.outward):
                finish(shown)
            self._sent.append(_Sent(chosen, route.last.free))

    def _fail(self, chosen: GroupUpdate, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the first error is the one to report
            self._device.synchronize()  # afterwards nothing reads the gradients
        super()._fail(chosen, error)

    def _collect(self, *, wait: bool) -> None:
        """Finish the updates of groups that are back, or with `wait` of all that were sent."""
        while self._sent and (wait or self._sent[0].back.query()):
            sent = self._sent.popleft()
            try:
                sent.back.synchronize()
                for each in sent.update.updates:
                    each.recipe.optimizer.state[each.weight.parameter]["step"] += 1
                    torch.autograd.graph.increment_version(each.weight.parameter)
                note_update(sent.update)
            except BaseException as error:
                self._fail(sent.update, error)
            else:
                self._succeed(sent.update)

    def _pieces_of(self, chosen: GroupUpdate) -> list[_Piece]:
        """What to send, weights with the same options together."""
        rows: dict[tuple[int, bool], list[Row]] = {}
        options: dict[int, dict[str, Any]] = {}
        for each in chosen.updates:
            given = each.recipe.options[each.weight.parameter]
            decoupled = is_decoupled(each.recipe, each.weight)
            assert decoupled is not None, "only what `updates_on_device` lets pass is submitted"
            options[id(given)] = fused_options(given)
            rows.setdefault((id(given), decoupled), []).append(self._row(each))
        return [
            _Piece(slices, options[key], decoupled)
            for (key, decoupled), some in rows.items()
            for slices in cut(some, self.piece_bytes)
        ]

    def _row(self, each: WeightUpdate) -> Row:
        """The weight's step; its master and state are page-locked afterwards."""
        weight, state = each.weight, each.recipe.optimizer.state[each.weight.parameter]
        master = weight.parameter
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = self._homes.bring(master, name, state.get(name), weight.stride)
        if not weight.own_shadow or master.data_ptr() != weight.shadow.data_ptr():
            master.data = self._homes.bring(master, "master", master.detach(), weight.stride)
        tensors = (master.detach(), state["exp_avg"], state["exp_avg_sq"])
        return Row(
            tuple(map(as_vector, tensors)),
            float(state["step"]) + 1,
            incoming=each.earlier,
            grad=each.grad,
            shadow=None if weight.own_shadow else as_vector(weight.shadow),
        )

"""AdamW on the GPU for parameters that live in host memory: they and their state stream through it, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ramtorch_core.memory.device import COMPLETE, Device, Event
from ramtorch_core.memory.host import ALIGNMENT, Arena, aligned
from ramtorch_core.memory.weights import dense_stride

SLOTS = 2
"""One is loaded while the other is updated and stored."""


class OffloadAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` on a GPU, for parameters and state that stay in host memory.

    `step` copies master, moments and gradient of a piece to the GPU, updates them there with torch's fused kernel, and
    copies master and moments back. Two pieces are on the way at a time, on streams of their own, and when `step`
    returns, everything is in host memory. Results are those of the fused AdamW on that device, bit for bit.

    Per float32 parameter 16 bytes go in and 12 come back. Where the host has many cores and fast memory
    `torch.optim.AdamW(fused=True)` on host parameters is faster; this one is for hosts with few.

    Parameters may be anywhere. Those on the CPU stream; others are updated where they are. At the first step masters
    that are not page-locked are moved to memory that is: `parameter.data` is then another tensor, with the same values.
    Moments are made there. A gradient that is not page-locked is copied to memory that is on its way.

    Memory on the GPU: `SLOTS` times the tensors of a piece (four, with `amsgrad` five), `piece_bytes` each. In host
    memory: the page-locked state, and `SLOTS * piece_bytes` for gradients.

    `state_dict` is that of `torch.optim.AdamW`, and either loads the other's. The class does not divide its step, so
    with streamed weights it steps on published gradients, after backward.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for `torch.optim.AdamW`.
        device: where updates are computed. "cpu" computes on copies in host memory, for tests.
        piece_bytes: of each tensor of a piece; a multiple of 256.

    Raises:
        ConfigurationError: the device does not exist.
        ValueError: an option out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        device: torch.device | str | int = "cuda",
        piece_bytes: int = 1 << 24,
    ) -> None:
        if piece_bytes < ALIGNMENT or piece_bytes % ALIGNMENT:
            raise ValueError(f"piece_bytes={piece_bytes}: it must be a multiple of {ALIGNMENT}")
        self._device, self._piece_bytes = Device(device), piece_bytes
        self._homes: dict[Tensor, dict[str, Tensor]] = {}
        self._route: _Route | None = None
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True)
        self._step_supports_amp_scaling = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_where": (self._device.torch, self._piece_bytes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        where = state.pop("_where", None)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if where is not None:
            self._device, self._piece_bytes = Device(where[0]), where[1]
            self._homes, self._route, self._step_supports_amp_scaling = {}, None, False

    def device_bytes(self) -> int:
        """Bytes of memory on the device that pieces take; 0 before the first step."""
        return 0 if self._route is None else sum(slot.buffer.nbytes for slot in self._route.slots)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns what `closure` returns.

        Raises:
            TypeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors = 2 + max(len(_state_names(group)) for group in self.param_groups)
        if self._route is None or self._route.tensors != tensors:
            self._route = _Route(self._device, tensors, self._piece_bytes)
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                if p.grad.layout != torch.strided:
                    raise TypeError(f"OffloadAdamW needs dense gradients, got {p.grad.layout}: use SparseAdam")
            self._update_in_place(group, [p for p in trained if p.device.type != "cpu"])
            rows = [self._row(group, p) for p in trained if p.device.type == "cpu"]
            for dtype in dict.fromkeys(row.tensors[0].dtype for row in rows):
                for piece in cut([row for row in rows if row.tensors[0].dtype == dtype], self._piece_bytes):
                    self._route.send(piece, group)
        self._route.finish()
        return loss

    def _row(self, group: dict[str, Any], parameter: Tensor) -> _Row:
        """Count a step of a parameter in host memory; its master and state are page-locked afterwards."""
        names = _state_names(group)
        state, size, stride = self.state[parameter], parameter.size(), dense_stride(parameter)
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        state["step"] += 1
        homes = self._homes.setdefault(parameter, {})
        tensors = {"master": parameter.detach(), **{name: state.get(name) for name in names}}
        strays = [name for name, tensor in tensors.items() if not _at_home(tensor, homes.get(name), stride)]
        missing = [name for name in strays if not _fits(homes.get(name), parameter, stride)]
        if missing:
            nbytes = aligned(parameter.nbytes)
            arena = Arena(nbytes * len(missing), self._device)
            for index, name in enumerate(missing):
                homes[name] = arena.tensor(index * nbytes, parameter.dtype, size, stride)
        for name in strays:
            known = tensors[name]
            home = homes[name].zero_() if known is None else homes[name].copy_(known)
            if name == "master":
                parameter.data = home
            else:
                state[name] = home
        grad = parameter.grad
        assert grad is not None
        if grad.stride() != stride or grad.dtype != parameter.dtype:
            grad = torch.empty_strided(size, stride, dtype=parameter.dtype).copy_(grad)
        flat = (parameter.detach(), *(state[name] for name in names), grad)
        return _Row(tuple(torch.as_strided(tensor, (tensor.numel(),), (1,)) for tensor in flat), float(state["step"]))

    def _update_in_place(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Step parameters that are on a device."""
        names = _state_names(group)
        for p in parameters:
            state = self.state[p]
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=p.device))
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        if parameters:
            lists = [[self.state[p][name] for p in parameters] for name in names]
            grads, steps = (
                [p.grad for p in parameters if p.grad is not None],
                [self.state[p]["step"] for p in parameters],
            )
            maximum = lists[2] if group["amsgrad"] else []
            adamw(list(parameters), grads, lists[0], lists[1], maximum, steps, fused=True, **_options(group))


@dataclass(frozen=True, slots=True)
class _Row:
    """A parameter's step: flat host tensors (master, moments, gradient), and its number."""

    tensors: tuple[Tensor, ...]
    step: float


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` to `stop` of a row, `offset` bytes from the beginning of a piece's tensors."""

    row: _Row
    start: int
    stop: int
    offset: int


def cut(rows: Sequence[_Row], piece_bytes: int) -> Iterator[list[Slice]]:
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


@dataclass(eq=False, slots=True)
class _Slot:
    """Memory for one piece.

    Attributes:
        buffer: on the device, a row of bytes for each tensor of a piece.
        staging: page-locked, for gradients that are not.
        loaded: after the copies to the device: the update waits for it, and who writes `staging`.
        free: after the copies to the host: the next load waits for it, and the end of the step.
    """

    buffer: Tensor
    staging: Arena
    free: Event
    loaded: Event = field(default=COMPLETE)

    def view(self, index: int, piece: Slice) -> Tensor:
        """Where the slice's tensor `index` is."""
        tensor = piece.row.tensors[index]
        return _bytes(self.buffer[index], piece, tensor).view(tensor.dtype)


class _Route:
    """To the device and back: streams, and slots that take turns.

    Args:
        tensors: how many a piece has; the last one, the gradient, goes in only.
    """

    def __init__(self, device: Device, tensors: int, piece_bytes: int) -> None:
        self.device, self.tensors = device, tensors
        self._in, self._out = device.stream(), device.stream()
        self.slots = []
        for _ in range(SLOTS):
            buffer = torch.empty((tensors, piece_bytes), dtype=torch.uint8, device=device.torch)
            # The allocator may have taken the memory from work on this stream that is not over.
            self.slots.append(_Slot(buffer, Arena(piece_bytes, device), free=device.record()))
        self._turn = 0

    def send(self, piece: Sequence[Slice], group: dict[str, Any]) -> None:
        """Begin to bring a piece in, update it, and bring it back."""
        self._turn += 1
        slot = self.slots[self._turn % SLOTS]
        self._load(slot, piece)
        self._update(slot, piece, group)
        self._store(slot, piece)

    def _load(self, slot: _Slot, piece: Sequence[Slice]) -> None:
        slot.loaded.synchronize()  # the copies that read `staging` are over
        sources = [[tensor[each.start : each.stop] for tensor in each.row.tensors] for each in piece]
        for each, tensors in zip(piece, sources, strict=True):
            grad = tensors[-1]
            if not grad.is_pinned():
                tensors[-1] = _bytes(slot.staging.flat, each, grad).view(grad.dtype).copy_(grad)
        self.device.wait(slot.free, self._in)
        with self.device.on(self._in):
            for each, tensors in zip(piece, sources, strict=True):
                for index, tensor in enumerate(tensors):
                    slot.view(index, each).copy_(tensor, non_blocking=True)
        slot.loaded = self.device.record(self._in)

    def _update(self, slot: _Slot, piece: Sequence[Slice], group: dict[str, Any]) -> None:
        self.device.wait(slot.loaded)
        steps = {each.row.step: torch.full((), each.row.step, device=self.device.torch) for each in piece}
        tensors = len(piece[0].row.tensors)
        lists = [[slot.view(index, each) for each in piece] for index in range(tensors)]
        masters, exp_avgs, exp_avg_sqs, *maximum, grads = lists
        torch._fused_adamw_(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            maximum[0] if maximum else [],
            [steps[each.row.step] for each in piece],
            **_options(group),
        )

    def _store(self, slot: _Slot, piece: Sequence[Slice]) -> None:
        self.device.wait(self.device.record(), self._out)
        with self.device.on(self._out):
            for each in piece:
                for index, tensor in enumerate(each.row.tensors[:-1]):
                    tensor[each.start : each.stop].copy_(slot.view(index, each), non_blocking=True)
        slot.free = self.device.record(self._out)

    def finish(self) -> None:
        """Wait until everything is back."""
        for slot in self.slots:
            slot.free.synchronize()


def _bytes(buffer: Tensor, piece: Slice, tensor: Tensor) -> Tensor:
    return buffer[piece.offset : piece.offset + (piece.stop - piece.start) * tensor.itemsize]


def _state_names(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _options(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = map(float, group["betas"])
    options = {key: float(group[key]) for key in ("lr", "eps", "weight_decay")}
    return {**options, "beta1": beta1, "beta2": beta2, "amsgrad": group["amsgrad"], "maximize": group["maximize"]}


def _at_home(tensor: Tensor | None, home: Tensor | None, stride: tuple[int, ...]) -> bool:
    """Whether copies of the tensor are fast and find it in one piece."""
    if tensor is None or tensor.stride() != stride:
        return False
    return (home is not None and tensor.data_ptr() == home.data_ptr()) or tensor.is_pinned()


def _fits(home: Tensor | None, parameter: Tensor, stride: tuple[int, ...]) -> bool:
    known = home is not None and home.size() == parameter.size() and home.dtype == parameter.dtype
    return known and home is not None and home.stride() == stride

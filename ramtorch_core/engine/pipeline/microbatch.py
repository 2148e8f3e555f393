"""The state of one microbatch on its way through the stages; used by its driver thread only."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ramtorch_core.engine.lend import is_lent
from ramtorch_core.engine.pipeline.crossing import Cut, cross
from ramtorch_core.engine.pipeline.deferred import Deferral
from ramtorch_core.engine.pipeline.links import Links, Parcel
from ramtorch_core.engine.pipeline.loans import Loans
from ramtorch_core.memory.device import COMPLETE, Device, Event

__all__ = ["Bystander", "Microbatch"]

_sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Arrival:
    """A tensor and what stands for it in one stage."""

    __slots__ = ("local", "tensor", "version")

    def __init__(self, tensor: Tensor, local: Tensor) -> None:
        self.tensor = tensor  # held: its id must not go to another
        self.local = local
        self.version = None if local.device == tensor.device else _version(tensor)
        """Of a copy's original; an alias shares its memory."""

    def is_current(self, tensor: Tensor) -> bool:
        """False for a copy whose original was modified since."""
        return self.version is None or self.version == _version(tensor)


class Microbatch:
    """Knows the current stage, and brings tensors of earlier stages into it.

    Autograd numbers the nodes that a thread records, and a microbatch stays in one thread, so the number at which each
    stage began tells the stage of every node. A tensor of an earlier stage is cut: this stage sees a copy (or an alias,
    on the same device) that ends the graph, and the gradient found there is owed to the earlier stage.

    Args:
        index: of the microbatch.
        devices: per stage.
        homes: id of a parameter or buffer -> its stage.
        owned: per stage, ids of parameters and buffers that it uses as they are, unless an earlier stage used them.
        known: ids of tensors that were complete before the step began, beside parameters and buffers; where devices
            are several.
        ready: per device, an event after the work that was issued before the step.
        anchor: any tensor that requires grad.
        deferrable: ids of parameters whose gradients are ops of their own; None where backward is whole.
    """

    def __init__(
        self,
        index: int,
        devices: list[Device],
        links: Links,
        loans: Loans,
        homes: dict[int, int],
        owned: Sequence[frozenset[int]],
        known: set[int],
        ready: dict[torch.device, Event],
        anchor: Tensor,
        deferrable: frozenset[int] | None = None,
    ) -> None:
        self.index = index
        self.devices = devices
        self.links = links
        self.loans = loans
        self.homes = homes
        self.stage = 0
        self.low = 0
        self.own: frozenset[int] = frozenset()
        """Those of `owned` that the current stage uses as they are."""
        self.last = len(devices) - 1
        """The stage in which the loss was computed; an earlier one than the last where forward ended early."""
        self.in_backward = False
        self._owned = owned
        self._known = known
        self._ready = ready
        self.early: list[frozenset[int]] = []
        """Per stage, `Loans.early` when it began: the stage works on leaves of its own instead of these."""
        self._began: list[int] = []
        self._owns: list[frozenset[int]] = []
        self._ended: list[Event] = []
        self._anchor = anchor
        self._deferrable = deferrable
        self.deferrals = None if deferrable is None else [Deferral(anchor) for _ in devices]
        self._arrivals: list[dict[int, Arrival]] = [{} for _ in devices]
        self._casts: dict[tuple[int, int, bool], Tensor] = {}
        self._parcels: dict[tuple[int, int], Parcel] = {}
        self._cuts: list[list[Cut]] = [[] for _ in devices]
        self._owed: list[list[tuple[Tensor, Parcel]]] = [[] for _ in devices]

    @property
    def device(self) -> torch.device:
        """The device of the current stage."""
        return self.devices[self.stage].torch

    def target(self, tensors: Iterable[Tensor]) -> torch.device:
        """Where a call on `tensors` belongs: on the device of the current stage."""
        return self.device

    def begin(self, stage: int) -> None:
        """Enter `stage`, whose turn it is."""
        self.stage, self.low, early = stage, _sequence_number(), self.loans.early
        self.own = self._owned[stage] - early if early else self._owned[stage]
        self._began.append(self.low)
        self.early.append(early)
        self._owns.append(self.own)

    def end(self) -> None:
        """Leave the current stage: what it computed may be sent on after this point of its stream."""
        self._ended.append(self.devices[self.stage].record())

    def end_forward(self) -> None:
        """All stages have run: what only their forwards share is dropped."""
        self._casts.clear()
        self._parcels.clear()

    def resume(self, stage: int) -> None:
        """Come back to `stage` for its backward."""
        self.in_backward = True
        self.stage = stage
        self.low, self.own = self._began[stage], self._owns[stage]

    def prefetch(self, tensors: Iterable[Tensor], stage: int) -> None:
        """Start copying what `stage` is about to be called with; the current stage has just ended."""
        device = self.devices[stage]
        for tensor in tensors:
            key = (stage, id(tensor))
            source = self._latest(tensor)
            if source.device != device.torch and self.owns(source.device) and key not in self._parcels:
                self._parcels[key] = self.links.send(source, device, self._readable(source), "forward")

    def is_foreign(self, tensor: Tensor) -> bool:
        """Whether the graph of `tensor` belongs to another stage than the current one."""
        node = tensor.grad_fn
        if node is not None:  # a recompute in the backward numbers its nodes anew, and meets the cuts of its forward
            if self.in_backward:
                return id(tensor) in self._arrivals[self.stage]
            if node._sequence_nr() >= self.low or self.stage == 0:  # a graph from before the step is stage 0's
                return False
            return not is_lent(tensor)  # copies that stay on a streamed stage's device were lent before the step
        away = self.homes.get(id(tensor), self.stage) != self.stage
        return away or id(tensor) in self.early[self.stage] or self._is_deferred(tensor)

    def bring(self, tensor: Tensor, foreign: bool) -> Tensor:
        """What stands for `tensor` in the current stage, on its device, always the same for the same tensor.

        Args:
            foreign: `tensor` requires grad, and its graph is that of another stage.
        """
        arrived = self._arrivals[self.stage].get(id(tensor))
        if arrived is not None and arrived.is_current(tensor):
            return arrived.local
        if id(tensor) in self.homes and isinstance(tensor, torch.nn.Parameter):
            at_home = self.homes[id(tensor)] == self.stage and id(tensor) not in self.early[self.stage]
            if at_home and self.deferrals is not None:
                return self.deferrals[self.stage].alias(tensor, _sequence_number())
            return self.loans.borrow(tensor, self.stage)
        if tensor.requires_grad and not foreign:  # on the wrong device, in the graph of this stage
            return tensor.to(self.device)
        source = self._latest(tensor)
        parcel = self._parcels.pop((self.stage, id(tensor)), None)
        if parcel is None and source.device != self.device:
            parcel = self.links.send(source, self.devices[self.stage], self._readable(source), "forward")
        local = source if parcel is None else self.links.receive(parcel)
        if foreign:
            cut = Cut(source, self._stage_of(source))
            local = cross(self._anchor, cut, local)
            self._cuts[self.stage].append(cut)
        self._arrivals[self.stage][id(tensor)] = Arrival(tensor, local)
        return local

    def owns(self, device: torch.device) -> bool:
        """Whether `device` belongs to the pipeline."""
        return self.links.owns(device)

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` as autocast passes it to an operation: a node per use, or per microbatch where autocast caches."""
        original = weight if self.deferrals is None else self.deferrals[self.stage].original(weight)
        if original is not weight or not torch.is_autocast_cache_enabled() or self.in_backward:
            return self.loans.cast(weight, original, dtype, self.stage)
        key = (self.stage, id(weight), torch.is_grad_enabled())
        if key not in self._casts:
            self._casts[key] = self.loans.cast(weight, original, dtype, self.stage)
        return self._casts[key]

    def may_defer(self, value: Any) -> bool:
        """Whether the gradient of `value` for a call may be computed after that of the call's input.

        Not under saved-tensor hooks (checkpoints, above all): a second use of what they saved would recompute twice.
        """
        return self._is_deferred(value) and torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def _is_deferred(self, value: Any) -> bool:
        """Whether `value` is a weight of the current stage whose gradient is summed up in an op of its own."""
        return (
            self._deferrable is not None
            and id(value) in self._deferrable
            and self.homes.get(id(value)) == self.stage
            and id(value) not in self.early[self.stage]
            and value.requires_grad
            and torch.is_grad_enabled()
        )

    def defer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """`func(*args, **kwargs)` with the gradients of its weights deferred."""
        assert self.deferrals is not None
        kind = self.device.type
        on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if on else None

        def cast(tensor: Tensor) -> Tensor:
            if dtype is None or tensor.dtype in (dtype, torch.float64) or not tensor.is_floating_point():
                return tensor
            if isinstance(tensor, torch.nn.Parameter):
                return self.loans.cast_value(tensor, dtype, self.stage)
            return tensor.to(dtype)

        args = (self.admit(args[0]), *args[1:])
        return self.deferrals[self.stage].call(func, args, kwargs, cast, self.may_defer, _sequence_number())

    def admit(self, tensor: Tensor) -> Tensor:
        """An argument of the module that begins the current stage, on this stage's device."""
        foreign = tensor.requires_grad and self.is_foreign(tensor)
        if foreign or (tensor.device != self.device and self.owns(tensor.device)):
            return self.bring(tensor, foreign)
        return tensor

    def owed(self, stage: int) -> list[tuple[Tensor, Tensor]]:
        """(tensor computed in `stage`, its gradient from a later stage), the last stage's first."""
        pairs = self._owed[stage]
        found = [(tensor, self.links.receive(parcel)) for tensor, parcel in pairs]
        pairs.clear()
        return found

    def settle(self, stage: int) -> None:
        """After the backward of `stage`: send the gradients at its cuts to where the tensors were computed."""
        mark: Event | None = None
        for cut in self._cuts[stage]:
            if cut.gradient is not None:
                mark = mark or self.links.mark(cut.gradient.device)
                parcel = self.links.send(cut.gradient, self.devices[cut.origin], mark, "backward")
                self._owed[cut.origin].append((cut.source, parcel))
        self._cuts[stage].clear()
        self._arrivals[stage].clear()

    def _latest(self, tensor: Tensor) -> Tensor:
        """What stood for `tensor` in the latest earlier stage that used it, else the tensor itself.

        So a change in place is seen by later stages, and gradients add up in the order in which one graph would add
        them: the later stage's first.
        """
        for arrivals in reversed(self._arrivals[: self.stage]):
            arrived = arrivals.get(id(tensor))
            if arrived is not None and arrived.is_current(tensor):
                return arrived.local
        return tensor

    def _stage_of(self, tensor: Tensor) -> int:
        node = tensor.grad_fn
        assert node is not None
        return max(0, bisect_right(self._began, node._sequence_nr()) - 1)

    def _readable(self, tensor: Tensor) -> Event:
        """The earliest known event after which `tensor` may be read."""
        if id(tensor) in self._known or id(tensor) in self.homes:
            return self._ready.get(tensor.device, COMPLETE)
        if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() < self.low and self._ended:
            return self._ended[self._stage_of(tensor)]
        return self.links.mark(tensor.device)


class Bystander:
    """Stands for a microbatch where a module is called whole, in one thread: only the devices of tensors change."""

    def __init__(self, devices: list[Device], links: Links) -> None:
        self.devices = devices
        self.links = links
        self.stage = self.low = 0
        self.own: frozenset[int] = frozenset()

    @property
    def device(self) -> torch.device:
        """The device of the current stage."""
        return self.devices[self.stage].torch

    def target(self, tensors: Iterable[Tensor]) -> torch.device:
        """Where a call on `tensors` belongs: with its parameters, else on the device of the current stage."""
        return next((t.device for t in tensors if isinstance(t, torch.nn.Parameter)), self.device)

    def is_foreign(self, tensor: Tensor) -> bool:
        """Never: there is one graph."""
        return False

    def bring(self, tensor: Tensor, foreign: bool) -> Tensor:
        """`tensor` on the device of the current stage, in the same graph."""
        return tensor.to(self.device)

    def owns(self, device: torch.device) -> bool:
        """Whether `device` belongs to the pipeline."""
        return self.links.owns(device)

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight`, which autocast will cast."""
        return weight

    def may_defer(self, value: Any) -> bool:
        """Never: backward is whole."""
        return False

    def defer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Never called."""
        raise NotImplementedError


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

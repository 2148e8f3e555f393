"""Visits: a chunk's forward, its recompute and its backward, each with the chunk's weights on the device."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map_only

from ramtorch_core.engine.activations import BufferSnapshot, checkpoint_call
from ramtorch_core.engine.arguments import Arguments, Copies, fills_cache, may_write
from ramtorch_core.engine.backward import BackwardPasses, current_task
from ramtorch_core.engine.census import Chunk
from ramtorch_core.engine.follow import OpenVisit
from ramtorch_core.engine.inventory import Inventory
from ramtorch_core.engine.lend import Loan, Placement, lend
from ramtorch_core.engine.modules import tensors_in
from ramtorch_core.engine.observe import Observer, Use, may_be_fused
from ramtorch_core.engine.saved import SavedTensors, hooks_around
from ramtorch_core.engine.writes import Writes
from ramtorch_core.errors import RamtorchError
from ramtorch_core.memory.ranges import Kind
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.memory.window import Slot
from ramtorch_core.plan.itinerary import Direction

log = logging.getLogger(__name__)

_TWO_CHECKPOINTS = (
    "chunk '%s' is recomputed by a checkpoint of your own, and its activations by the engine as well: each is computed "
    "three times. Leave one out: activations='keep', or no checkpoint around chunks."
)
_CACHE = (
    "chunk '%s' fills a cache of keys and values in training: they stay in device memory until its backward. If nobody "
    "reads them, switch the cache off (config.use_cache = False)."
)


class Activations(Enum):
    """What happens to a chunk's activations between forward and backward."""

    KEEP = "keep"
    CHECKPOINT = "checkpoint"


class _Lending:
    """A visit with its tensors on show: in a slot, or (`opened` is None) in a copy of its own."""

    def __init__(self, chunk: Chunk, opened: OpenVisit | None, placement: Placement, lent: list[Tensor]) -> None:
        self.chunk, self.opened, self.placement, self.lent = chunk, opened, placement, lent
        self.version = opened.slot.buffer._version if opened is not None else 0
        self.uses: list[Use] | None = None


class _OpensBackward:
    """A hook on outputs: the first that fires opens the chunk's backward visit. Lives as long as the graph."""

    def __init__(self, visits: Visits, chunk: Chunk | None, exact: bool) -> None:
        self._visits, self._chunk, self._exact = weakref.ref(visits), chunk, exact

    def __call__(self, _grad: Tensor) -> None:
        visits = self._visits()
        if visits is not None and self._chunk is None:
            visits.backwards.enter()
        elif visits is not None and self._chunk is not None:
            visits.open_backward(self._chunk, exact=self._exact)


class Visits:
    """Runs the forwards of chunks, and opens and closes their backward visits.

    Attributes:
        graphs: a hook for each output whose graph lives and has not run backward.
        observing: who watches how weights are used, or None.
        saved: packs what is saved for backward.
    """

    def __init__(self, inventory: Inventory, backwards: BackwardPasses, activations: Activations) -> None:
        self.inventory, self.backwards, self.activations = inventory, backwards, activations
        self.device, self.dtypes = inventory.device, inventory.dtypes
        self.graphs: weakref.WeakSet[_OpensBackward] = weakref.WeakSet()
        self.observing: Observer | None = None
        self._backward: _Lending | None = None
        self._checkpointing = 0  # checkpointed chunks under way, one inside another
        self._copies: dict[int, Copies] = {}  # by index of a chunk: what it was seen to write among its arguments
        self._warned: set[str] = set()
        self._writes = Writes(self.device)
        self.saved = SavedTensors(inventory.locate, self._slot_for_backward, self.device.torch)
        self._marker = torch.empty(0, device=self.device.torch)

    # ------------------------------------------------------------------ forward

    def forward(self, inner: Callable[..., Any], chunk: Chunk, args: Any, kwargs: Any) -> Any:
        """`inner(*args, **kwargs)`, the chunk's own forward, as a visit."""
        exact = self._needs_exact(chunk)
        inner = partial(self._call, inner, chunk)
        if not torch.is_grad_enabled():
            unwatched = exact and self.observing is not None and _get_current_function_mode() is self.observing
            with self._lent(chunk, exact), _pop_mode_temporarily() if unwatched else contextlib.nullcontext():
                return inner(*args, **kwargs)
        if self.activations is Activations.KEEP:
            with self._lent(chunk, exact), self._hooks(chunk, hooks_around()):
                output = inner(*args, **kwargs)
        else:
            output = self._checkpointed(inner, chunk, exact, args, kwargs)
        self.watch(chunk, output, args, kwargs, exact=exact)
        return output

    def _call(self, inner: Callable[..., Any], chunk: Chunk, /, *args: Any, **kwargs: Any) -> Any:
        """The chunk's own forward. Weights that it returns, or views of them, become copies that outlive the visit."""
        output = inner(*args, **kwargs)
        if not any(map(self._in_slot, tensors_in(output))):
            return output
        output = tree_map_only(Tensor, lambda tensor: tensor.clone() if self._in_slot(tensor) else tensor, output)
        if any(map(self._in_slot, tensors_in(output))):
            raise RamtorchError(
                f"chunk '{chunk.name}' returns its own weights inside a {type(output).__name__}, and they leave the "
                f"device when its forward ends: return tensors, tuples, lists or dicts, or pin the chunk "
                f"(pin=['{chunk.name}'])"
            )
        return output

    def _in_slot(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return self.inventory.in_slot(tensor)

    def watch(self, chunk: Chunk | None, output: Any, args: Any, kwargs: Any, *, exact: bool = False) -> None:
        """Let the first gradient of an output open the chunk's backward visit (None: just join the backward)."""
        inputs = {id(tensor) for tensor in tensors_in((args, kwargs))}
        outputs = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf and id(t) not in inputs]
        if outputs:
            hook = _OpensBackward(self, chunk, exact)
            self.graphs.add(hook)
            for tensor in outputs:
                tensor.register_hook(hook)

    def ambient(self) -> torch.dtype | None:
        """Autocast's dtype on the device, None outside of autocast."""
        kind = self.device.torch.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def exact_weight(self, weight: Weight) -> Tensor:
        """A differentiable device copy of one weight in its master's dtype."""
        group = next(group for group in self.inventory.groups if weight in group.weights)
        part = WeightGroup(group.index, group.name, [weight])
        with torch._C.DisableTorchFunction():
            return lend(part, [self._copy_of(weight)], self.backwards, self.inventory.loans[group])[0]

    def _checkpointed(self, inner: Callable[..., Any], chunk: Chunk, exact: bool, args: Any, kwargs: Any) -> Any:
        snapshot = BufferSnapshot(chunk.module)
        again, observer, around = False, self.observing, hooks_around()
        if current_task() != -1 and self._checkpointing == 0:  # somebody else's recompute
            self._warn_once(chunk, _TWO_CHECKPOINTS)
        if fills_cache(args, kwargs):
            self._warn_once(chunk, _CACHE)
        copies = self._copies.get(chunk.index) or may_write(chunk.module)
        arguments = Arguments(f"chunk '{chunk.name}'", args, kwargs, copies=copies)

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal again
            self._checkpointing += 1
            try:
                if again:
                    with self._recomputing(chunk, exact, observer), snapshot.restored(), self._hooks(chunk, around):
                        return inner(*args, **kwargs)
                again = True
                try:
                    with self._hooks(chunk, around):
                        return inner(*args, **kwargs)
                finally:
                    snapshot.keep_changed()
            finally:
                self._checkpointing -= 1

        try:
            with self._lent(chunk, exact):
                return checkpoint_call(run, arguments, marker=self._marker)
        finally:
            self._copies[chunk.index] = Copies.ALL if arguments.written else self._copies.get(chunk.index, Copies.NONE)

    def _warn_once(self, chunk: Chunk, message: str) -> None:
        if message not in self._warned:
            log.warning(message, chunk.name)
        self._warned.add(message)

    @contextlib.contextmanager
    def _recomputing(self, chunk: Chunk, exact: bool, observer: Observer | None) -> Iterator[None]:
        """The backward visit of a checkpointed chunk, watched by whoever watched its forward."""
        if observer is not None and self.observing is None:
            self.observing = observer
            try:
                with observer, self._recomputing(chunk, exact, None):
                    yield
            finally:
                self.observing = None
            return
        if current_task() == -1 or exact:
            with self._lent(chunk, exact):
                yield
            return
        self.open_backward(chunk)
        group = self._present(chunk).group
        lending, self._backward = self._backward, None  # other chunks that run inside must not end this visit
        if group is None or lending is None or lending.opened is None:
            self._backward = lending
            yield
            return
        follower = self.inventory.follower
        follower.keep_open(lending.opened)
        if self.observing is not None:
            self.observing.lend(group.weights, lending.lent)
        try:
            with self.device.ranges.span(Kind.RECOMPUTE, group.index):
                yield
        finally:
            if self.observing is not None:
                self.observing.reclaim(lending.lent)
            self.close_backward()
            self._backward = lending
            follower.may_close(lending.opened)

    @contextlib.contextmanager
    def _lent(self, chunk: Chunk, exact: bool) -> Iterator[None]:
        """A forward visit: inside, the chunk's modules compute with device tensors."""
        if chunk.group is None:
            yield
            return
        self.close_backward()
        if current_task() != -1:
            self.backwards.enter()
        lending = self._show(chunk, chunk.group, Direction.FORWARD, exact, self.inventory.loans[chunk.group])
        if self.observing is not None and not exact:
            lending.uses = self.observing.lend(chunk.group.weights, lending.lent)
        try:
            yield
        finally:
            self._hide(lending, chunk.group)

    def _show(
        self,
        chunk: Chunk,
        group: WeightGroup,
        direction: Direction,
        exact: bool,
        loans: weakref.WeakSet[Loan] | None,
    ) -> _Lending:
        with torch._C.DisableTorchFunction():
            if exact:
                opened, views = None, [self._copy_of(weight) for weight in group.weights]
            else:
                opened = self.inventory.follower.open(group, direction)
                views = opened.slot.views(group)
            lent = lend(group, views, self.backwards, loans)
        placement = self.inventory.placements[group]
        placement.show(lent)
        return _Lending(chunk, opened, placement, lent)

    def _hide(self, lending: _Lending, group: WeightGroup) -> None:
        lending.placement.hide()
        if lending.uses is not None and self.observing is not None:
            self.observing.reclaim(lending.lent)
            for weight, use in zip(group.weights, lending.uses, strict=True):
                self.dtypes.note(weight, use)
        if lending.opened is None:
            return
        with torch._C.DisableTorchFunction():
            written = self._writes.seen(lending.chunk, lending.opened.slot, lending.version, lending.lent)
            self.inventory.follower.close(lending.opened)
        if written:
            raise RamtorchError(
                f"the forward of chunk '{lending.chunk.name}' writes its own weights in place; while they stream that "
                f"write would be lost. Keep the chunk on the device (pin=['{lending.chunk.name}']), or write the "
                f"parameters outside of forward."
            )

    def _hooks(self, chunk: Chunk, around: bool) -> contextlib.AbstractContextManager[None]:
        return self.saved.hooks(copied=around) if chunk.group is not None else contextlib.nullcontext()

    def _needs_exact(self, chunk: Chunk) -> bool:
        """Whether the chunk has shadows in half precision, and this visit is not under autocast to their dtype."""
        group = chunk.group
        if group is None or all(weight.own_shadow for weight in group.weights):
            return False
        if self.device.torch.type == "cpu" and may_be_fused(chunk.module):
            return True
        exact = self.ambient() != self.dtypes.compute
        if exact and not self.dtypes.warned:
            self.dtypes.warned = True
            log.warning(
                "chunk '%s' streams in %s, but runs outside of autocast: its float32 weights are copied for each such "
                "visit, without overlap. Run it under autocast, or pass stream_dtype=torch.float32.",
                chunk.name,
                self.dtypes.compute,
            )
        return exact

    def _copy_of(self, weight: Weight) -> Tensor:
        with torch.no_grad():
            return weight.parameter.detach().to(self.device.torch, copy=True)

    # ------------------------------------------------------------------ backward

    def open_backward(self, chunk: Chunk, *, exact: bool = False) -> None:
        """Begin the chunk's backward visit if it is not under way; the next visit ends it at the latest."""
        self.backwards.enter()
        chunk = self._present(chunk)
        if chunk.group is None or (self._backward is not None and self._backward.chunk is chunk):
            return
        self.close_backward()
        with torch.inference_mode(False), torch.enable_grad():
            self._backward = self._show(chunk, chunk.group, Direction.BACKWARD, exact, None)

    def close_backward(self, group: WeightGroup | None = None) -> None:
        """End the backward visit under way, if there is one (and, with `group`, if it is of that group)."""
        if group is not None and (self._backward is None or self._backward.chunk.group is not group):
            return
        lending, self._backward = self._backward, None
        if lending is not None:
            lending.placement.hide()
            if lending.opened is not None:
                self.inventory.follower.close(lending.opened)

    def _present(self, chunk: Chunk) -> Chunk:
        """The tree may have been divided anew since the forward."""
        return self.inventory.census.chunks[chunk.index]

    def _slot_for_backward(self, group: WeightGroup) -> Slot | None:
        if group not in self.inventory.chunk_of:
            return None
        if current_task() == -1:  # somebody reads saved tensors outside of a backward: a copy will do
            self.backwards.updates.wait(group)
            return None
        current = self._backward
        if current is not None and current.chunk.group is group and current.opened is not None:
            return current.opened.slot
        self.open_backward(self.inventory.chunk_of[group])
        slot = self.inventory.window.find(group)
        assert slot is not None
        return slot

"""Runs of a model that leave it as it was, and the activations that they keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ramtorch_core.engine.modules import tensors_in
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.visits import Activations
from ramtorch_core.errors import ConfigurationError


class Discard(torch.optim.Optimizer):
    """Steps by doing nothing, so that gradients take no more host memory than on their way."""

    update_granularity = "parameter"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing changes."""


class Run:
    """Steps of the model."""

    def __init__(self, streamer: Streamer, step: Callable[[], Tensor], autocast: torch.dtype | None) -> None:
        self.streamer, self._step, self._autocast = streamer, step, autocast
        self._discard = Discard([p for p in streamer.root.parameters() if p.requires_grad])

    def forward(self) -> Tensor:
        """The loss of one forward."""
        kind = self.streamer.device.torch.type
        with torch.autocast(kind, self._autocast, enabled=self._autocast is not None), self.streamer.scope():
            return self._step()

    def train(self, backward_begins: Callable[[], None] = lambda: None) -> None:
        """Forward, backward, and an update that does nothing."""
        loss = self.forward()
        backward_begins()
        if not loss.requires_grad:
            raise ConfigurationError("the loss has no gradient: no parameter that it depends on is trained")
        with self.streamer.updates.overlap(self._discard):
            loss.backward()
        self._discard.step()
        self._discard.zero_grad()


@dataclass(slots=True)
class Footprint:
    """Bytes of a chunk's activations, and arithmetic operations of its forward where they are counted.

    Attributes:
        kept: what it saves for backward; each storage counts for the chunk that saves it first.
        boundary: its inputs. Those of the chunk that is called first are there before, and count for what is in none.
        recomputed: what it saves of its own, so that a recompute makes it.
    """

    kept: int = 0
    boundary: int = 0
    recomputed: int = 0
    operations: int = 0


Storages = dict[int, StorageWeakRef]
"""Those that were seen; while one is referred to, no other one gets its address."""


class Counts:
    """Counts what chunks save and are given, each storage once; `stays` is there anyway.

    Tensors without a storage of their own take nothing.
    """

    def __init__(self, stays: Tensor) -> None:
        self._saved: Storages = {}
        bytes_once(stays, self._saved)
        self._inputs = dict(self._saved)
        self._own: dict[int, Storages] = {}
        self._first: Footprint | None = None
        self.outside = Footprint()

    def given(self, footprint: Footprint, arguments: Any) -> None:
        """A chunk begins with these arguments."""
        self._first = footprint if self._first is None else self._first
        counts = self.outside if footprint is self._first else footprint
        for tensor in tensors_in(arguments):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                counts.boundary += bytes_once(tensor, self._inputs)

    def saved(self, footprint: Footprint, tensor: Tensor) -> None:
        """A chunk saves a tensor."""
        with contextlib.suppress(NotImplementedError, RuntimeError):
            footprint.kept += bytes_once(tensor, self._saved)
            if tensor.untyped_storage()._cdata not in self._inputs:
                footprint.recomputed += bytes_once(tensor, self._own.setdefault(id(footprint), {}))


def bytes_once(tensor: Tensor, known: Storages) -> int:
    """Bytes of the tensor's storage, the first time that it is seen."""
    storage = tensor.untyped_storage()
    if storage._cdata in known:
        return 0
    known[storage._cdata] = StorageWeakRef(storage)
    return int(storage.nbytes())


class _NotKept(RuntimeError):
    """A forward has a backward inside, which needs what was only counted."""


def footprints_of(run: Run, operations: Callable[[], int] = lambda: 0) -> list[Footprint]:
    """Of what is in no chunk, and of each group: one forward that would keep everything for backward, but only counts.

    Where the forward differentiates, it does keep everything, until it is over.

    Args:
        operations: how many there were so far.
    """
    try:
        return _footprints_of(run, operations, keep=False)
    except _NotKept:
        return _footprints_of(run, operations, keep=True)


def _footprints_of(run: Run, operations: Callable[[], int], *, keep: bool) -> list[Footprint]:
    chunks = [chunk.module for chunk in run.streamer.census.chunks if chunk.group is not None]
    counts = Counts(run.streamer._inventory.rest.buffer)
    footprints = [counts.outside, *(Footprint() for _ in chunks)]
    inside = [counts.outside]  # chunks under way
    seen = 0

    def pack(tensor: Tensor) -> Tensor | None:
        counts.saved(inside[-1], tensor)
        return tensor.detach() if keep else None

    def attribute() -> None:
        nonlocal seen
        now = operations()
        inside[-1].operations += now - seen
        seen = now

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        handles = []
        for footprint, chunk in zip(footprints[1:], chunks, strict=True):

            def enter(_: nn.Module, args: Any, kwargs: Any, footprint: Footprint = footprint) -> None:
                attribute()
                counts.given(footprint, (args, kwargs))
                inside.append(footprint)

            def leave(*_: Any) -> None:
                attribute()
                inside.pop()

            handles.append(chunk.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(chunk.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    visits = run.streamer._visits
    policy, visits.activations = visits.activations, Activations.KEEP
    try:
        with watching(), saved_tensors_hooks(pack, _unpack):
            run.forward()
        attribute()
    finally:
        visits.activations = policy
    return footprints


def _unpack(kept: Tensor | None) -> Tensor:
    if kept is None:
        raise _NotKept("this graph has no backward")
    return kept

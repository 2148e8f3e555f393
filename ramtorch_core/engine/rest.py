"""The rest: tensors whose copies stay on the device, because they are small, shared, or used outside of any chunk.

They are one group with a permanent slot, which has the two events that every slot has, and one permanent Lend node.
While a step runs their modules compute with the copies; outside of it they show the masters.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ramtorch_core.engine.lend import Collector, Placement, is_hooked, lend
from ramtorch_core.memory.device import COMPLETE, Device, Event
from ramtorch_core.memory.weights import Weight, WeightGroup

COMPARED_BYTES = 1 << 16
"""Copies no larger than this are compared by value, since writes through `.data` move no version counter."""


class Rest:
    """Device copies of the tensors that do not stream.

    Args:
        weights: all of them cross in their own dtype.
        collector: takes their gradients, once per backward.
    """

    def __init__(self, weights: Sequence[Weight], device: Device, collector: Collector) -> None:
        weights = sorted(weights, key=lambda weight: weight.parameter.nbytes)  # those that are compared come first
        self.group = WeightGroup(-1, "tensors that stay", weights, sampled=False)
        self.device, self._collector = device, collector
        self._placement = Placement(weights)
        self._compared = [weight for weight in weights if weight.parameter.nbytes <= COMPARED_BYTES]
        self._left = torch.empty(0)  # bytes of these, as the engine left them on the device
        self._versions: list[int] = []  # of the views, likewise
        self._views: list[Tensor] = []
        self._lent: list[Tensor] = []
        self.buffer = torch.empty(0)
        self._nodes: list[tuple[bool, bool]] = []  # which weights had a gradient, and hooks, when they were lent
        self._recurrent: list[int] = []
        self._free: Event = COMPLETE  # the last use of the copies that has ended, on whatever stream
        self.users = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.group.nbytes

    def build(self) -> None:
        """Allocate the copies and fill them."""
        self.group.build([weight.parameter.dtype for weight in self.group.weights], self.device)
        with torch.inference_mode(False), torch.no_grad():
            self.buffer = torch.empty(self.group.nbytes, dtype=torch.uint8, device=self.device.torch)
            self._left = torch.empty(0)
            self._views = [self._own_version(weight.view(self.buffer)) for weight in self.group.weights]
        self._copy(self.group.weights)

    def enter(self) -> None:
        """One more user; the first lets the modules compute with the copies."""
        self.users += 1
        if self.users == 1:
            self.device.wait(self.group.copied)
            self._placement.show(self._tensors())

    def leave(self) -> None:
        """One user less; the last lets the modules show their masters again."""
        self.users = max(0, self.users - 1)
        if self.users == 0:
            self._free = self.device.record()
            self._placement.hide()
            self.take_writes()

    def take_writes(self, *, compare: bool = False) -> None:
        """Give masters the values that code in a step wrote into their copies (`self.scale.clamp_(max=1)`).

        Args:
            compare: find writes through `.data` to small copies too; waits for the device.
        """
        if not self._lent or not self.group.nbytes or self.device.fake:
            return
        pairs = list(zip(self._lent, self._views, strict=True))
        moved = [lent.data_ptr() != view.data_ptr() for lent, view in pairs]  # by `.data = ...`
        written = [moved[i] or view._version != self._versions[i] for i, (_, view) in enumerate(pairs)]
        found = self.buffer[: self._left.numel()].cpu() if compare else self._left
        if not torch.equal(found, self._left):
            for i, weight in enumerate(self._compared):
                here = slice(weight.offset, weight.offset + weight.nbytes)
                written[i] |= not torch.equal(found[here], self._left[here])
        for i in self._recurrent:
            written[i] = moved[i] = False
        with torch.inference_mode(False), torch.no_grad():
            for i, weight in enumerate(self.group.weights):
                if written[i]:
                    weight.parameter.copy_(self._lent[i].detach())
        self._versions = [view._version for view in self._views]
        if any(moved):
            self._lent = []
            if self.users:
                self._placement.replace(self._tensors())

    def refresh(self, *, force: bool = False) -> None:
        """Bring the copies up to date with masters that were written; see `WeightGroup.refresh`.

        Only the version counters of tensors that changed move, as they would if the copies were the parameters.
        """
        self.take_writes()
        if self.group.arena is not None:
            written = [weight for weight in self.group.weights if weight.written()]
            if self.group.refresh(force=force):
                self._copy(written)
        self.follow_toggles()

    def follow_toggles(self) -> None:
        """Lend anew if `requires_grad` of a master, or whether it has hooks, changed inside of a step."""
        if self.users and self._stale_graph():
            self._placement.replace(self._tensors())

    def release(self) -> None:
        """Drop the copies; the modules show their masters."""
        if self.users:
            self.users = 1
            self.leave()
        self.group.release()
        self._views, self._lent, self._recurrent, self.buffer = [], [], [], torch.empty(0)

    def _tensors(self) -> list[Tensor]:
        if not self._lent or self._stale_graph():
            with torch.inference_mode(False), torch.enable_grad():
                self._lent = lend(self.group, self._views, self._collector)
            self._nodes = self._wanted_nodes()
            for weight, lent in zip(self.group.weights, self._lent, strict=True):
                vars(lent)["__deepcopy__"] = partial(
                    copy.deepcopy, weight.parameter
                )  # a copied module owns its weights
            # cuDNN moves the weights of a recurrent module to one buffer in its own layout, once it has seen them.
            self._recurrent = [i for i, w in enumerate(self.group.weights) if isinstance(w.sites[0][0], nn.RNNBase)]
        return self._lent

    def _stale_graph(self) -> bool:
        return self._nodes != self._wanted_nodes()

    def _wanted_nodes(self) -> list[tuple[bool, bool]]:
        masters = [weight.parameter for weight in self.group.weights]
        return [(master.requires_grad, is_hooked(master)) for master in masters]

    def _copy(self, written: Sequence[Weight]) -> None:
        """Copy everything in one piece, after what still reads the copies; tell autograd which were `written`.

        Small copies whose masters have not changed keep what was written through `.data` since.
        """
        arena, written_set = self.group.arena, set(written)
        if arena is None or not self.group.nbytes:
            return
        with torch.no_grad():
            self.device.wait(self._free)
            last = self._compared[-1] if self._compared else None
            begin = 0 if last is None else last.offset + last.nbytes
            if self.device.fake or not torch.equal(arena.flat[:begin], self._left):
                self._left, begin = arena.flat[:begin].clone(), 0
            self.buffer[begin:].copy_(arena.flat[begin:], non_blocking=True)
            for index in self._recurrent:
                self._lent[index].data.copy_(self.group.weights[index].shadow, non_blocking=True)
            self.group.copied = self.device.record()
            for weight, view in zip(self.group.weights, self._views, strict=True):
                if weight in written_set:
                    torch.autograd.graph.increment_version(view)
            self._versions = [view._version for view in self._views]

    def _own_version(self, view: Tensor) -> Tensor:
        """The same memory, with a version counter of its own."""
        alias = torch.empty(0, dtype=view.dtype, device=view.device)
        return alias.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())

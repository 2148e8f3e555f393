"""Where each weight's published gradient is on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ramtorch_core.memory.device import COMPLETE, Device, Event
from ramtorch_core.memory.host import Arena
from ramtorch_core.memory.weights import Weight, WeightGroup


@dataclass(eq=False, slots=True)
class Gradient:
    """One weight's gradient on the host; `pending` from its first copy until it is published."""

    host: Tensor
    arena: Arena
    offset: int
    pending: bool = True
    withdrawn: bool = False  # it is no longer `.grad` until the sum has arrived
    wide: Tensor | None = None
    version: int = 0

    def widened(self) -> Tensor | None:
        """The sum in float32 of which `host` is the rounded value, unless somebody wrote to that since."""
        return self.wide if self.version == self.host._version else None


class Book:
    """The gradients of one group: a tight layout, one arena, and who uses which region.

    Attributes:
        moved: an event after the copies to its regions.
    """

    def __init__(self, group: WeightGroup, device: Device) -> None:
        self.group, self.device = group, device
        self.offsets: dict[Weight, int] = {}
        self.nbytes = 0
        self.moved: Event = COMPLETE
        self.arena: Arena | None = None
        self.wide_arena: Arena | None = None
        self.gradients: dict[Weight, Gradient] = {}

    def admit(self, weights: Iterable[Weight]) -> None:
        """Lay out these weights and those that were admitted before; frozen ones never are, so they take no memory.

        Gradients in a former layout stay where they are.
        """
        if self.offsets.keys() >= (admitted := {*self.offsets, *weights}):
            return
        self.offsets, self.nbytes, self.arena, self.wide_arena = {}, 0, None, None
        for weight in sorted(self.group.weights, key=lambda weight: -weight.parameter.dtype.itemsize):
            if weight in admitted:
                self.offsets[weight] = self.nbytes
                self.nbytes += weight.parameter.nbytes

    def forget_withdrawn(self) -> None:
        """Reuse the regions whose `.grad` the user set to None, unless somebody still holds one."""
        kept = {w: g for w, g in self.gradients.items() if g.pending or w.parameter.grad is g.host}
        self.gradients = kept
        ours = sum(gradient.arena is self.arena for gradient in kept.values())
        if self.arena is not None and self.arena.tensors_alive() > ours:
            self.arena = None

    def fresh(self, weight: Weight) -> Gradient:
        """A region for the weight's next gradient."""
        if self.arena is None or weight in self.gradients:
            self.arena = Arena(self.nbytes, self.device)
        offset = self.offsets[weight]
        host = self.arena.tensor(offset, weight.parameter.dtype, weight.size, weight.stride)
        gradient = self.gradients[weight] = Gradient(host, self.arena, offset)
        return gradient

    def widen(self, weight: Weight) -> Tensor:
        """The float32 accumulator of a half-precision weight."""
        if self.wide_arena is None:
            count = sum(w.parameter.numel() for w in self.offsets)
            self.wide_arena = Arena(4 * count, self.device)
        position = sum(w.parameter.numel() for w in self.offsets if self.offsets[w] < self.offsets[weight])
        return self.wide_arena.tensor(4 * position, torch.float32, weight.size, weight.stride)

"""Parameters away from home, and parameters cast once per step.

A parameter that another stage uses (a tied embedding, for example) is lent: that stage works on a leaf of its own. Its
gradient moves on, after each backward, to the next earlier stage that uses the parameter, where it enters the sum
first, so terms are added in the order in which autograd would have added them on one device, up to the earliest stage.
Where that is not the home, the home itself works on such a leaf, and the sum goes home from there.

Under autocast a weight is cast at its first use in a step and the result is shared by all microbatches. Each use is a
node of its own from the parameter to the cast weight, so that sums and hooks are those of autocast without its cache.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ramtorch_core.engine.pipeline.links import Links, Parcel
from ramtorch_core.memory.device import COMPLETE, Device, Event

__all__ = ["Loans"]


class _CastUse(torch.autograd.Function):
    """One use of a weight that was cast already: the forward costs nothing, the backward casts the gradient back."""

    @staticmethod
    @override
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return cast.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


class Loans:
    """What is lent and cast in one step. Each stage's entries are touched only by the thread whose turn it is there.

    Args:
        split: weight gradients are ops of their own, so that a later microbatch's sum may be complete earlier.
    """

    def __init__(
        self,
        homes: dict[int, int],
        devices: list[Device],
        links: Links,
        ready: dict[torch.device, Event],
        split: bool = False,
    ) -> None:
        self._homes = homes
        self._devices = devices  # per stage
        self._links = links
        self._ready = ready
        self._split = split
        self._lent: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in devices]
        self._cast: list[dict[tuple[int, torch.dtype], Tensor]] = [{} for _ in devices]
        self._returned: list[dict[int, list[tuple[Tensor, Parcel]]]] = [defaultdict(list) for _ in devices]
        self._late: list[tuple[int, Tensor, Parcel]] = []
        self.early: frozenset[int] = frozenset()
        """`id`s of trained parameters that stages before their home have used."""

    def borrow(self, parameter: Tensor, stage: int) -> Tensor:
        """The leaf that stands for `parameter` in `stage`."""
        found = self._lent[stage].get(id(parameter))
        if found is None:
            device = self._devices[stage]
            with torch.no_grad():
                ready = self._ready.get(parameter.device, COMPLETE)
                local = self._links.receive(self._links.send(parameter, device, ready, "forward")).detach()
            leaf = nn.Parameter(local, requires_grad=parameter.requires_grad)
            self._lent[stage][id(parameter)] = found = (parameter, leaf)
            if stage < self._homes[id(parameter)] and parameter.requires_grad:
                self.early |= {id(parameter)}
        return found[1]

    def cast_value(self, weight: Tensor, dtype: torch.dtype, stage: int) -> Tensor:
        """`weight`, a leaf on the stage's device that lives as long as the step, in `dtype`, without graph.

        Made once per step and stage.
        """
        key = (id(weight), dtype)
        cast = self._cast[stage].get(key)
        if cast is None:
            cast = self._cast[stage][key] = weight.detach().to(dtype)
        return cast

    def cast(self, weight: Tensor, original: Tensor, dtype: torch.dtype, stage: int) -> Tensor:
        """One use of `weight`, which may stand for `original` in one call, in `dtype`, in the graph."""
        cast = self.cast_value(original, dtype, stage)
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return cast
        return _CastUse.apply(weight, cast)  # type: ignore[no-any-return, no-untyped-call]

    def collect(self, stage: int, microbatch: int, early: Sequence[frozenset[int]]) -> None:
        """After this stage's backward: send the gradients of what it borrowed to the next stage that has a share.

        Args:
            early: per stage, what `early` was when the microbatch began there.
        """
        for parameter, leaf in self._lent[stage].values():
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                continue
            key, home = id(parameter), self._homes[id(parameter)]
            shares = (s for s in reversed(range(stage)) if key in self._lent[s] or (s == home and key not in early[s]))
            target = next(shares, None)
            mark = self._links.mark(gradient.device)
            parcel = self._links.send(gradient, self._devices[home if target is None else target], mark, "backward")
            if target is not None:
                self._returned[target][microbatch].append((parameter, parcel))
            elif self._split:
                self._late.append((microbatch, parameter, parcel))
            else:
                torch.autograd.backward([parameter], [self._links.receive(parcel)])

    def returned(self, stage: int, microbatch: int, early: frozenset[int]) -> list[tuple[Tensor, Tensor]]:
        """(parameter at home in `stage`, or the leaf that stands for it there, its gradient from later stages)."""
        pairs = self._returned[stage].pop(microbatch, ())
        return [(self._share(parameter, stage, early), self._links.receive(parcel)) for parameter, parcel in pairs]

    def settle(self) -> None:
        """After the step: add the sums that had to wait, in the order of the microbatches."""
        for _, parameter, parcel in sorted(self._late, key=lambda item: item[0]):
            torch.autograd.backward([parameter], [self._links.receive(parcel)])
        self._late.clear()

    def _share(self, parameter: Tensor, stage: int, early: frozenset[int]) -> Tensor:
        if self._homes[id(parameter)] == stage and id(parameter) not in early:
            return parameter
        return self._lent[stage][id(parameter)][1]

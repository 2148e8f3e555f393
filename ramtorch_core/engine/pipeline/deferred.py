"""The split backward: the gradient of a call's input now, those of its weights later.

A call such as `linear(x, weight, bias)` is recorded in a small graph of its own, with leaves in place of its arguments.
The backward of the stage takes the gradient of the input out of it (I), and the op W those of the weights. Autograd's
own formulas compute both, so they are exact for every such function, with and without autocast.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ramtorch_core.engine.pipeline.thread_state import engine_backward
from ramtorch_core.errors import RamtorchError

__all__ = ["Deferral", "Job"]


class Job:
    """One call: its graph, the gradient of its output once known, and the weights that still wait for theirs."""

    def __init__(self, output: Tensor, x: Tensor | None, weights: list[tuple[Tensor, Tensor]], number: int) -> None:
        self.output = output
        self.x = x
        self.weights = weights
        """(parameter, the leaf that stood for it)."""
        self.number = number
        """Autograd's count at the call: later calls come first in a backward."""
        self.gradient: Tensor | None = None

    def input_gradient(self, gradient: Tensor) -> Tensor | None:
        """The gradient of the input, given that of the output."""
        return None if self.x is None else _gradients(self.output, (self.x,), gradient, retain_graph=True)[0]

    def keep(self, gradient: Tensor) -> None:
        """The weights' gradients can be computed from that of the output; the input's is not asked for again."""
        self.gradient, self.x = gradient, None

    def weight_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, gradient in its dtype); frees the graph."""
        assert self.gradient is not None
        found = _gradients(self.output, tuple([leaf for _, leaf in self.weights]), self.gradient, retain_graph=False)
        return [(p, g.to(p.dtype)) for (p, _), g in zip(self.weights, found, strict=True)]


def _gradients(
    output: Tensor, inputs: tuple[Tensor, ...], gradient: Tensor, *, retain_graph: bool
) -> tuple[Tensor, ...]:
    """`torch.autograd.grad` without its checks, which take longer than a small call's backward."""
    found: tuple[Tensor, ...] = engine_backward(
        (output,), (gradient,), retain_graph, False, inputs, allow_unreachable=False, accumulate_grad=False
    )
    return found


class _Split(torch.autograd.Function):
    """The call in the graph of the stage."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, x: Tensor, job: Job, deferral: "Deferral") -> Tensor:
        ctx.job, ctx.deferral = job, deferral
        ctx.set_materialize_grads(False)
        return job.output.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None, None, None]:
        job, deferral, gradient = ctx.job, ctx.deferral, gradients[0]
        if deferral is None:
            raise RuntimeError("Trying to backward through the graph a second time, where backward is split")
        if deferral.taking:
            ctx.job = ctx.deferral = None
        elif torch.is_grad_enabled():
            raise RamtorchError(
                "a gradient of a gradient (create_graph=True) cannot be had where the schedule splits the backward: "
                "use another one, such as schedule='1f1b'"
            )
        if gradient is None:
            return None, None, None, None
        found = job.input_gradient(gradient)
        if deferral.taking:
            deferral.queue(job, gradient)
        return None, found, None, None


class Deferral:
    """The weight gradients that one microbatch owes in one stage."""

    def __init__(self, anchor: Tensor) -> None:
        self._anchor = anchor
        self._queue: list[Job] = []
        self._aliases: list[tuple[Tensor, Tensor, int]] = []
        self._first: list[tuple[Tensor, Tensor]] = []
        self._originals: dict[int, Tensor] = {}
        self.taking = False
        """The backward of the stage is under way; what user code computes before is its own affair."""

    def queue(self, job: Job, gradient: Tensor) -> None:
        """The weights of `job` wait for their gradients, given that of its output."""
        job.keep(gradient)
        self._queue.append(job)

    def call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cast: Callable[[Tensor], Tensor],
        owns: Callable[[Any], bool],
        number: int,
    ) -> Tensor:
        """`func(*args, **kwargs)`, the gradients of the weights that it `owns` deferred; `args[0]` is the input."""
        weights: list[tuple[Tensor, Tensor]] = []

        def leaf(value: Any) -> Any:
            if not owns(value):
                return value
            local = cast(value).detach().requires_grad_()
            weights.append((value, local))
            return local

        x = cast(args[0])
        with torch.enable_grad():
            inside = x.detach().requires_grad_(x.requires_grad)
            output = func(inside, *map(leaf, args[1:]), **{key: leaf(value) for key, value in kwargs.items()})
        job = Job(output, inside if x.requires_grad else None, weights, number)
        return _Split.apply(self._anchor, x, job, self)  # type: ignore[no-any-return, no-untyped-call]

    def alias(self, parameter: Tensor, number: int) -> Tensor:
        """What stands for a deferred weight in one other call; its gradient waits with the others."""
        leaf = torch.nn.Parameter(parameter.detach())
        self._aliases.append((parameter, leaf, number))
        self._originals[id(leaf)] = parameter
        return leaf

    def original(self, weight: Tensor) -> Tensor:
        """The parameter for which `weight` stands, else itself."""
        return self._originals.get(id(weight), weight)

    def take(
        self, returned: Iterable[tuple[Tensor, Tensor]], deferrable: Container[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """The backward begins: keep gradients from later stages of weights whose gradients wait; returns the others.

        Those of weights that this microbatch does not use here wait too: earlier microbatches come first.
        """
        self.taking = True
        others: list[tuple[Tensor, Tensor]] = []
        for parameter, gradient in returned:
            (self._first if id(parameter) in deferrable else others).append((parameter, gradient))
        return others

    def finish(self) -> None:
        """Compute the deferred gradients and add each weight's sum to its `.grad`, through its hooks.

        The terms of a sum are added in the order in which one backward would have added them.
        """
        terms = [(1 << 62, parameter, gradient) for parameter, gradient in self._first]
        terms += [(number, parameter, leaf.grad) for parameter, leaf, number in self._aliases if leaf.grad is not None]
        terms += [(job.number, parameter, found) for job in self._queue for parameter, found in job.weight_gradients()]
        terms.sort(key=lambda term: -term[0])  # stable
        sums: dict[Tensor, Tensor] = {}
        for _, parameter, gradient in terms:
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        if sums:
            engine_backward(
                tuple(sums), tuple(sums.values()), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

"""Lending: for the length of a visit, modules compute with device views of their weights.

One `Lend` node per visit leads from the masters to the views, so the graph knows the masters. The views are placed in
the `__dict__` of the modules that own the weights, where attribute access finds them before `_parameters`: iterators,
`state_dict()`, optimizers and hooks see the masters, the same `Parameter` objects, at every moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ramtorch_core.memory.weights import Weight, WeightGroup


class Collector(Protocol):
    """Takes the gradients that backward leaves on the device."""

    def collect(self, loan: Loan, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of `loan.weights`, in their order, None where there is none to take."""


class Loan:
    """The weights that one Lend node lent.

    Attributes:
        weights: those that require a gradient, in the order of the node's inputs.
        node: the Lend node, while its graph lives.
        repaid_in: the graph task (backward) in which the node ran last, -1 before any.
    """

    def __init__(
        self, group: WeightGroup, weights: Sequence[Weight], views: Sequence[Tensor], collector: Collector
    ) -> None:
        self.group, self.weights, self.views = group, weights, views
        self.collector = collector
        self.node: Callable[[], Any] = lambda: None
        self.repaid_in = -1

    def is_due(self) -> bool:
        """Whether the node is yet to run in the graph task under way."""
        node = self.node()
        if node is None or self.repaid_in == torch._C._current_graph_task_id():
            return False
        return bool(torch._C._will_engine_execute_node(node))


class _Lend(torch.autograd.Function):
    """Masters in, device views out; backward hands the gradients to the collector."""

    @staticmethod
    def forward(ctx: Any, loan: Loan, *_masters: Tensor) -> tuple[Tensor, ...]:
        ctx.loan, loan.node = loan, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        views, loan.views = loan.views, ()
        return tuple(view.detach() for view in views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        loan: Loan = ctx.loan
        returned: list[Tensor | None] = []
        collected: list[Tensor | None] = []
        for weight, grad, (node, _) in zip(loan.weights, grads, ctx.next_functions, strict=True):
            keep = give = None
            if grad is not None and weight.parameter.requires_grad:
                if _somebody_looks(weight.parameter, grad, node):
                    give = grad.to(device=weight.parameter.device, dtype=weight.parameter.dtype)
                elif torch._C._will_engine_execute_node(node):
                    keep = grad
            returned.append(give)
            collected.append(keep)
        loan.repaid_in = torch._C._current_graph_task_id()
        loan.collector.collect(loan, collected)
        return (None, *returned)


def is_lent(tensor: Tensor) -> bool:
    """Whether a Lend node made the tensor: it stands for a weight."""
    return isinstance(tensor.grad_fn, _Lend._backward_cls)


def _somebody_looks(master: nn.Parameter, grad: Tensor, node: Any) -> bool:
    """Whether autograd itself must see this gradient, as a tensor on the master's device.

    True for `autograd.grad` with respect to the master, hooks on it, `create_graph=True`, and sparse gradients. Torch
    refuses a device gradient for a host leaf, so it has to be copied at once; otherwise it travels on its own stream.
    """
    if master._backward_hooks or master._post_accumulate_grad_hooks or grad.is_sparse or torch.is_grad_enabled():
        return True
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch's answer when the leaf's gradient is captured instead of accumulated
        return True
    return False


def lend(
    group: WeightGroup,
    views: Sequence[Tensor],
    collector: Collector,
    loans: weakref.WeakSet[Loan] | None = None,
) -> list[Tensor]:
    """Device tensors for every weight of `group`, connected to the masters where those require a gradient.

    Args:
        views: one per weight, without gradient history.
        loans: where the loan is noted for as long as its graph lives.
    """
    if not torch.is_grad_enabled():
        return [view.detach() for view in views]
    pairs = [(w, v) for w, v in zip(group.weights, views, strict=True) if w.parameter.requires_grad]
    if not pairs:
        return [view.detach() for view in views]
    lent: dict[Weight, Tensor] = {}
    for some in _apart(pairs):
        loan = Loan(group, [weight for weight, _ in some], [view for _, view in some], collector)
        if loans is not None:
            loans.add(loan)
        masters = (weight.parameter for weight in loan.weights)
        lent.update(zip(loan.weights, _Lend.apply(loan, *masters), strict=True))  # type: ignore[no-untyped-call]
    return [lent[w] if w in lent else v.detach() for w, v in zip(group.weights, views, strict=True)]


def is_hooked(master: nn.Parameter) -> bool:
    """Whether hooks of the user's are called with its gradient."""
    return bool(master._backward_hooks)


def _apart(pairs: Sequence[tuple[Weight, Tensor]]) -> list[list[tuple[Weight, Tensor]]]:
    """One node for all, but for weights with hooks: these would be called with None where others have gradients."""
    alone = [[pair] for pair in pairs if is_hooked(pair[0].parameter)]
    rest = [pair for pair in pairs if not is_hooked(pair[0].parameter)]
    return [rest, *alone] if rest else alone


class Placement:
    """Puts lent tensors where the modules look, and takes them away again.

    A module may run inside itself: each `hide` shows again what the `show` before its own had put there. cuDNN's
    recurrent modules read a list of their weights, `_flat_weights`, instead of the attributes; it is lent too.
    """

    def __init__(self, weights: Iterable[Weight]) -> None:
        self._sites = [(module.__dict__, name, i) for i, w in enumerate(weights) for module, name in w.sites]
        positions = {(id(attributes), name): i for attributes, name, i in self._sites}
        modules = {id(module): module for w in weights for module, _ in w.sites if isinstance(module, nn.RNNBase)}
        self._recurrent = [
            (module, [positions.get((id(module.__dict__), name)) for name in module._flat_weights_names])
            for module in modules.values()
        ]
        self._masters: list[list[Tensor]] = []
        self._shown: list[Sequence[Tensor]] = []

    def show(self, lent: Sequence[Tensor]) -> None:
        """Let the modules compute with `lent`, one tensor per weight."""
        if not self._shown:
            self._masters = [module.__dict__["_flat_weights"] for module, _ in self._recurrent]
        self._shown.append(lent)
        self._put(lent)

    def replace(self, lent: Sequence[Tensor]) -> None:
        """Exchange what is shown."""
        self._shown[-1] = lent
        self._put(lent)

    def _put(self, lent: Sequence[Tensor]) -> None:
        for attributes, name, index in self._sites:
            attributes[name] = lent[index]
        for module, indices in self._recurrent:
            self._set_flat(module, indices, lent)

    def hide(self) -> None:
        """Let the modules show what they showed before, in the end their masters; no effect when nothing is shown."""
        if self._shown:
            self._shown.pop()
        if self._shown:
            self._put(self._shown[-1])
            return
        for attributes, name, _ in self._sites:
            attributes.pop(name, None)
        for (module, indices), masters in zip(self._recurrent, self._masters, strict=False):
            own = [None if i is None else n for n, i in enumerate(indices)]
            self._set_flat(module, own, masters)
        self._masters = []

    def _set_flat(self, module: nn.RNNBase, indices: Sequence[int | None], tensors: Sequence[Tensor]) -> None:
        """What is no parameter stays: a hook of weight norm, or of pruning, computes it in each forward."""
        present = module.__dict__["_flat_weights"]
        flat = [present[n] if i is None else tensors[i] for n, i in enumerate(indices)]
        module.__dict__["_flat_weights"] = flat

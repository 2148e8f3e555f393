"""Runs an optimizer on single weights, in blocks, with the state where the optimizer keeps it.

`torch.optim` optimizers step all their parameters at once. Here one step is divided by weight, and, if every element is
updated on its own, by block: cast, update and shadow write of a block then share the processor's cache. Blocks are
multiples of the vector width, so results are those of one whole step, bit for bit.

Other optimizers take part if the class that defines `step` says so: `update_granularity = "element"` if the new value
of an element depends only on the values of the same element (of parameter, gradient and state), and state tensors have
the parameter's size or one element; `"parameter"` if each parameter is updated independently of the others.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ramtorch_core.memory.weights import Weight, as_vector
from ramtorch_core.optim.adamw import AdamW, suits_kernel, update_in_torch
from ramtorch_core.optim.ahead import Undo
from ramtorch_core.optim.compiled import AdamKernel, AdamWeight, adam_rates, read_number, takes, write_number

BLOCK = 1 << 20
"""Elements: a block's gradient, master and two moments take 16 MB in float32."""


class Granularity(Enum):
    """By what an optimizer's step can be divided without changing its result."""

    ELEMENT = "element"
    PARAMETER = "parameter"


_KNOWN = {
    **dict.fromkeys(
        ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
        Granularity.ELEMENT,
    ),
    **dict.fromkeys(("Adafactor", "Muon"), Granularity.PARAMETER),
}


def granularity(optimizer: Optimizer) -> Granularity | None:
    """By what the optimizer's step can be divided; None if that is not known, or it cannot."""
    kind = defining_class(type(optimizer))
    if kind.__module__.startswith("torch.optim"):
        return _KNOWN.get(kind.__name__)
    declared = vars(kind).get("update_granularity")
    return None if declared is None else Granularity(declared)


def defining_class(kind: type[Optimizer]) -> type:
    """The class whose `step` this one runs.

    It is not always the first that has the attribute: with its first object a class that inherits `step` may get a
    wrapper of its own, which calls hooks.
    """
    bases = [base for base in kind.__mro__ if "step" in vars(base)]
    return next(base for base in reversed(bases) if _unhooked(vars(base)["step"]) is _unhooked(kind.step))


def _unhooked(step: Any) -> Any:
    """The step inside torch's wrapper, which calls hooks and names the step in profiles."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def why_whole(optimizer: Optimizer) -> str | None:
    """Why this optimizer has to step all its parameters at once, with published gradients; None if it need not."""
    name = type(optimizer).__name__
    if granularity(optimizer) is None:
        return f"{name} is not known to update each parameter independently (see update_granularity)"
    if any(group.get("capturable") or group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is capturable or differentiable"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or _global_hooks():
        return f"{name} has step hooks"
    if granularity(optimizer) is Granularity.PARAMETER and any(map(_epsilon_of_the_first, optimizer.param_groups)):
        return f"{name} takes a group's epsilon from its first parameter's dtype: pass one, or a group per dtype"
    if _replaced_step(optimizer):
        return f"the step method of this {name} was replaced"
    return None


def _epsilon_of_the_first(group: Mapping[str, Any]) -> bool:
    """Whether the step of one parameter depends on others of its group, as in torch's Adafactor."""
    eps = group.get("eps")
    by_dtype = isinstance(eps, tuple | list) and eps[0] is None
    return by_dtype and len({parameter.dtype for parameter in group["params"]}) > 1


def _global_hooks() -> bool:
    """Whether code other than this package's, which takes care of its own parameters, hears of every step before it."""
    hooks = _global_optimizer_pre_hooks.values()
    return any(not str(getattr(hook, "__module__", "")).startswith("ramtorch_core.") for hook in hooks)


def _replaced_step(optimizer: Optimizer) -> bool:
    """Whether the object has a step of its own, other than the wrapper with which LR schedulers count steps."""
    step = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", None)
    return step is not None and _unhooked(getattr(step, "__func__", step)) is not _unhooked(type(optimizer).step)


class Recipe:
    """How to step one optimizer's parameters: its options as they are now, for updates that happen later."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.granularity = granularity(optimizer)
        self.default_dtype = torch.get_default_dtype()  # of the thread that steps the optimizer, by its own context
        self.options: dict[nn.Parameter, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            options = {key: _snapshot(value) for key, value in group.items() if key != "params"}
            self.options.update(dict.fromkeys(group["params"], options))
        self.positions = {parameter: position for position, parameter in enumerate(self.options)}

    def adopt(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Let the optimizer have a state that was made in another thread, while another default dtype held perhaps."""
        known = self.optimizer.state.get(parameter)
        if known is not state:
            dtype = torch.float32 if self.options[parameter].get("fused") else self.default_dtype
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point() and parameter.dim() > 0:
                    state[key] = value.to(dtype)
            self.optimizer.state[parameter] = state

    def step(self, parameters: Sequence[Tensor], options: Mapping[str, Any], states: Sequence[dict[str, Any]]) -> None:
        """The optimizer's own step on stand-ins for its parameters, which hold their gradients in `.grad`."""
        kind = type(self.optimizer)
        stand_in = object.__new__(kind)
        stand_in.__dict__.update(self.optimizer.__dict__)
        stand_in.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer itself
        stand_in.param_groups = [{**options, "params": list(parameters)}]
        stand_in.state = defaultdict(dict, zip(parameters, states, strict=True))
        _unhooked(kind.step)(stand_in)


@dataclass(frozen=True, eq=False, slots=True)
class WeightUpdate:
    """One weight's part of a step.

    Attributes:
        grad: flat, in the memory order of the weight; where it is updated, on the host or on a device.
        recipe: of the optimizer that owns the weight.
        earlier: for updates on a device: a gradient on the host, likewise, to which `grad` is added.
    """

    weight: Weight
    grad: Tensor
    recipe: Recipe
    earlier: Tensor | None = None


def update(
    updates: Sequence[WeightUpdate],
    *,
    scale: float,
    kernel: AdamKernel | None,
    threads: int,
    undo: Undo | None = None,
) -> None:
    """Step these weights, and write their shadows.

    Args:
        scale: every gradient is multiplied with it, in the master's dtype.
        kernel: used where it applies; without it, the optimizers' own code.
        threads: for the kernel. Torch's operations use torch's.
        undo: of these updates; it gets what they overwrite.
    """
    fast: dict[WeightUpdate, AdamWeight] = {}
    with torch.no_grad():
        for each in updates:
            row = None if kernel is None else _for_kernel(each, scale)
            if row is not None:
                if undo is not None:
                    master, (exp_avg, exp_avg_sq) = undo.places(each, (row.exp_avg, row.exp_avg_sq))
                    row = replace(row, kept=(master, exp_avg, exp_avg_sq))
                fast[each] = row
                continue
            if undo is not None:
                undo.copy(each)
            _update(each, scale)
        if kernel is not None and fast:
            kernel(list(fast.values()), threads)
            if undo is not None:
                undo.kept(fast)
            for each, row in fast.items():
                write_number(each.recipe.optimizer.state[each.weight.parameter], "step", row.step)
    for each in updates:
        torch.autograd.graph.increment_version(each.weight.parameter)


def _state_maker(kind: type[Optimizer]) -> Any:
    """What makes the state of `kind`; the compiler wraps it, once for each class."""
    return inspect.unwrap(getattr(kind, "_init_group", Optimizer.step))


def is_decoupled(recipe: Recipe, weight: Weight) -> bool | None:
    """Whether weight decay is decoupled where torch's own Adam or AdamW updates a float32 weight; None elsewhere.

    None too where they do more than torch's fused kernel and the compiled one do alike (amsgrad, maximize).
    """
    kind, options, master = defining_class(type(recipe.optimizer)), recipe.options[weight.parameter], weight.parameter
    state = recipe.optimizer.state.get(master, {})
    suits = (
        kind in (torch.optim.Adam, torch.optim.AdamW)
        and _state_maker(type(recipe.optimizer)) is _state_maker(kind)
        and master.dtype == torch.float32
        and master.stride() == weight.stride
        and not options["amsgrad"]
        and not options["maximize"]
        and all(state[key].dtype == torch.float32 for key in ("exp_avg", "exp_avg_sq") if key in state)
    )
    if not suits:
        return None
    return kind is torch.optim.AdamW or bool(options.get("decoupled_weight_decay"))


def _for_kernel(each: WeightUpdate, scale: float) -> AdamWeight | None:
    weight, optimizer = each.weight, each.recipe.optimizer
    master, options = weight.parameter, each.recipe.options[weight.parameter]
    shadow = None if weight.own_shadow else weight.shadow
    if defining_class(type(optimizer)) is AdamW:
        stochastic = _prepare(each, scale)
        return stochastic if suits_kernel(stochastic) else None
    decoupled = is_decoupled(each.recipe, weight)
    if decoupled is None or not takes(each.grad.dtype, None if shadow is None else shadow.dtype):
        return None
    state = optimizer.state[master]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
    moments = state["exp_avg"], state["exp_avg_sq"]
    if any(moment.stride() != weight.stride for moment in moments):
        return None
    return AdamWeight(
        master,
        *moments,
        each.grad,
        shadow,
        step=int(read_number(state["step"])) + 1,
        **adam_rates(options),
        decoupled=decoupled,
        grad_scale=scale,
    )


def _prepare(each: WeightUpdate, scale: float) -> AdamWeight:
    weight, recipe = each.weight, each.recipe
    assert isinstance(recipe.optimizer, AdamW)
    parameter, shadow = weight.parameter, None if weight.own_shadow else weight.shadow
    position, options = recipe.positions[parameter], recipe.options[parameter]
    return recipe.optimizer.prepare(
        parameter, each.grad, position=position, options=options, grad_scale=scale, shadow=shadow
    )


def _update(each: WeightUpdate, scale: float) -> None:
    """The optimizer's own code, in blocks if its state allows that, at the first step (which makes the state) whole."""
    weight, recipe = each.weight, each.recipe
    if defining_class(type(recipe.optimizer)) is AdamW:
        update_in_torch(_prepare(each, scale))
        recipe.optimizer.state[weight.parameter]["step"] += 1
        return
    master = weight.parameter.detach()
    state = recipe.optimizer.state.get(weight.parameter, {})
    shadow = None if weight.own_shadow else weight.shadow
    views = _flat_state(state, weight) if recipe.granularity is Granularity.ELEMENT and state else None
    if views is None or master.stride() != weight.stride or master.numel() == 0:
        grad = torch.empty_strided(weight.size, weight.stride, dtype=master.dtype)
        as_vector(grad).copy_(each.grad)
        if scale != 1.0:
            grad.mul_(scale)
        master.grad = grad
        recipe.step([master], recipe.options[weight.parameter], [state])
        if state:
            recipe.adopt(weight.parameter, state)
        if shadow is not None:
            shadow.copy_(master)
        return
    flat, scratch = as_vector(master), torch.empty(min(BLOCK, master.numel()), dtype=master.dtype)
    flat_shadow = None if shadow is None else as_vector(shadow)
    last: dict[str, Any] = {}
    made: dict[str, Tensor] = {}  # state that this step adds
    for start in range(0, flat.numel(), BLOCK):
        piece = slice(start, min(start + BLOCK, flat.numel()))
        block, count = flat[piece], piece.stop - piece.start
        block.grad = scratch[:count].copy_(each.grad[piece])
        if scale != 1.0:
            block.grad.mul_(scale)
        cut = {key: view[piece] for key, view in views.items()}
        last = {key: cut[key] if key in cut else _snapshot(value) for key, value in state.items()}
        recipe.step([block], recipe.options[weight.parameter], [last])
        for key, value in last.items():
            if key not in state and isinstance(value, Tensor) and value.size() == block.size() != master.size():
                if key not in made:
                    made[key] = torch.empty_strided(weight.size, weight.stride, dtype=value.dtype)
                as_vector(made[key])[piece].copy_(value)
        for key, view in cut.items():
            if last[key] is not view:
                view.copy_(last[key])
        if flat_shadow is not None:
            flat_shadow[piece].copy_(block)
    for key, value in (last | made).items():
        if key not in views:
            known = state.get(key)
            if isinstance(known, Tensor):
                known.copy_(value)
            else:
                state[key] = value


def _flat_state(state: Mapping[str, Any], weight: Weight) -> dict[str, Tensor] | None:
    """The state's tensors as vectors in the weight's memory order; None if some cannot be cut into blocks."""
    views = {}
    for key, value in state.items():
        if value is None:
            return None  # the step will make it
        if not isinstance(value, Tensor) or (value.numel() == 1 and math.prod(weight.size) != 1):
            continue
        if value.size() != weight.size or value.stride() != weight.stride:
            return None
        views[key] = as_vector(value)
    return views


def _snapshot(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return type(value)([_snapshot(item) for item in value])
    return value.clone() if isinstance(value, Tensor) else value

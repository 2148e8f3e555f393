"""Watches how weights are used, to decide which may stream in half precision and which must stay on the device.

Under autocast a weight may cross the bus in autocast's dtype when its only use in a visit is one operation that casts
it: then the cast happens on the host instead, with the same bits. If autocast remembers its casts, as it does unless
told otherwise, there may be several such operations: they share one cast, and their gradients add up behind it. The
kind of module is the first guess; the first visits are watched and the guess is replaced by what was seen. A use that
contradicts the guess gets the exact weight at once, so the first step is exact too. Code that asks for a weight's dtype
may round something else to it, which is such a use too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ramtorch_core.memory.weights import Weight

CASTING_MODULES = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.MultiheadAttention,
)
"""Modules whose weights autocast casts, as a first guess."""

CASTING_FUNCTIONS = frozenset(
    {
        F.linear,
        F.multi_head_attention_forward,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
        torch.mm,
        torch.bmm,
        torch.matmul,
        torch.addmm,
        torch.addbmm,
        torch.baddbmm,
        Tensor.mm,
        Tensor.bmm,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.addmm,
        Tensor.baddbmm,
    }
)
"""Operations that autocast runs in lower precision on every device, casting each float32 argument on its own."""

_HARMLESS_METHODS = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.stride,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.get_device,
        Tensor.ndimension,
        Tensor.__len__,
        Tensor.__hash__,
        Tensor.__repr__,
    }
)
_HARMLESS_PROPERTIES = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        *("shape", "device", "ndim", "requires_grad", "is_leaf", "grad_fn", "layout", "names", "is_cuda"),
        *("is_cpu", "is_sparse", "is_quantized", "is_meta", "is_nested", "is_mkldnn", "_version"),
        *("output_nr", "retains_grad", "is_mps", "is_xla", "is_sparse_csr", "_base", "_backward_hooks"),
    )
    if hasattr(Tensor, name)
)


HARMLESS = _HARMLESS_METHODS | _HARMLESS_PROPERTIES
"""What may be asked of a tensor without looking at its values or their dtype."""

_TELL_DTYPE = frozenset(
    {Tensor.element_size, *(getattr(Tensor, name).__get__ for name in ("dtype", "itemsize", "nbytes"))}
)
"""What tells in which dtype a weight crosses: code that asks may round something to it."""

_ASK_IN_VAIN = ("torch.nn.modules.activation", "torch.nn.modules.transformer", "ramtorch_core.")
"""Code that asks for dtypes, but computes the same whatever the answer.

Attention compares dtypes to choose a kernel that it takes neither under CUDA's autocast nor with gradients; for the
rest see `may_be_fused`.
"""


class Use:
    """What one visit did with a weight.

    Attributes:
        count: how many operations took it, or asked for its dtype.
        cast: whether one cast serves them all.
        asked: the code that asked for its dtype, or None.
        exact: an exact copy whose address was given away.
    """

    __slots__ = ("asked", "cast", "count", "exact")

    def __init__(self) -> None:
        self.count, self.cast = 0, True
        self.asked: str | None = None
        self.exact: Tensor | None = None


class Observer(TorchFunctionMode):
    """Sees every operation of the user's code while it is entered.

    Args:
        device: the compute device.
        exact: gives a weight's exact, differentiable device copy in the master's dtype.

    Attributes:
        compute: the dtype in which weights cross in half precision.
        fixed: tells whether the user chose a weight's dtype, so that no use contradicts it.
        stray: masters that met a device tensor outside of any visit of their chunk.
    """

    def __init__(
        self, device: torch.device, exact: Callable[[Weight], Tensor], fixed: Callable[[Weight], bool]
    ) -> None:
        super().__init__()
        self.device, self.exact, self.fixed = device, exact, fixed
        self.compute: torch.dtype | None = None
        self.masters: dict[int, Weight] = {}
        self.stray: dict[Weight, str] = {}
        self._lent: dict[int, tuple[Tensor, Weight, Use]] = {}  # alive, so that no other tensor gets an id of theirs

    def lend(self, weights: Sequence[Weight], lent: Sequence[Tensor]) -> list[Use]:
        """Watch `lent` until `reclaim`; returns the uses, to be read when the visit is over."""
        uses = [Use() for _ in weights]
        self._lent.update((id(t), (t, w, use)) for w, t, use in zip(weights, lent, uses, strict=True))
        return uses

    def reclaim(self, lent: Sequence[Tensor]) -> None:
        """The visit is over."""
        for tensor in lent:
            self._lent.pop(id(tensor), None)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS:
            return func(*args, **kwargs)
        if func in _TELL_DTYPE:
            return func(self._whose_dtype(args[0]))
        if self._lent or self.device.type != "cpu":
            met = None if self.device.type == "cpu" else _device_of(self.device.type, (args, kwargs))
            args = tuple(self._replace(func, value, met) for value in args)
            kwargs = {key: self._replace(func, value, met) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _whose_dtype(self, tensor: Tensor) -> Tensor:
        """What stands for `tensor` where user code asks for its dtype."""
        if id(tensor) not in self._lent:
            return tensor
        _, weight, use = self._lent[id(tensor)]
        caller = _caller()
        if self.fixed(weight) or caller.startswith(_ASK_IN_VAIN):
            return tensor
        use.count, use.cast, use.asked = use.count + 1, False, caller
        return weight.parameter

    def _one_cast_serves(self, count: int) -> bool:
        kind = self.device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.compute
        return casts and (count == 1 or torch.is_autocast_cache_enabled())

    def _replace(self, func: Any, value: Any, met: torch.device | None) -> Any:
        """What `func` shall get for `value`, if its other tensors are on the device `met`."""
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            replaced = [self._replace(func, item, met) for item in value]
            return replaced if isinstance(value, list) else tuple(replaced)
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._lent:
            _, weight, use = self._lent[id(value)]
            use.count += 1
            use.cast &= func in CASTING_FUNCTIONS and self._one_cast_serves(use.count)
            if use.cast or weight.own_shadow or self.fixed(weight):
                return value
            exact = self.exact(weight)
            if func is Tensor.data_ptr:
                use.exact = exact
            return exact
        if met is not None and id(value) in self.masters:
            weight = self.masters[id(value)]
            self.stray.setdefault(weight, getattr(func, "__name__", str(func)))
            return value.to(met)
        return value


def _device_of(kind: str, value: Any) -> torch.device | None:
    """Where the first tensor in `value` on a device of that kind is; in a pipeline that need not be the chunk's own."""
    if isinstance(value, Tensor):
        return value.device if value.device.type == kind and value.dim() > 0 else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for item in items if (found := _device_of(kind, item)) is not None), None)


def _caller() -> str:
    """The module whose code called torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_of(frame).startswith(("torch._dynamo", __name__)):
        frame = frame.f_back
    return _module_of(frame)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def may_be_fused(module: nn.Module) -> bool:
    """Whether torch may run attention in `module` as one kernel, for want of gradients; it looks at the weights' dtype.

    With CUDA's autocast it never does, but it does not ask for that of the CPU.
    """
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
        return False
    fused = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
    return any(isinstance(part, fused) and not part.training for part in module.modules())


def guess_casts(weight: Weight) -> bool:
    """Whether autocast probably casts every use of this weight, judging by the modules that own it."""
    return len(weight.sites) == 1 and isinstance(weight.sites[0][0], CASTING_MODULES)


def is_compiled(module: nn.Module) -> bool:
    """Whether a part of `module` runs compiled, where single operations cannot be seen."""
    return any(map(runs_compiled, module.modules()))


def runs_compiled(module: nn.Module) -> bool:
    """Whether calls of `module` itself run compiled."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"

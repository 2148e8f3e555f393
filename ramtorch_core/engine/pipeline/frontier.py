"""Sees every torch call of user code and brings in what belongs to another stage."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import TorchFunctionMode
from typing_extensions import Self, override

from ramtorch_core.engine.pipeline.microbatch import Bystander, Microbatch
from ramtorch_core.engine.pipeline.trees import map_tensors

__all__ = ["Aside", "Frontier"]

_CAST_ONCE = frozenset({
    F.linear, torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d, torch.conv_transpose1d,
    torch.conv_transpose2d, torch.conv_transpose3d, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm,
    torch.bmm, torch.addmm, torch.baddbmm,
})  # fmt: skip
"""Calls whose floating-point arguments autocast would cast to its dtype, on the CPU and on CUDA devices alike."""

_SPLIT = frozenset({
    F.linear, torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d, torch.conv_transpose1d,
    torch.conv_transpose2d, torch.conv_transpose3d,
})  # fmt: skip
"""Calls (input, weight, bias, ...) whose weight gradients may be computed after the input's."""

_BETWEEN_DEVICES = frozenset({Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.copy_})
"""Calls that may meet tensors of several devices."""

_SEQUENCES = (tuple, list)
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

_VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes whose value has a graph."""


def _accessors() -> Iterator[Any]:
    for name in dir(Tensor):
        attribute: Any = inspect.getattr_static(Tensor, name)
        if hasattr(type(attribute), "__set__"):
            yield attribute.__set__
            if name not in _VIEW_ATTRIBUTES:
                yield attribute.__get__


_AS_IT_IS = frozenset({
    *_accessors(), Tensor.backward, torch.autograd.backward, torch.autograd.grad, Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad,
})  # fmt: skip
"""Calls to which the stages of their arguments do not matter. Attributes are most of all calls; a hook sees the whole
gradient only at the tensor itself."""


class Frontier(TorchFunctionMode):
    """Active while user code of one microbatch runs: arguments from other stages are cut, moved or borrowed.

    Tensors of different pipeline devices that meet in one call are brought to the device of the current stage (of the
    first argument, where that is modified in place). Calls on tensors of one device stay on it.
    """

    def __init__(self, microbatch: Microbatch | Bystander, several_devices: bool) -> None:
        super().__init__()
        self.microbatch = microbatch
        self.several_devices = several_devices
        self._split_backward = isinstance(microbatch, Microbatch) and microbatch.deferrals is not None

    @override
    def __enter__(self) -> Self:
        _push_on_torch_function_stack(self)
        return self

    @override
    def __exit__(self, *_: object) -> None:
        _pop_torch_function_stack()

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _AS_IT_IS:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if self._split_backward and func in _SPLIT and self._splits(args, kwargs):
            return self.microbatch.defer(func, args, kwargs)
        device = self.microbatch.device if self.several_devices and func not in _BETWEEN_DEVICES else None
        if self._has_foreign(args, device) or (kwargs and self._has_foreign(kwargs.values(), device)):
            args, kwargs = self._localize(getattr(func, "__name__", ""), args, kwargs, device is not None)
        if func in _CAST_ONCE and _is_any_autocast_enabled():
            args, kwargs = self._cast(args, kwargs)
        return func(*args, **kwargs)

    def _splits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call's weights are this stage's and their gradients deferred."""
        weights = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]
        return (
            bool(args)
            and any(map(self.microbatch.may_defer, weights))
            and all(self.microbatch.may_defer(weight) or not weight.requires_grad for weight in weights)
            and isinstance(args[0], Tensor)
            and not isinstance(args[0], torch.nn.Parameter)
        )

    def _has_foreign(self, values: Iterable[Any], device: torch.device | None) -> bool:
        """Whether one of `values`, or in a list or tuple among them, belongs to another stage or is not on `device`.

        This runs for every call: no generators, and `is_foreign` only for what the stage neither has nor computed.
        """
        microbatch = self.microbatch
        for value in values:
            if isinstance(value, Tensor):
                if device is not None and value.device != device:
                    return True
                if value.requires_grad:
                    node = value.grad_fn
                    unknown = id(value) not in microbatch.own if node is None else node._sequence_nr() < microbatch.low
                    if unknown and microbatch.is_foreign(value):
                        return True
            elif isinstance(value, _SEQUENCES) and self._has_foreign(value, device):
                return True
        return False

    def _localize(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], one_device: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        microbatch = self.microbatch
        device = microbatch.target(_tensors(args, kwargs)) if one_device else microbatch.device
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        keep: Tensor | None = args[0] if in_place and args and isinstance(args[0], Tensor) else None
        if keep is not None and keep.requires_grad and not keep.is_leaf and microbatch.is_foreign(keep):
            keep = None  # modified in the graph of this stage

        def is_foreign(tensor: Tensor) -> bool:
            return tensor is not keep and tensor.requires_grad and microbatch.is_foreign(tensor)

        mixed = False
        if one_device:
            owned = [t for t in _tensors(args, kwargs) if microbatch.owns(t.device)]
            mixed = len({microbatch.device if is_foreign(t) else t.device for t in owned}) > 1
            if keep is not None:
                device = keep.device

        def local(tensor: Tensor) -> Tensor:
            if tensor is keep:
                return tensor
            if is_foreign(tensor):
                tensor = microbatch.bring(tensor, True)
            if mixed and tensor.device != device and microbatch.owns(tensor.device):
                return microbatch.bring(tensor, False) if device == microbatch.device else tensor.to(device)
            return tensor

        return map_tensors(local, args), map_tensors(local, kwargs)

    def _cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the weights that autocast would cast."""
        microbatch = self.microbatch
        kind = microbatch.device.type
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return args, kwargs
        dtype = torch.get_autocast_dtype(kind)

        def cast(value: Any) -> Any:
            if type(value) is not torch.nn.Parameter or value.device.type != kind:
                return value
            if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
                return value
            return microbatch.cast(value, dtype)

        return tuple(cast(value) for value in args), {key: cast(value) for key, value in kwargs.items()}


class Aside:
    """A context for our own code in the middle of the user's: the frontier, if it is the innermost mode, sees none."""

    __slots__ = ("_frontier",)

    def __enter__(self) -> None:
        depth = torch._C._len_torch_function_stack()
        innermost = torch._C._get_function_stack_at(depth - 1) if depth else None
        self._frontier = _pop_torch_function_stack() if isinstance(innermost, Frontier) else None

    def __exit__(self, *_: object) -> None:
        if self._frontier is not None:
            _push_on_torch_function_stack(self._frontier)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments, and those in lists and tuples of theirs."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))
    for value in kwargs.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))

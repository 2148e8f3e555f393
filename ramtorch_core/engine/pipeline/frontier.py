"""Sees every torch call of user code and brings in what belongs to another stage."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from ramtorch_core.engine.pipeline.microbatch import Bystander, Microbatch

__all__ = ["Frontier"]

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

_NO_COMPUTATION = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""Calls to which the stages of their arguments do not matter."""

_VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes whose value has a graph."""


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
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if getattr(func.__self__, "__name__", "") not in _VIEW_ATTRIBUTES:  # type: ignore[attr-defined]
                return func(*args, **kwargs)
        elif name == "__set__" or func in _NO_COMPUTATION:
            return func(*args, **kwargs)
        if self._split_backward and func in _SPLIT and self._splits(args, kwargs):
            return self.microbatch.defer(func, args, kwargs)
        one_device = self.several_devices and func not in _BETWEEN_DEVICES
        if self._has_foreign(args, kwargs, one_device):
            args, kwargs = self._localize(name, args, kwargs, one_device)
        if func in _CAST_ONCE:
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

    def _has_foreign(self, args: tuple[Any, ...], kwargs: dict[str, Any], one_device: bool) -> bool:
        """Runs for every call: plain loops, no generators."""
        microbatch = self.microbatch
        device = microbatch.device if one_device else None
        for value in (*args, *kwargs.values()) if kwargs else args:
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor) and (
                    (tensor.requires_grad and microbatch.is_foreign(tensor))
                    or (device is not None and tensor.device != device)
                ):
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
        mixed = False
        if one_device:
            found = {t.device for t in _tensors(args, kwargs) if microbatch.owns(t.device)}
            mixed = len(found) > 1
            if keep is not None:
                device = keep.device

        def local(tensor: Tensor) -> Tensor:
            if tensor is keep:
                return tensor
            if tensor.requires_grad and microbatch.is_foreign(tensor):
                tensor = microbatch.bring(tensor)
            if mixed and tensor.device != device and microbatch.owns(tensor.device):
                return microbatch.bring(tensor) if device == microbatch.device else tensor.to(device)
            return tensor

        return tree_map_only(Tensor, local, args), tree_map_only(Tensor, local, kwargs)

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

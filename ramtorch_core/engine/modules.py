"""What the engine does to modules: replaces a forward, moves buffers, finds tensors in arguments."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.external_utils import wrap_inline
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from ramtorch_core.engine.census import Chunk
from ramtorch_core.engine.observe import runs_compiled

# torch calls hooks of the engine from inside of compiled chunks; they would be compiled too.
torch._dynamo.trace_rules.add("ramtorch_core")

Visit = Callable[[Callable[..., Any], "Chunk | None", Any, Any], Any]


class ChunkForward:
    """Stands in for a module's `forward`, as an attribute of the instance, until `remove`.

    A copy or a pickle of the module gets its class's plain forward and computes with its own weights. A compiler that
    is active does not see what the engine does, but compiles the user's forward, in a recompute too.
    """

    def __init__(self, module: nn.Module, visit: Visit, chunk: Chunk | None) -> None:
        self.module, self.visit, self.chunk = module, visit, chunk
        self._had = module.__dict__.get("forward")
        self._inner: Callable[..., Any] = module.forward
        function = isinstance(self._inner, types.FunctionType | types.MethodType)
        torchs = function and torch._dynamo.trace_rules.check(
            self._inner
        )  # compiled only inside of a frame that is not
        self._traced = wrap_inline(self._inner) if torchs else self._inner
        module.__dict__["forward"] = ForwardWrapper(
            module, torch._dynamo.disable(self._call, recursive=False), self._had
        )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)
        if compiler is None and not runs_compiled(self.module):
            return self.visit(self._inner, self.chunk, args, kwargs)
        forward = self._inner if compiler is None else self._traced
        try:
            return self.visit(_compiled_by(compiler, forward), self.chunk, args, kwargs)
        finally:
            set_eval_frame(compiler)

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._had is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._had


def _compiled_by(compiler: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, run under a compiler that is not active where it is called from, or None if it has its own.

    It sees no other function modes than here: under others it would be compiled anew, or not at all, and save other
    tensors in a recompute than in the forward.
    """
    modes = _get_current_function_mode_stack()

    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as hidden:
            while any(mode not in modes for mode in _get_current_function_mode_stack()):
                hidden.enter_context(_pop_mode_temporarily())
            before = set_eval_frame(compiler)
            try:
                return forward(*args, **kwargs)
            finally:
                set_eval_frame(before)

    return call


class ForwardWrapper:
    """The callable that sits in a module's `__dict__`."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], had: Callable[..., Any] | None) -> None:
        self._module, self._call, self._had = module, call, had

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, as a visit."""
        return self._call(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """So that `inspect.signature` sees the user's parameters."""
        return self._had or plain_forward(self._module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if self._had is not None:
            had: Callable[..., Any] = copy.deepcopy(self._had, memo)
            return had
        return plain_forward(memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_itself, (self._had,)) if self._had is not None else (plain_forward, (self._module,))


def _itself(value: Any) -> Any:
    return value


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of the module's class, bound to `module`."""
    return types.MethodType(type(module).forward, module)


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Move every buffer of `root` to `device`, and everything a torchmetrics metric holds."""
    for module in root.modules():
        if type(module).__module__.partition(".")[0] == "torchmetrics" or hasattr(module, "_defaults"):
            module.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings, dataclasses and registered containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    else:
        leaves = tree_leaves(value)
        if not (len(leaves) == 1 and leaves[0] is value):
            for leaf in leaves:
                yield from tensors_in(leaf)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, types.FunctionType, nn.Module)):
            for item in vars(value).values():
                if isinstance(item, Tensor):
                    yield item

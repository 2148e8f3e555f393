"""Arguments as they were before a forward that wrote into them: what a recompute must see.

A forward may append to a list that it was given, fill a cache of keys and values, or change a tensor in place. It works
on the caller's own objects, so that its writes show where they should. A recompute works on copies of what there was
before, so that nothing is written twice.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ramtorch_core.errors import RamtorchError

_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict)
_MAKES_PLAIN_OBJECTS = frozenset({object.__new__, *(kind.__new__ for kind in _CONTAINERS)})
_OWN_WAYS = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__copy__", "__del__")
"""What a class overrides whose objects cannot be copied attribute by attribute."""


class Copies(Enum):
    """Tensors among the arguments of which copies are made before a call."""

    NONE = "none"
    ACTIVATIONS = "those with a graph"
    ALL = "all"


class Arguments:
    """The arguments of one call, and copies of them for its recompute.

    Containers and plain objects are copied, however deep; modules and objects that make themselves in a way of their
    own are shared. Tensors are shared too, but for those that the call may write in place.

    The call's own objects are held until they are taken only: the graph of what a forward leaves in them leads to its
    recompute, a cycle that nobody could see.

    Args:
        what: the name of what is called, for errors.
        copies: the tensors to copy, in case the call writes them; a write to another one is refused.

    Attributes:
        tensors: what stands for the distinct tensors among the arguments, in lists, tuples and dicts too; whoever
            recomputes keeps them, and hands them to `again`.
        written: a tensor was written in place; known once the call is over.
    """

    def __init__(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, copies: Copies) -> None:
        self._what = what
        self._own: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        own = list({id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}.values())
        structure = _Structure({id(tensor): _Place(index) for index, tensor in enumerate(own)})
        self._kept = structure.copy((args, kwargs))
        self.tensors = [_copy(tensor) if _is_copied(tensor, copies) else tensor for tensor in own]
        self._copied = [found is not tensor for found, tensor in zip(self.tensors, own, strict=True)]
        self._own_tensors = [(tensor, _version(tensor)) for tensor in own]
        self._inside = [(tensor, _version(tensor)) for tensor in structure.tensors.values()]
        self.written = False

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's own arguments, once."""
        assert self._own is not None
        own, self._own = self._own, None
        return own

    def finish(self) -> None:
        """The call is over.

        Raises:
            RamtorchError: it wrote a tensor of which there is no copy, or one that shares its memory with another.
        """
        memory = [_memory(tensor) for tensor, _ in self._own_tensors]
        written = [_version(tensor) != version for tensor, version in self._own_tensors]
        lost = any(
            wrote and (not copied or memory.count(place) > 1)
            for wrote, copied, place in zip(written, self._copied, memory, strict=True)
        )
        self.written = any(written)
        self._own_tensors, self.tensors = [], []
        if lost or self._changed_inside():
            raise RamtorchError(
                f"{self._what} writes a tensor among its arguments in place: computed again in backward, it would "
                f"start from what it wrote. Use activations='keep', or let it write a clone"
            )

    def again(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they were, for one recompute.

        Args:
            tensors: what `tensors` was.

        Raises:
            RuntimeError: a tensor inside of an object was written since.
        """
        if self._changed_inside():
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor inside of an argument of {self._what}, which is computed again in backward"
            )
        pairs = zip(tensors, self._copied, strict=True)
        args, kwargs = _Structure({}, [_copy(t).clone() if copied else t for t, copied in pairs]).copy(self._kept)
        return args, kwargs

    def _changed_inside(self) -> bool:
        return any(_version(tensor) != version for tensor, version in self._inside)


def may_write(module: nn.Module) -> Copies:
    """Tensors that `module`, as far as can be told before its first call, writes in place."""
    in_place = any(getattr(part, "inplace", False) is True for part in module.modules())
    return Copies.ACTIVATIONS if in_place else Copies.NONE


def fills_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument looks like a cache of keys and values of the transformers library."""
    return any(hasattr(leaf, "get_seq_length") and hasattr(leaf, "update") for leaf in (*args, *kwargs.values()))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor was."""

    index: int


class _Structure:
    """Copies containers and plain objects, each once, and finds the tensors in them.

    Args:
        places: by `id` of a tensor, what is put there instead.
        tensors: what is put at such places.

    Attributes:
        tensors: others that were found, by `id`.
    """

    def __init__(self, places: dict[int, _Place], tensors: Sequence[Tensor] = ()) -> None:
        self._places, self._tensors = places, tensors
        self._seen: dict[int, tuple[Any, Any]] = {}  # the original is held, so that its id stays its own
        self.tensors: dict[int, Tensor] = {}

    def copy(self, value: Any) -> Any:
        """`value`, or its copy."""
        if isinstance(value, Tensor):
            if id(value) not in self._places:
                self.tensors[id(value)] = value
            return self._places.get(id(value), value)
        if isinstance(value, _Place):
            return self._tensors[value.index]
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if isinstance(value, tuple):
            items = [self.copy(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if not _is_plain(value):
            return value
        new = copy.copy(value)
        self._seen[id(value)] = value, new
        if isinstance(value, dict):
            for key, item in value.items():
                dict.__setitem__(new, key, self.copy(item))
        elif isinstance(value, list):
            list.__setitem__(new, slice(None), [self.copy(item) for item in value])
        elif isinstance(value, deque):
            for index, item in enumerate(value):
                deque.__setitem__(new, index, self.copy(item))
        for name, item in _attributes(value):
            object.__setattr__(new, name, self.copy(item))
        return new


def _is_plain(value: Any) -> bool:
    """Whether `value` is a container, or an object that consists of its attributes."""
    kind = type(value)
    if kind in _CONTAINERS:
        return True
    if isinstance(value, (nn.Module, type)) or kind.__new__ not in _MAKES_PLAIN_OBJECTS:
        return False
    if any(getattr(kind, name, None) is not getattr(object, name, None) for name in _OWN_WAYS):
        return False
    return isinstance(value, _CONTAINERS) or any(True for _ in _attributes(value))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values, of slots too."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _is_copied(tensor: Tensor, copies: Copies) -> bool:
    if tensor.is_inference() or copies is Copies.NONE:
        return False
    return copies is Copies.ALL or tensor.grad_fn is not None


def _copy(tensor: Tensor) -> Tensor:
    """A leaf like `tensor`."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return tensor.clone().requires_grad_(tensor.requires_grad)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _memory(tensor: Tensor) -> int:
    """The same number for tensors that share their memory."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)

"""Weights saved for backward, kept as references.

Inside a visit autograd would save views of a slot, which is overwritten long before backward. So a weight is packed as
(weight, dtype, size, stride, offset, version) and unpacked from wherever its group is then; everything else is left to
the hooks that were active before ours (the user's, or a checkpoint's), or kept as it is. Hooks switch torch's check for
in-place changes off; every pack carries the version and `unpack` raises the error itself.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.memory.window import Slot


@dataclass(frozen=True, slots=True)
class WeightReference:
    """A view of a weight, by its place in the group."""

    group: WeightGroup
    weight: Weight
    lent_dtype: torch.dtype
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    byte_offset: int
    version: int
    copied: bool


@dataclass(frozen=True, slots=True)
class _Kept:
    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class _Outer:
    packed: Any
    unpack: Callable[[Any], Tensor]


def hooks_around() -> bool:
    """Whether what is saved now goes through hooks: of a checkpoint, of a visit, or of the user."""
    return _active_hooks() is not None


def _active_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def end_checkpoints(error: BaseException) -> None:
    """Remove the hooks of the checkpoints that `error` passed through, before the thread saves anything else.

    torch before 2.13 leaves that to the collection of the error's traceback, whenever and in whichever thread it comes.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is inspect.unwrap(checkpoint).__code__:
            frame.clear()


class SavedTensors:
    """The saved-tensor hooks of one engine.

    Args:
        locate: the group and weight whose slot memory this tensor is a view of, or None.
        weight_in: the slot that holds a group, loaded if need be, for a tensor that backward needs now; None if the
            group is no more, or there is no backward.
        device: where weights are needed.

    Attributes:
        note: is told of every tensor that is saved and is no weight in a slot.
    """

    def __init__(
        self,
        locate: Callable[[Tensor], tuple[WeightGroup, Weight] | None],
        weight_in: Callable[[WeightGroup], Slot | None],
        device: torch.device,
    ) -> None:
        self._locate, self._weight_in, self._device = locate, weight_in, device
        self.note: Callable[[Tensor], None] | None = None

    @contextlib.contextmanager
    def hooks(self, *, copied: bool) -> Iterator[None]:
        """Pack what is saved inside the context.

        Args:
            copied: unpack copies of weights instead of a slot's memory. Needed where the node that reads a weight may
                visit other chunks before it computes: another tensor that it saved may be of another chunk, or may be
                recomputed by a checkpoint around several chunks.
        """
        outer: Any = _active_hooks()

        def pack(tensor: Tensor) -> object:
            found = self._locate(tensor)
            if found is not None:
                return self._reference(tensor, *found, copied)
            if self.note is not None:
                self.note(tensor)
            if outer is not None:
                return _Outer(outer[0](tensor), outer[1])
            # Detached, because what is saved may be the output of the very node that saves it: kept as it is, it would
            # keep its graph alive for ever, and nobody could see the cycle. It shares the version counter.
            return _Kept(tensor.detach(), tensor._version)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def _reference(self, tensor: Tensor, group: WeightGroup, weight: Weight, copied: bool) -> object:
        if tensor.is_conj() or tensor.is_neg():
            copy = tensor.clone()
            return _Kept(copy, copy._version)
        return WeightReference(
            group,
            weight,
            weight.dtype,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()) * tensor.dtype.itemsize - weight.offset,
            weight.parameter._version,
            copied,
        )

    def _unpack(self, saved: object) -> Tensor:
        if isinstance(saved, _Outer):
            return saved.unpack(saved.packed)
        if isinstance(saved, _Kept):
            if saved.tensor._version != saved.version:
                raise RuntimeError(_modified(f"a {saved.tensor.type()} of size {tuple(saved.tensor.size())}", saved))
            return saved.tensor
        assert isinstance(saved, WeightReference)
        if saved.weight.parameter._version != saved.version:
            raise RuntimeError(_modified(f"parameter '{saved.weight.name}'", saved))
        view = self._view(saved)
        # With create_graph=True the view is saved again, without these hooks: it must not be a slot's memory.
        return view.clone() if saved.copied or torch.is_grad_enabled() else view

    def _view(self, saved: WeightReference) -> Tensor:
        weight = saved.weight
        with torch.no_grad():
            slot = self._weight_in(saved.group)
            if slot is not None and weight.dtype == saved.lent_dtype:
                flat = slot.buffer.view(saved.dtype)
                offset = (weight.offset + saved.byte_offset) // saved.dtype.itemsize
            else:  # the weights were laid out anew since the forward, or there is no visit
                flat = torch.empty_strided(weight.size, weight.stride, dtype=saved.lent_dtype, device=self._device)
                flat = flat.copy_(weight.parameter).as_strided((flat.numel(),), (1,)).view(saved.dtype)
                offset = saved.byte_offset // saved.dtype.itemsize
            return torch.as_strided(flat, saved.size, saved.stride, offset)


def _modified(what: str, saved: _Kept | WeightReference) -> str:
    now = (saved.tensor if isinstance(saved, _Kept) else saved.weight.parameter)._version
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {now}; expected version {saved.version} instead."
    )

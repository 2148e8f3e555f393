"""Updates that run ahead of the factor by which gradients are scaled, and can be undone.

Clipping by norm knows its factor when backward is over. Most often it is 1, so groups are updated as if it were, while
backward goes on, as far as there is room to keep what their update overwrites. Where the factor is another one, or the
step fails, that is put back, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ramtorch_core.memory.host import aligned, available_bytes
from ramtorch_core.memory.weights import WeightGroup, dense_stride

if TYPE_CHECKING:
    from ramtorch_core.optim.steps import WeightUpdate


BYTES = 3
"""Of host memory, per parameter that is updated on the host: with AdamW in float32 a quarter of them runs ahead."""


def room_for(groups: Iterable[WeightGroup], nbytes: int | None) -> Room:
    """Room for the copies that updates of these groups need, or some of them.

    Args:
        nbytes: None for `BYTES` per parameter, but no more than a quarter of what the system reports as available.
    """
    if nbytes is None:
        parameters = (weight.parameter for group in groups for weight in group.weights)
        nbytes = BYTES * sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        if (available := available_bytes()) is not None:
            nbytes = min(nbytes, available // 4)
    return Room(nbytes)


class Room:
    """Memory for copies, allocated when it is first needed and used again in every step.

    Args:
        nbytes: how much there may be at a time.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._used = 0
        self._block: Tensor | None = None

    def clear(self) -> None:
        """Nobody needs the copies any more."""
        self._used = 0

    def fits(self, updates: Sequence[WeightUpdate]) -> bool:
        """Whether there is room for all that these updates overwrite."""
        tensors = (tensor for each in updates for tensor in _overwritten(each))
        return sum(aligned(tensor.nbytes) for tensor in tensors) <= self.nbytes - self._used

    def place(self, tensor: Tensor) -> Tensor:
        """Room for a copy of the tensor, in its memory order; what it holds is anything."""
        if self._block is None:
            self._block = torch.empty(self.nbytes, dtype=torch.uint8)
        flat = self._block[self._used : self._used + tensor.nbytes].view(tensor.dtype)
        self._used += aligned(tensor.nbytes)
        return torch.as_strided(flat, tensor.size(), dense_stride(tensor), flat.storage_offset())

    def host_bytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return 0 if self._block is None else self.nbytes


class Ahead:
    """Whether held updates run ahead, and where they copy to: where the step before was not scaled, or all in vain."""

    def __init__(self) -> None:
        self._room: Room | None = None
        self._was_scaled = True  # as far as is known

    @property
    def nbytes(self) -> int:
        """Room for copies, in bytes of host memory, that the next step finds; 0 where all its updates wait."""
        return 0 if self._room is None or self._was_scaled else self._room.nbytes

    def room(self, groups: Iterable[WeightGroup], nbytes: int | None) -> Room | None:
        """For the step that begins; None lets all its updates wait. Arguments as for `room_for`."""
        if self._was_scaled:
            return None
        self._room = self._room or room_for(groups, nbytes)
        return self._room

    def released(self, scale: float) -> None:
        """The step's gradients are scaled by so much."""
        self._was_scaled = scale != 1.0

    def forget(self) -> None:
        """The groups will be others: give the memory back."""
        self._room = None

    def host_bytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return 0 if self._room is None else self._room.host_bytes()


class Undo:
    """What updates of a group overwrite: masters and optimizer state.

    The compiled kernel copies what it overwrites while it reads it; before other code does, `copy` is called. Only what
    was `kept` is put back.

    Args:
        room: where `fits` said that there is room for all.
    """

    def __init__(self, updates: Sequence[WeightUpdate], room: Room) -> None:
        self._kept: set[WeightUpdate] = set()
        self._masters: dict[WeightUpdate, Tensor] = {}
        self._states: dict[WeightUpdate, dict[str, tuple[Any, Any]] | None] = {}
        with torch.no_grad():
            for each in updates:
                self._masters[each] = room.place(each.weight.parameter.detach())
                if (state := _state(each)) is None:
                    self._states[each] = None
                    continue
                self._states[each] = {
                    key: (value, room.place(value) if _is_large(value) else _kept(value))
                    for key, value in state.items()
                }

    def places(self, each: WeightUpdate, moments: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        """Where the kernel copies the master and these tensors of the state to; None for those made since.

        Copies what else there is of the state.
        """
        places: dict[int, Tensor] = {}
        for value, place in (self._states[each] or {}).values():
            if any(value is moment for moment in moments) and _is_large(value):
                places[id(value)] = place
            elif _is_large(value):
                place.copy_(value)
        return self._masters[each], [places.get(id(moment)) for moment in moments]

    def copy(self, each: WeightUpdate) -> None:
        """Copy what is overwritten."""
        master, _ = self.places(each, ())
        master.copy_(each.weight.parameter.detach())
        self.kept([each])

    def kept(self, updates: Iterable[WeightUpdate]) -> None:
        """All that they overwrite has been copied."""
        self._kept.update(updates)

    def restore(self) -> None:
        """Put everything back that was kept, and the shadows of the masters with it."""
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
            for each, state in self._states.items():
                weight, rows, kept = each.weight, each.recipe.optimizer.state, each in self._kept
                if kept:
                    weight.parameter.copy_(self._masters[each])
                    if not weight.own_shadow:
                        weight.shadow.copy_(weight.parameter)
                if state is None:
                    rows.pop(weight.parameter, None)
                elif kept:
                    row = rows[weight.parameter]
                    row.clear()
                    for key, (value, before) in state.items():
                        row[key] = value.copy_(before) if isinstance(value, Tensor) else before


def _state(each: WeightUpdate) -> dict[str, Any] | None:
    return each.recipe.optimizer.state.get(each.weight.parameter)


def _overwritten(each: WeightUpdate) -> Iterator[Tensor]:
    yield each.weight.parameter
    yield from filter(_is_large, (_state(each) or {}).values())


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _kept(value: Any) -> Any:
    """What is small: numbers, and whatever else an optimizer keeps."""
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)

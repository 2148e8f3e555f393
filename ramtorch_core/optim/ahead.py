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

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor, in its memory order."""
        if self._block is None:
            self._block = torch.empty(self.nbytes, dtype=torch.uint8)
        flat = self._block[self._used : self._used + tensor.nbytes].view(tensor.dtype)
        self._used += aligned(tensor.nbytes)
        return torch.as_strided(flat, tensor.size(), dense_stride(tensor), flat.storage_offset()).copy_(tensor)

    def host_bytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return 0 if self._block is None else self.nbytes


class Undo:
    """Masters and optimizer state of a group as they are now.

    Args:
        room: where `fits` said that there is room for them.
    """

    def __init__(self, updates: Sequence[WeightUpdate], room: Room) -> None:
        self._updates = updates
        self._masters: list[Tensor] = []
        self._states: list[dict[str, tuple[Any, Any]] | None] = []
        with torch.no_grad():
            for each in updates:
                self._masters.append(room.copy(each.weight.parameter.detach()))
                state = _state(each)
                self._states.append(
                    None
                    if state is None
                    else {
                        key: (value, room.copy(value) if _is_large(value) else _kept(value))
                        for key, value in state.items()
                    }
                )

    def restore(self) -> None:
        """Put everything back, and the shadows of the masters with it."""
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
            for each, master, state in zip(self._updates, self._masters, self._states, strict=True):
                weight, rows = each.weight, each.recipe.optimizer.state
                weight.parameter.copy_(master)
                if not weight.own_shadow:
                    weight.shadow.copy_(weight.parameter)
                if state is None:
                    rows.pop(weight.parameter, None)
                    continue
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

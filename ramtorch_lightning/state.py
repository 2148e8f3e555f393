"""State as checkpoints hold it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints hold host tensors: a device's name in a file would bind it to machines that have the device."""
    moved: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.cpu(), state)
    return moved


def in_order(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by number of the parameter, whichever was updated first."""
    entries = state.get("state")
    if isinstance(entries, dict) and all(isinstance(number, int) for number in entries):
        return {**state, "state": dict(sorted(entries.items()))}
    return state

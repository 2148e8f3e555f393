"""Writes of a forward into its own weights, which would be lost with the slot that holds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ramtorch_core.engine.census import Chunk
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.window import Slot


class Writes:
    """Looks for them when a forward visit ends.

    In-place operations move the version counter, and `weight.data = ...` the address. Writes through `.data`
    (`weight.data.clamp_(min=0)`) show in the values alone: a sample of them is compared after a chunk's first forward
    with gradients, which waits for the device. Those that begin later are not seen.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._compared: set[int] = set()  # indices of chunks

    def seen(self, chunk: Chunk, slot: Slot, version: int, lent: Sequence[Tensor]) -> bool:
        """Whether the visit wrote weights.

        Args:
            version: of the slot's buffer, when the visit began.
            lent: what the modules computed with.
        """
        group = chunk.group
        if slot.buffer._version != version:
            return True
        if group is None or self._device.fake:
            return False
        for weight, tensor, view in zip(group.weights, lent, slot.views(group), strict=True):
            recurrent = isinstance(weight.sites[0][0], nn.RNNBase)  # cuDNN moves their weights
            if tensor.data_ptr() != view.data_ptr() and not recurrent:
                return True
        if chunk.index in self._compared or not torch.is_grad_enabled():
            return False
        self._compared.add(chunk.index)
        return not all(weight.holds(slot.buffer) for weight in group.weights)

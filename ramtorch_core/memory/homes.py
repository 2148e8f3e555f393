"""Homes: page-locked host memory for what streams to a device and back, masters and their optimizer's state."""

from __future__ import annotations

from torch import Tensor

from ramtorch_core.memory.device import Device
from ramtorch_core.memory.host import Arena


class Homes:
    """One arena for each tensor that was brought home, used again when nobody holds a tensor in it.

    Tensors here have storages of their own, so they can be saved, copied and kept as any others.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arenas: dict[Tensor, dict[str, Arena]] = {}

    def bring(self, parameter: Tensor, name: str, tensor: Tensor | None, stride: tuple[int, ...]) -> Tensor:
        """`tensor` itself if it is page-locked, with these strides; otherwise a copy of it that is.

        Args:
            parameter: whose tensor it is; it gives size and dtype.
            name: among the parameter's tensors.
            tensor: None makes zeros.
            stride: of a dense tensor.

        Raises:
            HostMemoryError: the system refuses the memory.
        """
        arenas = self._arenas.setdefault(parameter, {})
        arena = arenas.get(name)
        if tensor is not None and tensor.stride() == stride:
            if tensor.is_pinned() or (arena is not None and tensor.data_ptr() == arena.flat.data_ptr()):
                return tensor
        if arena is None or arena.nbytes != parameter.nbytes or arena.tensors_alive():
            arena = arenas[name] = Arena(parameter.nbytes, self._device)
        home = arena.tensor(0, parameter.dtype, parameter.size(), stride)
        return home.zero_() if tensor is None else home.copy_(tensor)

    def release(self) -> None:
        """Give back the page locks. What is in use stays valid."""
        for arenas in self._arenas.values():
            for arena in arenas.values():
                arena.unlock()
        self._arenas.clear()

"""Copies between the devices of a pipeline, on streams of their own, handed over by events."""

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ramtorch_core.memory.device import COMPLETE, Device, Event, Stream
from ramtorch_core.memory.ranges import FOR_STAGE

__all__ = ["Direction", "Links", "Parcel"]

Direction: TypeAlias = Literal["forward", "backward"]


class Parcel(NamedTuple):
    """A copy under way, and the event after which it may be read."""

    tensor: Tensor
    arrived: Event


class Links:
    """All edges between the devices; forward and backward traffic never wait for each other.

    A copy runs on one stream of the sender and one of the receiver. The allocator is told which other stream uses a
    tensor (`record_stream`); what the host is ahead can hold on to is one step's boundary tensors, which are small.
    """

    def __init__(self, devices: list[Device]) -> None:
        self._devices = {device.torch: device for device in devices}
        self._streams: dict[tuple[Device, Device, Direction], tuple[Stream | None, Stream | None]] = {}

    def owns(self, device: torch.device) -> bool:
        """Whether `device` belongs to the pipeline."""
        return device in self._devices

    def mark(self, device: torch.device) -> Event:
        """An event after all work issued so far by the calling thread's current stream of `device`."""
        return self._devices[device].record()

    def send(self, tensor: Tensor, target: Device, ready: Event, direction: Direction) -> Parcel:
        """Start copying `tensor` to `target`; `ready` is the event after which it may be read. Returns at once."""
        if tensor.device == target.torch:
            return Parcel(tensor, ready)
        source = self._devices[tensor.device]
        key = (source, target, direction)
        if key not in self._streams:
            self._streams[key] = (source.stream(), target.stream())
        leaving, entering = self._streams[key]
        source.wait(ready, leaving)
        with source.on(leaving), target.on(entering):
            copy = self._copy(tensor, source, target)
            arrived = target.record(entering)
        self._hold(tensor, leaving)
        return Parcel(copy, arrived)

    def receive(self, parcel: Parcel) -> Tensor:
        """The tensor of `parcel`; the current stream of its device waits for it, the calling thread does not."""
        if parcel.arrived is COMPLETE:
            return parcel.tensor
        device = self._devices[parcel.tensor.device]
        with device.ranges.waiting(FOR_STAGE):
            device.wait(parcel.arrived)
        self._hold(parcel.tensor, device.current_stream())
        return parcel.tensor

    @staticmethod
    def _copy(tensor: Tensor, source: Device, target: Device) -> Tensor:
        return tensor.detach().to(target.torch, non_blocking=source.asynchronous and target.asynchronous)

    @staticmethod
    def _hold(tensor: Tensor, stream: Stream | None) -> None:
        """Its memory is not to be used again before `stream` has come to here."""
        if stream is not None:
            tensor.record_stream(stream)

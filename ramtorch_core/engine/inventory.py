"""What streams and what stays, and the memory that is laid out for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ramtorch_core.engine.census import Census, Chunk, ChunkRow, chunk_rows, take_census
from ramtorch_core.engine.dtypes import StreamDtypes
from ramtorch_core.engine.follow import Follower, Masters
from ramtorch_core.engine.lend import Collector, Loan, Placement
from ramtorch_core.engine.rest import Rest
from ramtorch_core.errors import HostMemoryError
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.host import available_bytes
from ramtorch_core.memory.staging import STAGING_BUFFERS
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.memory.window import Slot, Window


class Inventory:
    """The groups of one module tree on one device.

    Args:
        root: the module tree.
        named: names and modules of the chunks.
        device: where slots and copies are.
        dtypes: in which dtype each weight crosses.
        resident: indices of chunks whose parameters are on the device.
        resident_below: bytes; smaller tensors keep a copy on the device.
        slots: how many slots the window has at the most.
        poison: fill slots with NaN before each copy.
        collector: takes the gradients that backward leaves on the device.
        masters: knows whether groups have been written, or are being updated.

    Attributes:
        stray: parameters that were seen in use outside of their chunk's forward.
        built: arenas and slots exist.
        loans: of each group, the loans whose graphs live.
        slots, resident: as given; changed before `divide`, they hold from then on.
    """

    window: Window
    follower: Follower

    def __init__(
        self,
        root: nn.Module,
        named: Sequence[tuple[str, nn.Module]],
        device: Device,
        dtypes: StreamDtypes,
        *,
        resident: frozenset[int],
        resident_below: int,
        slots: int,
        poison: bool,
        collector: Collector,
        masters: Masters,
    ) -> None:
        self.root, self.device, self.dtypes = root, device, dtypes
        self._named, self.resident, self._resident_below = list(named), resident, resident_below
        self.slots, self._poison = slots, poison
        self._collector, self._masters = collector, masters
        self.stray: set[nn.Parameter] = set()
        self.divide()

    def divide(self) -> None:
        """Take the census; nothing is built yet."""
        self.census: Census = take_census(
            self.root,
            self._named,
            resident=self.resident,
            resident_below=self._resident_below,
            also_copies=frozenset(self.stray),
        )
        self.streamed = [chunk for chunk in self.census.chunks if chunk.group is not None]
        self.groups = [chunk.group for chunk in self.streamed if chunk.group is not None]
        self.chunk_of: dict[WeightGroup, Chunk] = dict(zip(self.groups, self.streamed, strict=True))
        self.placements = {group: Placement(group.weights) for group in self.groups}
        self.loans: dict[WeightGroup, weakref.WeakSet[Loan]] = {group: weakref.WeakSet() for group in self.groups}
        self.rest = Rest(self.census.copies, self.device, self._collector)
        self.everything = (*self.groups, self.rest.group)
        self.weights = {weight.parameter: weight for group in self.everything for weight in group.weights}
        self._storages: dict[int, Slot] = {}
        self.built = False

    def build(self) -> list[WeightGroup]:
        """Lay out, in the dtypes wanted now, what is not laid out so yet; returns the groups that were.

        Raises:
            HostMemoryError: the system refuses the memory.
        """
        rebuilt = []
        for group in self.groups:
            wanted = [self.dtypes.wanted(weight) for weight in group.weights]
            if group.arena is None or wanted != [weight.dtype for weight in group.weights]:
                group.build(wanted, self.device)
                rebuilt.append(group)
        if self.rest.group.arena is None:
            self.rest.build()
        largest = max((group.nbytes for group in self.groups), default=0)
        if not self.built or self.window.nbytes < largest:
            if self.built:
                self.device.synchronize()
            self.window = Window(self.device, min(self.slots, len(self.groups)), largest, poison=self._poison)
            self.follower = Follower(self.window, self.groups, self._masters)
            self._storages = {slot.buffer.untyped_storage()._cdata: slot for slot in self.window.slots}
        self.window.forget()
        self.built = True
        return rebuilt

    def check_host_memory(self, limit: int | None, *, training: bool, overlapped: bool, held: bool = False) -> None:
        """Refuse before it is allocated what the host cannot hold.

        Args:
            limit: bytes that may be used; by default what the system reports as available.
            training: count gradients.
            overlapped: count those on their way to the updates only.
            held: which are all of them, in the dtypes in which weights cross.

        Raises:
            HostMemoryError: shadows and gradients need more than `limit`.
        """
        available = available_bytes() if limit is None else limit
        if available is None or self.device.fake:
            return
        shadows, gradients = 0, [0]
        for group in self.groups:
            shadows += sum(2 * w.parameter.numel() for w in group.weights if self.dtypes.may_be_half(w))
            trained = [w for w in group.weights if training and w.parameter.requires_grad]
            gradients.append(sum(w.nbytes if held else w.parameter.nbytes for w in trained))
        needed = sum(gradients)
        if overlapped and not held:
            needed = min(needed, STAGING_BUFFERS * max(gradients))
        if limit is not None or not self.built:
            needed += shadows
        if limit is None and needed > available:
            gc.collect()  # an earlier Trainer, in cycles of references, may still hold its optimizer's state
            available = available_bytes() or available
        if needed > available:
            raise HostMemoryError(
                f"streaming needs {needed / 1e9:.1f} GB of host memory besides the model's own weights, "
                f"{available / 1e9:.1f} GB are available: keep more chunks on the device (pin=), freeze weights, or, "
                f"if the system reports less than it has, state host_memory= in bytes"
            )

    def locate(self, tensor: Tensor) -> tuple[WeightGroup, Weight] | None:
        """The group and weight of which `tensor` is a view in a slot, or None."""
        slot = self._storages.get(tensor.untyped_storage()._cdata)
        if slot is None or slot.group is None:
            return None
        start = tensor.storage_offset() * tensor.dtype.itemsize
        for weight in slot.group.weights:
            if weight.offset <= start < weight.offset + max(weight.nbytes, 1):
                return slot.group, weight
        return None

    def in_slot(self, tensor: Tensor) -> bool:
        """Whether the memory of `tensor` is a slot's."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages

    def moved(self) -> bool:
        """Whether the tree no longer holds the parameters that the census found."""
        return any(weight.moved() for weight in self.weights.values())

    def let_host_write(self) -> None:
        """Wait until no copy reads a master: from here on user code may write it."""
        for group in self.everything:
            if any(weight.own_shadow for weight in group.weights):
                group.copied.synchronize()

    def rows(self) -> list[ChunkRow]:
        """The chunk table."""
        return chunk_rows(self.census)

    def device_weight_bytes(self) -> int:
        """Bytes of weights on the device: slots, resident chunks, and the copies that stay."""
        slots = self.window.nbytes * len(self.window.slots) if self.built else 0
        resident = sum(p.nbytes for chunk in self.census.chunks if chunk.resident for p in chunk.parameters)
        return slots + resident + self.rest.nbytes

    def never_visited(self) -> list[str]:
        """Names of streamed chunks whose forward has not been called."""
        visited = self.follower.visited if self.built else set()
        return [chunk.name for chunk in self.streamed if chunk.group is not None and chunk.group.index not in visited]

    def place_residents(self, device: torch.device) -> None:
        """Move the parameters of pinned chunks, and their gradients, to `device`."""
        for parameter in (p for chunk in self.census.chunks if chunk.resident for p in chunk.parameters):
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)

    def release(self) -> None:
        """Give back arenas, slots and copies; masters keep their values."""
        self.device.synchronize()
        if self.built:
            self.window.slots.clear()
            self._storages.clear()
        self.rest.release()
        for group in self.groups:
            group.release()
        self.built = False

"""Masters and shadows: the host home of the weights that move together.

In memory, per weight: the master (the user's own `Parameter`, on the host) and, in the group's arena, what crosses to
the device. When both have one dtype the master lives in the arena and is its own shadow; otherwise the shadow is the
master cast to `dtype`, and `refresh` casts it again after the master was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import COMPLETE, Device, Event
from ramtorch_core.memory.host import Arena, aligned

SAMPLES = 64
WIDE_SAMPLE = 4096  # where a look costs a copy from the device, whatever its size


@dataclass(eq=False, slots=True)
class Weight:
    """One master and its place in a group.

    Attributes:
        name: qualified name in the module tree, as in `named_parameters()`.
        parameter: the master; its identity never changes.
        sites: every (module, attribute) under which the tree holds it; several when it is tied.
        dtype: dtype in which it crosses to the device.
        offset: bytes from the start of the group, on the host and in a slot.
    """

    name: str
    parameter: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    dtype: torch.dtype = torch.float32
    offset: int = 0
    size: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    shadow: Tensor = field(init=False)
    home: Tensor = field(init=False)  # keeps the master's storage alive, so that another one never has its address
    version: int = field(init=False, default=-1)
    sample: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.parameter.size()
        self.stride = dense_stride(self.parameter)

    @property
    def nbytes(self) -> int:
        """Bytes that cross to the device per copy."""
        return self.parameter.numel() * self.dtype.itemsize

    @property
    def own_shadow(self) -> bool:
        """Whether the master itself lives in the arena."""
        return self.dtype == self.parameter.dtype

    def written(self, *, look: bool = False) -> bool:
        """Whether the master was written in place, or pointed at other memory, since it was last noted.

        Writes through `.data` leave `_version` as it is. With `look`, a sample of the values is compared too, which
        sees those that touch most elements (a moving average), though not those that touch few (clamping).
        """
        if self.version != self.parameter._version or _storage(self.parameter) != _storage(self.home):
            return True
        return look and not torch.equal(self._take_sample(), self.sample)

    def moved(self) -> bool:
        """Whether a module no longer has the master under the name under which it was found."""
        return any(module._parameters.get(name) is not self.parameter for module, name in self.sites)

    def touch(self) -> None:
        """The master was written, whether or not that can be seen."""
        self.version = -1

    def note(self, *, sample: bool) -> None:
        """Remember the master as it is now, and with `sample` some of its values."""
        self.version, self.home = self.parameter._version, self.parameter.data
        if sample:
            self.sample = self._take_sample()

    def holds(self, buffer: Tensor) -> bool:
        """Whether `buffer`, a device copy of the group, has this weight's bits where a sample looks; waits for it."""
        count = self.parameter.numel()
        inside = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        step = max(1, count // WIDE_SAMPLE)
        there, here = inside[::step].cpu(), torch.as_strided(self.shadow, (count,), (1,))[::step]
        return torch.equal(there.contiguous().view(torch.uint8), here.contiguous().view(torch.uint8))

    def _take_sample(self) -> Tensor:
        count = self.parameter.numel()
        flat = torch.as_strided(self.parameter.detach(), (count,), (1,)) if self._dense() else self.parameter.detach()
        return flat.reshape(-1)[:: max(1, count // SAMPLES)].clone()

    def _dense(self) -> bool:
        return self.parameter.stride() == self.stride

    def flatten(self, tensor: Tensor) -> Tensor:
        """A tensor of this weight's size as a vector in the memory order of the master; copied if its own differs."""
        if tensor.stride() != self.stride:
            dense = torch.empty_strided(self.size, self.stride, dtype=tensor.dtype, device=tensor.device)
            tensor = dense.copy_(tensor)
        return as_vector(tensor)

    def view(self, buffer: Tensor) -> Tensor:
        """This weight inside `buffer` (bytes, uint8) that holds a copy of its group."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        return torch.as_strided(flat, self.size, self.stride, flat.storage_offset())


class WeightGroup:
    """The weights of one chunk, or the small tensors of the whole tree: one arena, one contiguous copy.

    Args:
        index: position among the groups of a module tree.
        name: of the chunk, for messages and tables.
        weights: none may be in another group.
        sampled: keep samples of the values, so that `refresh(look=True)` can be asked.
    """

    def __init__(self, index: int, name: str, weights: Iterable[Weight], *, sampled: bool = True) -> None:
        self.index, self.name, self.sampled = index, name, sampled
        self.weights: list[Weight] = list(weights)
        self.nbytes = 0
        self.arena: Arena | None = None
        self.copied: Event = COMPLETE  # the last copy out of the arena: before it, the host must not write there

    def __repr__(self) -> str:
        return f"WeightGroup({self.name!r}, {len(self.weights)} weights, {self.nbytes} bytes)"

    def planned_bytes(self, dtypes: Sequence[torch.dtype]) -> int:
        """Bytes of one copy if the weights crossed in `dtypes`."""
        pairs = zip(self.weights, dtypes, strict=True)
        return sum(aligned(weight.parameter.numel() * dtype.itemsize) for weight, dtype in pairs)

    def build(self, dtypes: Sequence[torch.dtype], device: Device) -> None:
        """Lay the weights out in `dtypes`, in a new arena, and fill it.

        Raises:
            HostMemoryError: the system refuses the memory.
        """
        nbytes = self.planned_bytes(dtypes)
        arena, offset = Arena(nbytes, device), 0
        with torch.inference_mode(False), torch.no_grad():
            for weight, dtype in zip(self.weights, dtypes, strict=True):
                master = weight.parameter
                was_at_home = self.arena is not None and weight.own_shadow
                weight.dtype, weight.offset = dtype, offset
                weight.shadow = arena.tensor(offset, dtype, weight.size, weight.stride)
                weight.shadow.copy_(master)
                if weight.own_shadow:
                    master.data = weight.shadow
                elif was_at_home:
                    master.data = master.data.clone()
                weight.note(sample=self.sampled)
                offset += aligned(weight.nbytes)
        self.arena, self.nbytes = arena, nbytes

    def refresh(self, *, force: bool = False, look: bool = False) -> list[Weight]:
        """Bring the arena up to date with masters that were written; return these weights.

        Args:
            force: take every master as written, because a write through `.data` cannot be seen.
            look: compare samples of the values; see `Weight.written`.

        Raises:
            ConfigurationError: a master was moved to another device or dtype.
        """
        stale = self.weights if force else [weight for weight in self.weights if weight.written(look=look)]
        if any(not weight.own_shadow or _storage(weight.parameter) != _storage(weight.shadow) for weight in stale):
            self.copied.synchronize()
        with torch.no_grad():
            for weight in stale:
                master = weight.parameter
                if master.device.type != "cpu" or master.dtype != weight.home.dtype or master.size() != weight.size:
                    raise ConfigurationError(
                        f"parameter '{weight.name}' became a {master.dtype} tensor of size {tuple(master.size())} on "
                        f"'{master.device}'; while it streams its master stays {weight.home.dtype}, of size "
                        f"{tuple(weight.size)}, on 'cpu'. Change the model before it is attached."
                    )
                if not weight.own_shadow:
                    weight.shadow.copy_(master)
                elif _storage(master) != _storage(weight.shadow):
                    weight.shadow.copy_(master)
                    master.data = weight.shadow
                weight.note(sample=self.sampled)
        return list(stale)

    def release(self) -> None:
        """Give back the arena and its page lock. Masters keep their values and stay plain host tensors.

        The arena's memory is then only as long in use as its masters are, whoever still knows this group.
        """
        if self.arena is not None:
            self.arena.unlock()
        for weight in self.weights:
            if hasattr(weight, "shadow"):
                del weight.shadow
            if hasattr(weight, "home"):
                del weight.home
        self.arena, self.nbytes = None, 0


def separate(groups: Iterable[WeightGroup]) -> None:
    """Give every master memory of its own that user code pointed at the home of another one.

    After `a.data, b.data = b.data, a.data` bringing one of them home would overwrite the other.
    """
    built = [weight for group in groups if group.arena is not None for weight in group.weights]
    homes = {_storage(weight.shadow): weight for weight in built if weight.own_shadow}
    for weight in built:
        if homes.get(_storage(weight.parameter), weight) is not weight:
            weight.parameter.data = weight.parameter.data.clone()


def as_vector(tensor: Tensor) -> Tensor:
    """A tensor that fills its memory without gaps as a vector, in the order of that memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if its elements fill their memory without gaps, else those of a contiguous copy."""
    expected = 1
    for extent, stride in sorted(zip(tensor.size(), tensor.stride(), strict=True), key=lambda pair: pair[::-1]):
        if extent != 1 and stride != expected:
            return torch.empty(tensor.size(), device="meta").stride()
        expected *= extent
    return tensor.stride()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

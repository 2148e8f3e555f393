"""Host memory in exact, page-locked arenas.

An arena is one block of anonymous memory, shared with processes that are forked off. Every tensor taken from it has a
storage of exactly its own bytes, so saving, copying or sharing such a tensor never drags the arena along, and the block
is unlocked and freed with its last tensor.
(torch's caching host allocator rounds up to powers of two, and a view of a large tensor is saved with all of it.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ramtorch_core.errors import HostMemoryError
from ramtorch_core.memory.device import Device

ALIGNMENT = 256
"""Bytes. Slots and arenas share one layout, and device kernels load best from such addresses."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Block(mmap.mmap):
    """Anonymous memory that is unlocked before it is returned to the system."""

    device: Device
    address: int
    locked: bool
    process: int

    def unlock(self) -> None:
        if self.locked:
            self.locked = False
            self.device.page_unlock(self.address)

    def __del__(self) -> None:
        if getattr(self, "locked", False) and self.process == os.getpid() and not sys.is_finalizing():
            self.unlock()


def _block(nbytes: int, device: Device) -> _Block:
    try:
        block = _Block(-1, nbytes)  # shared, not private: a fork would copy every locked page for the child
    except OSError as error:
        raise HostMemoryError(f"{nbytes / 1e9:.2f} GB of host memory cannot be had: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    block.device, block.locked, block.process = device, False, os.getpid()
    everything = torch.frombuffer(block, dtype=torch.uint8)
    everything.zero_()  # pages that were touched are locked many times faster
    block.address = everything.data_ptr()
    block.locked = device.page_lock(block.address, nbytes)
    return block


class Arena:
    """One block of `nbytes` bytes of host memory, page-locked for `device` where it has a use for that.

    Raises:
        HostMemoryError: the system refuses the memory.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        self.nbytes = nbytes
        self._block: _Block | None = None
        if device.fake or nbytes == 0:
            self.flat = torch.zeros(nbytes, dtype=torch.uint8)
        else:
            self._block = _block(nbytes, device)
            self.flat = torch.frombuffer(self._block, dtype=torch.uint8)
            self._quiet = sys.getrefcount(self._block)

    @property
    def page_locked(self) -> bool:
        """Whether copies to and from the device run at full speed and asynchronously."""
        return self._block is not None and self._block.locked

    def tensor(self, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A tensor over the bytes from `offset` on, with a storage of its own; `size` and `stride` must be dense."""
        count = 1
        for extent in size:
            count *= extent
        if count == 0:
            flat = torch.empty(0, dtype=dtype)
        elif self._block is None:
            flat = self.flat[offset : offset + count * dtype.itemsize].view(dtype)
        else:
            flat = torch.frombuffer(self._block, dtype=dtype, count=count, offset=offset)
        return torch.as_strided(flat, tuple(size), tuple(stride))

    def tensors_alive(self) -> int:
        """How many storages taken by `tensor` are still in use, by anybody."""
        return 0 if self._block is None else sys.getrefcount(self._block) - self._quiet

    def unlock(self) -> None:
        """Return the page lock; the memory stays valid."""
        if self._block is not None:
            self._block.unlock()


def available_bytes() -> int | None:
    """Host memory that can still be had, in bytes: what the system reports, within the limits of control groups.

    Returns None where the system does not tell.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        available = fields["MemAvailable"] + fields.get("SwapFree", 0)
    except (OSError, KeyError, ValueError, IndexError):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return None
    return max(0, min([available, *_room_in_groups()]))


def _room_in_groups(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Bytes below the limit of each control group that this process is in, nested ones included, of either version.

    Files that were read and not used again (`inactive_file`) give way, so they do not count, as in the working set of
    Kubernetes.
    """
    lines = ["0::/"]
    with contextlib.suppress(OSError):
        lines = membership.read_text().splitlines()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        limit, usage, idle = names
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            try:
                most, used = (int((folder / name).read_text()) for name in (limit, usage))
            except (OSError, ValueError):  # no limit, or a group outside of this container
                continue
            with contextlib.suppress(OSError, ValueError, KeyError):
                stat = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                used -= int(stat[idle])
            yield most - used


def last_cache_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the last caches of the processors that this process may use; 0 where the system does not tell.

    A machine has several of them: one for each socket, or for a few cores.
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found: dict[tuple[int, str], int] = {}  # (level, who shares it) -> bytes
    names = ("level", "size", "shared_cpu_list")
    for number in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        for cache in folder.glob(f"cpu{number}/cache/index*"):
            with contextlib.suppress(OSError, ValueError):
                level, size, shared = ((cache / name).read_text().strip() for name in names)
                found[int(level), shared] = int(size.rstrip("KMG")) * units.get(size[-1:], 1)
    last = max((level for level, _ in found), default=0)
    return sum(nbytes for (level, _), nbytes in found.items() if level == last)

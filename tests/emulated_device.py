"""A device with streams, emulated on the CPU, that finds races instead of waiting for them to show.

Its tensors are computed at once, in host memory that only they have; see `emulated_streams` for what orders accesses
to them. They are of another type than tensors on the host, so mixing them raises, and autograd runs the device's
backward in a thread of its own, as for CUDA.

Registering a device cannot be undone: use it in a process of its own.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from emulated_streams import INWARD, OUTWARD, Event, Machine, Stream
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from ramtorch_core.memory import device as real
from ramtorch_core.memory.ranges import Moment, Ranges
from ramtorch_core.memory.staging import Staging
from ramtorch_core.optim.updater import Updater


class _Backend(_DummyBackendModule):
    """`torch.twin`: random numbers of the device are the CPU's."""

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def device(self, _index: int) -> Any:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("twin", backend_module=_Backend())
TWIN = torch.device("twin", 0)


machine = Machine()


class Twin(torch.Tensor):
    """A tensor on the emulated device; `inner` has its values."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Twin":
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=TWIN,
        )
        made.inner = inner
        made.untyped_storage().inner = inner.untyped_storage()
        return made  # type: ignore[no-any-return]

    def record_stream(self, stream: Stream) -> None:
        machine.device_memory(self.inner).recorded.add(stream.name)

    def __repr__(self, **_: Any) -> str:
        return f"Twin({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.set_.source_Storage_storage_offset:
            return _set(func, args)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy") and (to_host or any(not isinstance(t, Twin) for t in inputs)):
            return _copy(func, args, kwargs)
        foreign = [t for t in inputs if not isinstance(t, Twin) and t.dim() > 0]
        if foreign:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got some on cpu and twin:0")
        found = func(*_inner(args), **_inner({**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}))
        out = tree_map_only(torch.Tensor, Twin, found)
        if not _is_view(func):
            written = _written(func, args, kwargs)
            fresh = [
                t for t in tree_leaves(out) if isinstance(t, Twin) and not any(t.inner is w.inner for w in written)
            ]
            reads = [t.inner for t in inputs if isinstance(t, Twin) and not any(t is w for w in written)]
            machine.work(reads, [t.inner for t in (*written, *fresh)], name)
            if name in _WAITS or not all(isinstance(leaf, (Twin, type(None))) for leaf in tree_leaves(out)):
                machine.wait_for(name)
        return return_and_correct_aliasing(func, args, kwargs, out)


_WAITS = {"aten::nonzero", "aten::equal", "aten::_local_scalar_dense", "aten::masked_select", "aten::unique"}


def _inner(value: Any) -> Any:
    return tree_map_only(Twin, lambda tensor: tensor.inner, value)


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any, kind: Any = Twin) -> list[Any]:
    named = itertools.zip_longest(func._schema.arguments, args)
    values = [(a, kwargs.get(a.name) if a.kwarg_only or i >= len(args) else v) for i, (a, v) in enumerate(named)]
    found = [value for a, value in values if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, kind)]


def _set(func: Any, args: Any) -> Any:
    target, storage, *place = args
    target.inner = torch.empty(0, dtype=target.dtype).set_(storage.inner, *place)
    with torch.utils._mode_utils.no_dispatch():
        before = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            func(*args)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)
    return target


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Between the host and the device."""
    target, source = (args[0], args[1]) if func._schema.name == "aten::copy_" else (None, args[0])
    asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    found = func(*_inner(args), **kwargs)
    host = found if target is None else target if not isinstance(target, Twin) else source
    device = source if host is not source else target
    locked = machine.locked(host) is not None and host.is_contiguous()
    outward = host is not source
    if not outward and host.dtype != device.dtype:
        locked = False
    if locked:
        reads, writes = ([device.inner], [host]) if outward else ([host], [device.inner])
        machine.work(reads, writes, OUTWARD if outward else INWARD)
    else:
        machine.host_access(host, outward, "a copy of pageable memory")
        machine.work([device.inner] * outward, [device.inner] * (not outward), "a copy of pageable memory")
    if not locked or not asynchronous:
        machine.wait_for("a copy that is not asynchronous" if locked else "a copy of pageable memory")
    return found if target is None else target


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Twin:
    return Twin(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Twin:
    return Twin(torch.empty_strided(size, stride, dtype=dtype))


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")


def _autocast(name: str) -> Any:
    """As autocast does it on every device: float32 arguments are cast, each time anew."""
    operation = getattr(torch.ops.aten, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(TWIN.type)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

        with torch.autocast(TWIN.type, enabled=False):
            return operation(*tree_map_only(torch.Tensor, cast, args), **kwargs)

    return call


_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for _name in ("linear", "matmul", "mm", "addmm"):
    _library.impl(_name, _autocast(_name), "AutocastPrivateUse1")


class HostWatch(TorchDispatchMode):
    """Sees what host threads do with page-locked memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        found = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        touches = not _is_view(func) and func._schema.name != "aten::set_"
        if touches and not any(isinstance(t, Twin) for t in (*inputs, *outputs)):
            written = _written(func, args, kwargs, torch.Tensor)
            for tensor in inputs:
                machine.host_access(tensor, any(tensor is w for w in written), func._schema.name)
        return found


class Emulated(real.Device):
    """What the engine takes for its device."""

    def __init__(self) -> None:
        self.fake, self.torch, self.asynchronous = False, TWIN, True
        self.ranges = Ranges(Moment)

    def stream(self) -> Any:
        machine.streams.append(Stream())
        return machine.streams[-1]

    def current_stream(self) -> Any:
        return machine.stream

    def on(self, stream: Any) -> Any:
        return machine.on(stream)

    def activate(self) -> None:
        pass

    def generator(self) -> None:
        return None

    def record(self, stream: Any = None, *, blocking: bool = False) -> Any:
        return machine.record(stream or machine.stream)

    def mark(self) -> Moment:
        return Moment()

    def wait(self, event: Any, stream: Any = None) -> None:
        if isinstance(event, Event):
            machine.wait(stream or machine.stream, event)

    def synchronize(self) -> None:
        machine.synchronize()

    def page_lock(self, address: int, nbytes: int) -> bool:
        machine.page_lock(address, nbytes)
        return True

    def page_unlock(self, address: int) -> None:
        machine.page_unlock(address)

    def free_bytes(self) -> None:
        return None

    total_bytes = usable_bytes = allocated_bytes = peak_bytes = free_bytes

    def forget_peak(self) -> None:
        pass

    def name(self) -> str:
        return "twin"


class _Condition(threading.Condition):
    """Hands on what the thread that had it knew."""

    def __enter__(self) -> bool:
        entered = super().__enter__()
        machine.acquire(self)
        return entered

    def __exit__(self, *error: Any) -> None:
        machine.release(self)
        super().__exit__(*error)

    def wait(self, timeout: float | None = None) -> bool:
        machine.release(self)
        try:
            return super().wait(timeout)
        finally:
            machine.acquire(self)


@contextlib.contextmanager
def emulation(monkeypatch: Any, seed: int, *, late: float = 0.0) -> Iterator[Machine]:
    """Inside, engines may be attached to `Emulated()`; what they do is watched."""
    machine.reset(seed, late)
    run, pending, wait = Updater._run, Updater.is_pending, Updater.wait

    def watched(self: Updater) -> None:
        with HostWatch():
            run(self)

    def is_pending(self: Updater, group: Any) -> bool:
        found = pending(self, group)
        machine.acquire(self._changed)  # the interpreter's lock orders what is read without one
        return found

    def wait_for(self: Updater, group: Any = None) -> None:
        wait(self, group)
        machine.acquire(self._changed)

    def pinned(self: torch.Tensor, device: Any = None) -> bool:
        return not isinstance(self, Twin) and machine.locked(self) is not None

    def with_lock(kind: Any) -> None:
        begin = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            begin(self, *args, **kwargs)
            self._changed = _Condition()

        monkeypatch.setattr(kind, "__init__", init)

    with_lock(Updater)
    with_lock(Staging)
    monkeypatch.setattr(torch.Tensor, "is_pinned", pinned)
    monkeypatch.setattr(Updater, "_run", watched)
    monkeypatch.setattr(Updater, "is_pending", is_pending)
    monkeypatch.setattr(Updater, "wait", wait_for)
    with HostWatch():
        yield machine

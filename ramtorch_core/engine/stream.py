"""The streaming engine: attaches to a module tree and lends it weights for the length of each visit.

See ARCHITECTURE.md for the life of a weight and of a gradient.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ramtorch_core.engine.activations import BufferSnapshot, checkpoint_call
from ramtorch_core.engine.backward import BackwardTask, current_task
from ramtorch_core.engine.census import Census, Chunk, ChunkRow, chunk_rows, take_census
from ramtorch_core.engine.dtypes import StreamDtypes
from ramtorch_core.engine.follow import Follower, OpenVisit
from ramtorch_core.engine.lend import Loan, Placement, lend
from ramtorch_core.engine.module_tree import is_never_called
from ramtorch_core.engine.modules import ChunkForward, move_buffers, tensors_in
from ramtorch_core.engine.observe import Observer, Use, is_compiled
from ramtorch_core.engine.rest import Rest
from ramtorch_core.engine.saved import SavedTensors
from ramtorch_core.engine.tracing import is_tracing, trace_call
from ramtorch_core.errors import HostMemoryError, RamtorchError
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.host import available_bytes
from ramtorch_core.memory.weights import Weight, WeightGroup, separate
from ramtorch_core.memory.window import Slot, Window
from ramtorch_core.plan.itinerary import Direction

log = logging.getLogger(__name__)


class Activations(Enum):
    """What happens to a chunk's activations between forward and backward."""

    KEEP = "keep"
    CHECKPOINT = "checkpoint"


class _Lending:
    """A visit with its tensors on show: in a slot, or (`opened` is None) in a copy of its own."""

    def __init__(self, chunk: Chunk, opened: OpenVisit | None, placement: Placement) -> None:
        self.chunk, self.opened, self.placement = chunk, opened, placement
        self.version = opened.slot.buffer._version if opened is not None else 0
        self.lent: list[Tensor] = []
        self.watched: tuple[list[Tensor], list[Use]] | None = None


class _OpensBackward:
    """A hook on a chunk's outputs: the first that fires opens the chunk's backward visit. Lives as long as the graph."""

    def __init__(self, streamer: Streamer, chunk: Chunk | None, exact: bool) -> None:
        self._streamer, self._chunk, self._exact = weakref.ref(streamer), chunk, exact

    def __call__(self, _grad: Tensor) -> None:
        streamer = self._streamer()
        if streamer is None:
            return
        if self._chunk is None:
            streamer.enter_backward()
        else:
            streamer.open_backward(self._chunk, exact=self._exact)


class Streamer:
    """Streams the chunks of `root` through a window on `device`, until `close`.

    Args:
        root: any module tree with its parameters on the host.
        chunks: qualified names and modules, as `find_chunks` returns them.
        device: where to compute.
        window: slots; fewer are allocated when fewer chunks stream.
        resident: indices of chunks whose parameters become device parameters.
        activations: what to do with activations.
        dtypes: in which dtype weights cross.
        resident_below: bytes; smaller tensors keep a copy on the device.
        training: whether gradients will be needed (counted when host memory is checked).
        host_memory: bytes of host memory that may be used; by default what the system reports as available.
        poison: fill slots with NaN before each copy; for tests.

    Attributes:
        conservative: before each step, take every master as written, because a write through `.data` leaves no trace.
            Costs one cast of each half-precision shadow per step. Without it, version counters and samples of the
            values decide; `invalidate` tells of other writes.
    """

    def __init__(
        self,
        root: nn.Module,
        chunks: Sequence[tuple[str, nn.Module]],
        *,
        device: Device,
        window: int = 2,
        resident: frozenset[int] = frozenset(),
        activations: Activations = Activations.CHECKPOINT,
        dtypes: StreamDtypes | None = None,
        resident_below: int = 1 << 20,
        training: bool = True,
        host_memory: int | None = None,
        poison: bool = False,
    ) -> None:
        self.root, self.device, self.activations = root, device, activations
        self.dtypes = dtypes or StreamDtypes()
        self.closed = False
        self.conservative = True
        self._window_slots, self._poison = window, poison
        self._named, self._resident, self._resident_below = list(chunks), resident, resident_below
        self._training, self._host_memory = training, host_memory
        self._stray: set[nn.Parameter] = set()
        self._depth = 0
        self._entered = 0
        self._lending = False
        self._suspect = False
        self._epoch = 0  # advances whenever user code may have written masters
        self._forced = 0  # groups last refreshed before this epoch are refreshed whether or not a write can be seen
        self._epochs: dict[WeightGroup, int] = {}
        self._tasks: weakref.WeakValueDictionary[int, BackwardTask] = weakref.WeakValueDictionary()
        self._open_tasks = 0
        self._graphs: weakref.WeakSet[_OpensBackward] = weakref.WeakSet()
        self._backward: _Lending | None = None
        self._marker = torch.empty(0, device=device.torch)
        self.gradients = Gradients(device)
        self.observer: Observer | None = None
        self._observed: set[bool] = set()  # with gradients, without: watched for one step each
        self._gradients_in_step = False
        self._observing: Observer | None = None
        self._built = False
        self._take_census()
        self._check_host_memory()
        self._forwards = [ChunkForward(chunk.module, self._visit, chunk) for chunk in self.census.chunks]
        scoped = [root, *self._entry_children()]
        chunk_modules = {id(chunk.module) for chunk in self.census.chunks}
        self._forwards += [ChunkForward(m, self._enter, None) for m in scoped if id(m) not in chunk_modules]
        self._step_hook = register_optimizer_step_post_hook(self._after_optimizer_step())
        for chunk in self.census.chunks:
            if chunk.resident:
                for parameter in chunk.parameters:
                    parameter.data = parameter.data.to(device.torch)
        move_buffers(root, device.torch)

    # ------------------------------------------------------------------ set-up

    def _take_census(self) -> None:
        self.census: Census = take_census(
            self.root,
            self._named,
            resident=self._resident,
            resident_below=self._resident_below,
            also_copies=frozenset(self._stray),
        )
        self._streamed = [chunk for chunk in self.census.chunks if chunk.group is not None]
        self.groups = [chunk.group for chunk in self._streamed if chunk.group is not None]
        self._chunk_of = {chunk.group: chunk for chunk in self._streamed if chunk.group is not None}
        self._placements = {group: Placement(group.weights) for group in self.groups}
        self._loans: dict[WeightGroup, weakref.WeakSet[Loan]] = {group: weakref.WeakSet() for group in self.groups}
        self._rest = Rest(self.census.copies, self.device, self)
        everything = (*self.groups, self._rest.group)
        self._weights = {weight.parameter: weight for group in everything for weight in group.weights}
        self._saved = SavedTensors(self._locate, self._slot_for_backward, self.device.torch)

    def _entry_children(self) -> list[nn.Module]:
        """The outermost modules that users may call directly, and that need copies of the rest."""
        copies = {id(module) for weight in self.census.copies for module, _ in weight.sites}
        entries: list[nn.Module] = []
        waiting = list(self.root.children())
        while waiting:
            module = waiting.pop(0)
            if is_never_called(module):
                waiting.extend(module.children())
            elif not is_compiled(module) and any(id(part) in copies for part in module.modules()):
                entries.append(module)
        return list(dict.fromkeys(entries))

    def build(self, compute_dtype: torch.dtype | None) -> None:
        """Lay out arenas and slots for weights that are used under autocast to `compute_dtype` (None: no autocast).

        Called by itself when the first visit comes, with the autocast state found there.

        Raises:
            HostMemoryError: the system refuses the memory.
        """
        self.dtypes.compute = compute_dtype
        for group in self.groups:
            wanted = [self.dtypes.wanted(weight) for weight in group.weights]
            if group.arena is None or wanted != [weight.dtype for weight in group.weights]:
                group.build(wanted, self.device)
                self._epochs[group] = self._epoch
        if not self._rest.group.arena:
            self._rest.build()
        largest = max((group.nbytes for group in self.groups), default=0)
        slots = min(self._window_slots, len(self.groups))
        if not self._built or self.window.nbytes < largest:
            if self._built:
                self.device.synchronize()
            self.window = Window(self.device, slots, largest, poison=self._poison)
            self.follower = Follower(self.window, self.groups, self._refresh)
            self._storages = {slot.buffer.untyped_storage()._cdata: slot for slot in self.window.slots}
        self.window.forget()
        self._built = True

    def _check_host_memory(self) -> None:
        """Refuse before anything is allocated."""
        limit = self._host_memory if self._host_memory is not None else available_bytes()
        if limit is None or self.device.fake:
            return
        needed = 0
        for group in self.groups:
            for weight in group.weights:
                master = weight.parameter
                half = self.dtypes.may_be_half(weight)
                needed += 2 * master.numel() if half else 0
                if self._training and master.requires_grad:
                    needed += master.nbytes
        if needed > limit:
            raise HostMemoryError(
                f"streaming needs {needed / 1e9:.1f} GB of host memory besides the model's own weights, "
                f"{limit / 1e9:.1f} GB are available: keep more chunks on the device (pin=), freeze weights, or, if the "
                f"system reports less than it has, state host_memory= in bytes"
            )

    def chunk_table(self) -> list[ChunkRow]:
        """What streams and what stays, and why."""
        return chunk_rows(self.census)

    def device_weight_bytes(self) -> int:
        """Bytes of weights on the device: slots, resident chunks, and the copies that stay."""
        slots = self.window.nbytes * len(self.window.slots) if self._built else 0
        resident = sum(p.nbytes for chunk in self.census.chunks if chunk.resident for p in chunk.parameters)
        return slots + resident + self._rest.nbytes

    # ------------------------------------------------------------------ scopes

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Run code that uses the model: inside, every tensor outside of the chunks is on the device.

        `root.forward` opens one by itself; open one around code that reads parameters of `root` directly.
        """
        if self.closed:
            yield
            return
        if self._depth == 0:
            self._begin_scope()
        elif self._suspect:
            self._new_epoch()
        self._depth += 1
        failed = True
        try:
            yield
            failed = False
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._end_scope(failed)

    def begin_lending(self) -> None:
        """Around a backward, until `end_lending`: modules compute with device tensors, and no step begins or ends."""
        if not self._lending and not self.closed:
            self._lending = True
            self._rest.enter()

    def end_lending(self) -> None:
        """Undo `begin_lending`. Idempotent; an error in the step has the same effect."""
        if self._lending:
            self._lending = False
            self._rest.leave()

    def prepare(self) -> None:
        """Allocate arenas and slots now, for the autocast state of the caller, instead of at the first visit."""
        self.build(self._ambient())

    def never_visited(self) -> list[str]:
        """Names of streamed chunks whose forward has not been called."""
        visited = self.follower.visited if self._built else set()
        return [chunk.name for chunk in self._streamed if chunk.group is not None and chunk.group.index not in visited]

    def _begin_scope(self) -> None:
        if current_task() != -1:
            if not self._built or (self._open_tasks == 0 and not self.follower.visits):
                self._begin_step()  # inside of a backward that is not ours
            self.enter_backward()
        elif self._open_tasks == 0:
            if self._built and self.follower.visits and not self._graphs:
                self.follower.finish_step()  # a forward whose graph died without a backward
            if not self._built or not self.follower.visits:
                self._begin_step()
            else:
                self._rest.refresh()
        self._rest.enter()
        something_to_see = self.dtypes.compute is not None or self.device.torch.type != "cpu"
        if self.observer is not None and something_to_see and torch.is_grad_enabled() not in self._observed:
            self._observing = self.observer
            self._observing.compute = self.dtypes.compute
            self._observing.__enter__()

    def _begin_step(self) -> None:
        ambient = self._ambient()
        self.end_lending()
        if self._stray_found():
            self._retire_strays()
        elif any(weight.moved() for group in (*self.groups, self._rest.group) for weight in group.weights):
            self._start_over()
        if not self._built or (ambient is not None and ambient != self.dtypes.compute) or self.dtypes.changed:
            self.dtypes.changed = False
            if ambient != self.dtypes.compute:
                self.observer, self._observed = None, set()  # what was seen under another autocast does not count
            self.build(ambient if ambient is not None or not self._built else self.dtypes.compute)
        self._new_epoch()
        self._gradients_in_step = torch.is_grad_enabled()
        if self.observer is None and not self._observed and not is_compiled(self.root):
            self.observer = Observer(self.device.torch, self._exact_weight, self.dtypes.is_fixed)
            self.observer.masters = {id(w.parameter): w for group in self.groups for w in group.weights}

    def _new_epoch(self) -> None:
        """User code ran: masters may have been written, in ways that can be seen or not."""
        self._epoch += 1
        self._suspect = False
        with torch._C.DisableTorchFunction():
            if not self.device.fake:
                separate((*self.groups, self._rest.group))
            self._rest.refresh(force=True)

    def _end_scope(self, failed: bool) -> None:
        if self._observing is not None:
            self._observing.__exit__(None, None, None)
            self._observing = None
        self._rest.leave()
        if current_task() == -1 and self._open_tasks == 0 and self._built:
            if failed:
                self._graphs.clear()
                self.follower.abandon_step()
            elif not self._graphs:
                self._finish_step()
        self._let_host_write()
        if self._built and not self.conservative and not torch.is_grad_enabled() and current_task() == -1:
            self.follower.prefetch()

    def _finish_step(self) -> None:
        self.follower.finish_step()
        if self.observer is not None:
            self._observed.add(self._gradients_in_step)
            if self._observed == {True, False} and not self._stray_found():
                self.observer = None

    def _let_host_write(self) -> None:
        """Wait until no copy reads a master: from here on user code may write it."""
        for group in (*self.groups, self._rest.group):
            if any(weight.own_shadow for weight in group.weights):
                group.copied.synchronize()

    def _enter(self, inner: Callable[..., Any], _chunk: Chunk | None, args: Any, kwargs: Any) -> Any:
        """The forward of the root, or of a child that is called directly."""
        if self.closed:
            return inner(*args, **kwargs)
        if is_tracing():
            return trace_call(inner, self._weights.values(), self.device.torch, args, kwargs)
        with self.scope():
            if self._entered == 0 and self._depth > 1 and current_task() == -1:
                self._new_epoch()
            self._entered += 1
            try:
                output = inner(*args, **kwargs)
            finally:
                self._entered -= 1
        if torch.is_grad_enabled():
            self._watch(None, output, args, kwargs, exact=False)
        return output

    # ------------------------------------------------------------------ visits

    def _visit(self, inner: Callable[..., Any], chunk: Chunk | None, args: Any, kwargs: Any) -> Any:
        """The forward of a chunk."""
        assert chunk is not None
        if self.closed:
            return inner(*args, **kwargs)
        if is_tracing():
            return trace_call(inner, self._weights.values(), self.device.torch, args, kwargs)
        with self.scope():
            if self._entered == 0 and self._depth > 1 and current_task() == -1:
                self._rest.follow_toggles()
            exact = self._needs_exact(chunk)
            if not torch.is_grad_enabled():
                with self._lent(chunk, exact):
                    return inner(*args, **kwargs)
            if self.activations is Activations.KEEP:
                with self._lent(chunk, exact), self._hooks(chunk):
                    output = inner(*args, **kwargs)
            else:
                output = self._checkpointed(inner, chunk, exact, args, kwargs)
            self._watch(chunk, output, args, kwargs, exact=exact)
            return output

    def _checkpointed(
        self, inner: Callable[..., Any], chunk: Chunk, exact: bool, args: Any, kwargs: Any
    ) -> Any:
        snapshot = BufferSnapshot(chunk.module)
        again, observer = False, self._observing

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal again
            if not again:
                again = True
                try:
                    with self._hooks(chunk):
                        return inner(*args, **kwargs)
                finally:
                    snapshot.keep_changed()
            with self._recomputing(chunk, exact, observer), snapshot.restored(), self._hooks(chunk):
                return inner(*args, **kwargs)

        with self._lent(chunk, exact):
            return checkpoint_call(run, *args, marker=self._marker, **kwargs)

    @contextlib.contextmanager
    def _recomputing(self, chunk: Chunk, exact: bool, observer: Observer | None) -> Iterator[None]:
        """The backward visit of a checkpointed chunk, watched by whoever watched its forward."""
        if observer is not None and self._observing is None:
            self._observing = observer
            try:
                with observer, self._recomputing(chunk, exact, None):
                    yield
            finally:
                self._observing = None
            return
        if current_task() == -1 or exact:
            with self._lent(chunk, exact):
                yield
            return
        self.open_backward(chunk)
        if self.census.chunks[chunk.index].group is None:  # only chunks inside of it stream
            yield
            return
        lending, self._backward = self._backward, None  # other chunks that run inside must not end this visit
        if lending is None or lending.opened is None:
            yield
            return
        self.follower.keep_open(lending.opened)
        if self._observing is not None:
            assert chunk.group is not None
            self._observing.lend(chunk.group.weights, lending.lent)
        try:
            yield
        finally:
            if self._observing is not None:
                self._observing.reclaim(lending.lent)
            self._close_backward_visit()
            self._backward = lending
            self.follower.may_close(lending.opened)

    @contextlib.contextmanager
    def _lent(self, chunk: Chunk, exact: bool) -> Iterator[None]:
        """A forward visit: inside, the chunk's modules compute with device tensors."""
        if chunk.group is None:
            yield
            return
        self._close_backward_visit()
        if current_task() != -1:
            self.enter_backward()
        lending = self._begin_lending(chunk, Direction.FORWARD, exact, self._loans[chunk.group])
        try:
            yield
        finally:
            self._end_lending(lending)

    def _begin_lending(
        self, chunk: Chunk, direction: Direction, exact: bool, loans: weakref.WeakSet[Loan] | None
    ) -> _Lending:
        group = chunk.group
        assert group is not None
        with torch._C.DisableTorchFunction():
            if exact:
                opened, views = None, [self._copy_of(weight) for weight in group.weights]
            else:
                opened = self.follower.open(group, direction)
                views = opened.slot.views(group)
            lent = lend(group, views, self, loans)
        self._placements[group].show(lent)
        lending = _Lending(chunk, opened, self._placements[group])
        lending.lent = lent
        if self._observing is not None and not exact and direction is Direction.FORWARD:
            lending.watched = (lent, self._observing.lend(group.weights, lent))
        return lending

    def _end_lending(self, lending: _Lending) -> None:
        group = lending.chunk.group
        assert group is not None
        lending.placement.hide()
        if lending.watched is not None and self._observing is not None:
            lent, uses = lending.watched
            self._observing.reclaim(lent)
            for weight, use in zip(group.weights, uses, strict=True):
                self.dtypes.note(weight, use)
        if lending.opened is not None:
            written = lending.opened.slot.buffer._version != lending.version
            with torch._C.DisableTorchFunction():
                self.follower.close(lending.opened)
            if written:
                raise RamtorchError(
                    f"the forward of chunk '{lending.chunk.name}' writes its own weights in place; while they stream "
                    f"that write would be lost. Keep the chunk on the device (pin=['{lending.chunk.name}']), or write "
                    f"the parameters outside of forward."
                )

    def _hooks(self, chunk: Chunk) -> contextlib.AbstractContextManager[None]:
        return self._saved.hooks() if chunk.group is not None else contextlib.nullcontext()

    def _watch(self, chunk: Chunk | None, output: Any, args: Any, kwargs: Any, *, exact: bool) -> None:
        """Let the first gradient of an output open the backward visit."""
        inputs = {id(tensor) for tensor in tensors_in((args, kwargs))}
        outputs = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf and id(t) not in inputs]
        if outputs:
            hook = _OpensBackward(self, chunk, exact)
            self._graphs.add(hook)
            for tensor in outputs:
                tensor.register_hook(hook)

    def _ambient(self) -> torch.dtype | None:
        kind = self.device.torch.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _needs_exact(self, chunk: Chunk) -> bool:
        """Whether the chunk has shadows in half precision, and this visit is not under autocast to their dtype."""
        group = chunk.group
        if group is None or all(weight.own_shadow for weight in group.weights):
            return False
        exact = self._ambient() != self.dtypes.compute
        if exact and not self.dtypes.warned:
            self.dtypes.warned = True
            log.warning(
                "chunk '%s' streams in %s, but runs outside of autocast: its float32 weights are copied for each such "
                "visit, without overlap. Run it under autocast, or pass stream_dtype=torch.float32.",
                chunk.name,
                self.dtypes.compute,
            )
        return exact

    def _copy_of(self, weight: Weight) -> Tensor:
        with torch.no_grad():
            return weight.parameter.detach().to(self.device.torch, copy=True)

    def _exact_weight(self, weight: Weight) -> Tensor:
        """A differentiable device copy of one weight in its master's dtype."""
        group = next(group for group in self.groups if weight in group.weights)
        part = WeightGroup(group.index, group.name, [weight])
        with torch._C.DisableTorchFunction():
            return lend(part, [self._copy_of(weight)], self, self._loans[group])[0]

    # ------------------------------------------------------------------ backward

    def enter_backward(self) -> BackwardTask | None:
        """A sign of a backward: take part in it until it ends."""
        identifier = current_task()
        if self.closed:
            raise RamtorchError(
                "the engine was closed before this backward: the weights that its graph refers to are no longer on the "
                "device. Run backward first, and close() afterwards."
            )
        if identifier == -1:
            return None
        task = self._tasks.get(identifier)
        if task is None:
            reference = weakref.ref(self)

            def abandon() -> None:
                streamer = reference()
                if streamer is not None:
                    streamer.abandon()

            task = BackwardTask(self._finish_backward, abandon)
            self._tasks[identifier] = task
            self._open_tasks += 1
            self._rest.enter()
        return task

    def open_backward(self, chunk: Chunk, *, exact: bool = False) -> None:
        """Begin the chunk's backward visit, if it is not under way; it ends when the next visit begins, at the latest."""
        task = self.enter_backward()
        chunk = self.census.chunks[chunk.index]  # the tree may have been divided anew since the forward
        if chunk.group is None or (self._backward is not None and self._backward.chunk is chunk):
            return
        self._close_backward_visit()
        with torch.inference_mode(False), torch.enable_grad():
            lending = self._begin_lending(chunk, Direction.BACKWARD, exact, None)
        self._backward = lending
        if task is None:  # somebody reads saved tensors outside of a backward
            self._close_backward_visit()

    def _close_backward_visit(self) -> None:
        lending, self._backward = self._backward, None
        if lending is not None:
            lending.placement.hide()
            if lending.opened is not None:
                self.follower.close(lending.opened)

    def collect(self, loan: Loan, grads: Sequence[Tensor | None]) -> None:
        """Backward reached a Lend node: its visit is over, its gradients leave the device."""
        task = self.enter_backward()
        group = self._group_of(loan)
        if group is None:
            _add_directly(loan, grads)
            return
        bucket = task.pending.setdefault(group, {}) if task is not None else {}
        for weight, grad in zip(loan.weights, grads, strict=True):
            if grad is not None:
                known = bucket.get(weight)
                dtype = weight.parameter.dtype
                bucket[weight] = grad if known is None else known.to(dtype) + grad.to(dtype)
        others = (
            other is not loan and not other.repaid and other.born_in == loan.born_in
            for other in self._loans.get(group, ())
        )
        if not any(others):
            self._send(group, bucket)
        if self._backward is not None and self._backward.chunk.group is group:
            self._close_backward_visit()

    def _group_of(self, loan: Loan) -> WeightGroup | None:
        """None for a loan from before the tree was divided anew."""
        position = loan.group.index
        group = self._rest.group if position < 0 else self.groups[position] if position < len(self.groups) else None
        return group if group is not None and loan.weights[0] in group.weights else None

    def _send(self, group: WeightGroup, bucket: dict[Weight, Tensor]) -> None:
        if bucket:
            self.gradients.receive(group, [bucket.get(weight) for weight in group.weights])
            bucket.clear()

    def _finish_backward(self, task: BackwardTask) -> None:
        for group, bucket in task.pending.items():
            self._send(group, bucket)
        self._open_tasks -= 1
        self._rest.leave()
        if self._open_tasks == 0:
            self._close_backward_visit()
            self.gradients.finish()
            self._graphs.clear()
            self._finish_step()
            self._let_host_write()

    def abandon(self) -> None:
        """A step failed: drop what it left, so that the next one works."""
        if self.closed:
            return
        self._close_backward_visit()
        self.end_lending()
        for _ in range(self._open_tasks):
            self._rest.leave()
        self._open_tasks = 0
        self._tasks.clear()
        self._graphs.clear()
        self.gradients.drop()
        if self._built:
            self.follower.abandon_step()

    # ------------------------------------------------------------------ masters

    def _refresh(self, group: WeightGroup) -> bool:
        seen = self._epochs.get(group, self._epoch)
        self._epochs[group] = self._epoch
        if seen == self._epoch:
            return bool(group.refresh())
        return bool(group.refresh(force=self.conservative or seen < self._forced, look=True))

    def refresh(self) -> None:
        """Bring shadows up to date with written masters now, instead of when they are next needed.

        Does nothing while `conservative`: then they are brought up to date before their next use in any case.
        """
        if self._built and not self.closed and not self.conservative:
            for group in self.groups:
                if group.refresh():
                    self.window.forget(group)
            self.follower.prefetch()

    def invalidate(self) -> None:
        """Masters may have been written through `.data`, which cannot be seen: cast and copy all of them again."""
        self._suspect = True
        self._epoch += 1
        self._forced = self._epoch

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: its parameters were written, though fused kernels do not count versions."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._weights:
                    self._weights[parameter].touch()
        if self._depth:
            with torch._C.DisableTorchFunction():
                self._rest.refresh()
            self.invalidate()

    def _after_optimizer_step(self) -> Callable[..., None]:
        reference = weakref.ref(self)

        def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            streamer = reference()
            if streamer is not None and not streamer.closed:
                streamer.note_step(optimizer)

        return after

    def _locate(self, tensor: Tensor) -> tuple[WeightGroup, Weight] | None:
        slot = self._storages.get(tensor.untyped_storage()._cdata)
        if slot is None or slot.group is None:
            return None
        start = tensor.storage_offset() * tensor.dtype.itemsize
        for weight in slot.group.weights:
            if weight.offset <= start < weight.offset + max(weight.nbytes, 1):
                return slot.group, weight
        return None

    def _slot_for_backward(self, group: WeightGroup) -> Slot | None:
        if group not in self._chunk_of:
            return None
        current = self._backward
        if current is not None and current.chunk.group is group and current.opened is not None:
            return current.opened.slot
        self.open_backward(self._chunk_of[group])
        slot = self.window.find(group)
        assert slot is not None
        return slot

    # ------------------------------------------------------------------ strays, errors, end

    def _stray_found(self) -> bool:
        return self.observer is not None and bool(self.observer.stray)

    def _retire_strays(self) -> None:
        """Weights that were used outside of their chunk's forward get a copy that stays."""
        assert self.observer is not None
        for weight, function in self.observer.stray.items():
            log.warning(
                "parameter '%s' is used outside of its chunk's forward (by %s): a copy of it stays on the device. Make "
                "the module that uses it the chunk, if it should stream.",
                weight.name,
                function,
            )
            self._stray.add(weight.parameter)
        self._start_over()

    def _start_over(self) -> None:
        """The tree holds other parameters than before, or they are used in another way: divide it anew."""
        self.device.synchronize()
        self._rest.release()
        for group in self.groups:
            self.gradients.forget(group)
            group.release()
        self.gradients.forget(self._rest.group)
        self._take_census()
        self.observer, self._built, self._observed = None, False, set()
        for forward in self._forwards:
            forward.chunk = self.census.chunks[forward.chunk.index] if forward.chunk is not None else None
        self._epochs = {}

    def _explain(self, error: RuntimeError) -> None:
        message = str(error)
        if "same device" not in message or "ramtorch" in message or not error.args:
            return
        never = self.never_visited()
        names = f" Chunks not called so far: {', '.join(never[:5])}." if never else ""
        error.args = (
            f"{message}\n(ramtorch: the weights' masters are on the host. A parameter that is used outside of its "
            f"chunk's forward must stay on the device: make the module that uses it the chunk, or pin it. For the "
            f"compute device read an input's .device, not that of a parameter.{names})",
            *error.args[1:],
        )

    def close(self) -> None:
        """Detach: wait for the device, bring everything back to the host, and leave a plain module. Idempotent."""
        if self.closed:
            return
        self.abandon()
        self.closed = True
        self._step_hook.remove()
        for forward in self._forwards:
            forward.remove()
        self.device.synchronize()
        self._rest.release()
        for group in self.groups:
            group.release()
        for chunk in self.census.chunks:
            if chunk.resident:
                for parameter in chunk.parameters:
                    parameter.data = parameter.data.cpu()
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.cpu()
        move_buffers(self.root, torch.device("cpu"))
        self._built = False


def _add_directly(loan: Loan, grads: Sequence[Tensor | None]) -> None:
    """Add gradients to `.grad` at once, for a graph that is older than the present groups."""
    for weight, grad in zip(loan.weights, grads, strict=True):
        if grad is not None:
            master = weight.parameter
            host = grad.to(device=master.device, dtype=master.dtype, copy=True)
            master.grad = host if master.grad is None else master.grad.add_(host)

"""The streaming engine: attaches to a module tree and lends it weights for the length of each visit.

See ARCHITECTURE.md for the life of a weight and of a gradient.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from ramtorch_core.engine.backward import BackwardPasses, current_task
from ramtorch_core.engine.census import Census, ChunkRow
from ramtorch_core.engine.dtypes import StreamDtypes
from ramtorch_core.engine.entrances import Entrances
from ramtorch_core.engine.follow import Follower
from ramtorch_core.engine.freshness import Freshness
from ramtorch_core.engine.inventory import Inventory
from ramtorch_core.engine.learning import Learning, explain
from ramtorch_core.engine.modules import move_buffers
from ramtorch_core.engine.observe import Observer, is_compiled
from ramtorch_core.engine.optimizer_hook import tell_of_steps
from ramtorch_core.engine.out_of_memory import add_advice, advise_streaming
from ramtorch_core.engine.saved import end_checkpoints
from ramtorch_core.engine.update_places import UpdateSpec
from ramtorch_core.engine.updates import Updates
from ramtorch_core.engine.visits import Activations, Visits
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.weights import WeightGroup, separate
from ramtorch_core.memory.window import Window
from ramtorch_core.plan.itinerary import Itinerary

log = logging.getLogger(__name__)


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
        overlapped: whether `updates` will take them, instead of publishing all (counted likewise).
        host_memory: bytes of host memory that may be used; by default what the system reports as available.
        kernel: of overlapped updates on the host: the compiled one where it applies, or the optimizers' own code.
        updates: which chunks overlapped updates step on the device.
        poison: fill slots with NaN before each copy; for tests.

    Attributes:
        gradients: what backward has left and not yet published.
        updates: steps optimizers while backward goes on.
        closed: the tree is plain again.
        tuning: who chooses its knobs, or None.
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
        overlapped: bool = False,
        host_memory: int | None = None,
        kernel: Literal["auto", "torch"] = "auto",
        updates: UpdateSpec = "host",
        poison: bool = False,
    ) -> None:
        self.root, self.device = root, device
        self.dtypes = dtypes or StreamDtypes()
        self.closed = False
        self.tuning: object | None = None
        self.gradients = Gradients(device)
        self.updates = Updates(device, self.gradients, kernel, updates)
        self._freshness = Freshness(self.updates)
        self._backwards = BackwardPasses(self.gradients, self.updates)
        self._inventory = Inventory(
            root,
            chunks,
            device,
            self.dtypes,
            resident=resident,
            resident_below=resident_below,
            slots=window,
            poison=poison,
            collector=self._backwards,
            masters=self._freshness,
        )
        self._host_memory, self._training = host_memory, training
        self.check_host_memory(overlapped=overlapped)
        self._visits = Visits(self._inventory, self._backwards, activations)
        self._backwards.inventory = self.updates.inventory = self._inventory
        self.updates.place()
        self._backwards.visit_over = self._visits.close_backward
        self._backwards.finished, self._backwards.failed = self._finish_backward, self._abandon
        self._depth, self._lending = 0, False  # scopes, one inside another
        self._compiled = False  # a part of the tree, in the step under way
        self._learning = Learning(device.torch, self._visits.exact_weight, self.dtypes)
        learn = self._learning.first_visit
        self._entrances = Entrances(self, self._inventory, self._visits, self.updates.watching.pause, learn)
        self._step_hook = tell_of_steps(weakref.ref(self))
        weakref.finalize(self, self._step_hook.remove)
        weakref.finalize(self, self.updates.updater.close)
        weakref.finalize(self, self.updates.on_device.close)
        try:
            self._inventory.place_residents(device.torch)
            move_buffers(root, device.torch)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ what there is

    @property
    def census(self) -> Census:
        """Every parameter and where it is."""
        return self._inventory.census

    @property
    def groups(self) -> list[WeightGroup]:
        """The streamed groups, in the order of their chunks."""
        return self._inventory.groups

    @property
    def window(self) -> Window:
        """The slots, once they are built."""
        return self._inventory.window

    @property
    def follower(self) -> Follower:
        """The visits and transfers of the step under way, once slots are built."""
        return self._inventory.follower

    @property
    def conservative(self) -> bool:
        """Before each step, take every master as written, because a write through `.data` leaves no trace.

        Costs one cast of each half-precision shadow per step. Without it, version counters, optimizers and samples of
        the values decide; `invalidate` tells of other writes.
        """
        return self._freshness.conservative

    @conservative.setter
    def conservative(self, value: bool) -> None:
        self._freshness.conservative = value

    @property
    def last_itinerary(self) -> Itinerary:
        """The visits of the last step; none before the first."""
        return self._inventory.follower.last[0] if self._inventory.built else ()

    def chunk_table(self) -> list[ChunkRow]:
        """What streams and what stays, and why."""
        return self._inventory.rows()

    def device_weight_bytes(self) -> int:
        """Bytes of weights on the device: slots, resident chunks, and the copies that stay."""
        return self._inventory.device_weight_bytes()

    def never_visited(self) -> list[str]:
        """Names of streamed chunks whose forward has not been called."""
        return self._inventory.never_visited()

    def check_host_memory(self, *, overlapped: bool, held: bool = False) -> None:
        """Refuse what the host cannot hold.

        Args:
            overlapped: gradients go to updates, which are, with `held`, those of the whole model at once.

        Raises:
            HostMemoryError: shadows (unless they exist already) and gradients need more than there is.
        """
        self._inventory.check_host_memory(self._host_memory, training=self._training, overlapped=overlapped, held=held)

    def prepare(self) -> None:
        """Allocate arenas and slots now, for the autocast state of the caller, instead of at the first visit.

        Raises:
            HostMemoryError: the system refuses the memory.
        """
        self._build(self._visits.ambient())

    # ------------------------------------------------------------------ scopes and steps

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Run code that uses the model: inside, every tensor outside of the chunks is on the device.

        `root.forward` opens one by itself; open one around code that reads parameters of `root` directly.
        """
        if self.closed:
            yield
            return
        outermost, observing = self._depth == 0, None
        if outermost:
            observing = self._begin_scope()
        elif self._freshness.suspect:
            self.new_epoch()
        self._depth += 1
        failed = True
        try:
            with self.updates.watching.watch(compiled=self._compiled) if outermost else contextlib.nullcontext():
                yield
            failed = False
        except BaseException as error:
            end_checkpoints(error)
            if isinstance(error, RuntimeError):
                explain(error, self.never_visited())
                add_advice(error, partial(advise_streaming, self))
            raise
        finally:
            self._depth -= 1
            if outermost:
                self._end_scope(observing, failed)

    @contextlib.contextmanager
    def together(self, backwards: int | None = None, *, spill: bool = False) -> Iterator[None]:
        """Several forwards and backwards, in any order of their visits, that are one step.

        Their gradients add up on the device, and leave it once.

        Args:
            backwards: that visit each chunk, after which its gradients leave; by default they stay until the end.
            spill: they leave after each backward, and come back in pieces to be added to: for microbatches one
                behind the other, whose gradients the device cannot hold.
        """
        with self.scope():
            self._backwards.begin_together(backwards, spill=spill)
            try:
                yield
                self.finish_together()
            except BaseException:
                self.abandon()
                raise

    def finish_together(self) -> None:
        """The last backward of `together` is over: publish gradients now. Idempotent."""
        if self._backwards.together:
            with torch._C.DisableTorchFunction():
                self._backwards.end_together()

    def begin_lending(self) -> None:
        """Around a backward, until `end_lending`: modules compute with device tensors, and no step begins or ends."""
        if not self._lending and not self.closed:
            self._lending = True
            self._inventory.rest.enter()

    def end_lending(self) -> None:
        """Undo `begin_lending`. Idempotent; an error in the step has the same effect."""
        if self._lending:
            self._inventory.rest.take_writes(compare=True)  # nothing is under way on the device
            self._stop_lending()

    def _stop_lending(self) -> None:
        if self._lending:
            self._lending = False
            self._inventory.rest.leave()

    def _begin_scope(self) -> Observer | None:
        inventory = self._inventory
        self._backwards.settle()
        if current_task() != -1:
            if not inventory.built or (self._backwards.open == 0 and not self.follower.visits):
                self._begin_step()  # inside of a backward that is not ours
            self._backwards.enter()
        elif self._backwards.open == 0:
            if inventory.built and self.follower.visits and not self._visits.graphs:
                self.follower.finish_step()  # a forward whose graph died without a backward
            if not inventory.built or not self.follower.visits:
                self._begin_step()
            else:
                inventory.rest.refresh()
        inventory.rest.enter()
        observer = self._visits.observing = self._learning.observer()
        if observer is not None:
            observer.__enter__()  # type: ignore[no-untyped-call]
        return observer

    def _end_scope(self, observing: Observer | None, failed: bool) -> None:
        inventory, outside = self._inventory, current_task() == -1
        if observing is not None:
            observing.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._visits.observing = None
        inventory.rest.leave()
        if outside and self._backwards.open == 0 and inventory.built:
            if failed:
                self._visits.graphs.clear()
                self.follower.abandon_step()
            elif not self._visits.graphs:
                self._finish_step()
        inventory.let_host_write()
        if outside and inventory.built and not self.conservative and not torch.is_grad_enabled():
            self.follower.prefetch()

    def _begin_step(self) -> None:
        ambient = self.dtypes.at_beginning(self._visits.ambient())
        self._stop_lending()
        strays = self._learning.strays()
        if strays or self._inventory.moved():
            self._inventory.stray |= strays
            self._start_over()
        built = self._inventory.built
        if not built or (ambient is not None and ambient != self.dtypes.compute) or self.dtypes.changed:
            self.dtypes.changed = False
            if ambient != self.dtypes.compute:
                self._learning.forget()
            self._build(ambient if ambient is not None or not built else self.dtypes.compute)
        self.new_epoch()
        self._compiled = is_compiled(self.root)
        self._learning.begin_step(self.groups, compiled=self._compiled)

    def _finish_step(self) -> None:
        self.follower.finish_step()
        self._learning.finish_step()

    def _finish_backward(self) -> None:
        self._visits.graphs.clear()
        self._finish_step()
        self._inventory.let_host_write()

    def abandon(self) -> None:
        """A step failed: drop what it left, so that the next one works."""
        if not self.closed:
            self._backwards.settle()
            self._abandon()

    def _abandon(self) -> None:
        if self.closed:
            return
        self._visits.close_backward()
        self._stop_lending()
        self._backwards.abandon()
        self._visits.graphs.clear()
        if self._inventory.built:
            self.follower.abandon_step()

    def _build(self, compute_dtype: torch.dtype | None) -> None:
        self.updates.forget()
        self.dtypes.compute = compute_dtype
        for group in self._inventory.build():
            self._freshness.built(group)
        self.updates.place()

    # ------------------------------------------------------------------ masters

    def refresh(self) -> None:
        """Bring shadows up to date with written masters now, and begin the copies that the next step needs first.

        Does nothing while `conservative`: then they are brought up to date before their next use in any case.
        """
        if self._inventory.built and not self.closed and not self.conservative:
            for group in self.groups:
                if not self.updates.is_pending(group) and group.refresh():
                    self.window.forget(group)
            self.follower.prefetch()

    def invalidate(self) -> None:
        """Masters may have been written through `.data`, which cannot be seen: cast and copy all of them again."""
        self._freshness.invalidate()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: its parameters were written, though fused kernels do not count versions."""
        ours = [p for group in optimizer.param_groups for p in group["params"] if p in self._inventory.weights]
        if not ours:
            return  # another model's, or a part of a step: some optimizers call the step of their base class
        taken = self.updates.taken()
        for parameter in ours:
            if parameter.grad is not None or parameter not in taken:
                self._inventory.weights[parameter].touch()
        self.updates.stepped(optimizer)
        if not self.updates.run_on:
            self.updates.wait()
        if self._depth:
            with torch._C.DisableTorchFunction():
                self._inventory.rest.refresh()
            self.invalidate()

    @property
    def nested(self) -> bool:
        """Whether a scope is open inside another one."""
        return self._depth > 1

    def new_epoch(self) -> None:
        """User code ran: masters may have been written, in ways that can be seen or not."""
        self._freshness.advance()
        with torch._C.DisableTorchFunction():
            if not self.device.fake:
                separate(self._inventory.everything)
            self._inventory.rest.refresh(force=True)

    # ------------------------------------------------------------------ another tree, the end

    def _start_over(self) -> None:
        """The tree holds other parameters than before, or they are used in another way: divide it anew."""
        self.updates.forget()
        self._inventory.release()
        for group in self._inventory.everything:
            self.gradients.forget(group)
        self._inventory.place_residents(torch.device("cpu"))
        self._inventory.divide()
        self._inventory.place_residents(self.device.torch)
        self._freshness.forget()
        self._learning.forget()
        self._entrances.divided()

    def close(self) -> None:
        """Detach: wait for the device, bring everything back to the host, and leave a plain module. Idempotent."""
        if self.closed:
            return
        try:
            self.updates.wait()
        except Exception:
            log.exception("an update failed: the weights of its chunk are those of before")
        try:
            self.abandon()
        finally:  # also if the device has failed, and every call to it raises
            self.updates.close()
            self.closed = self._backwards.closed = True
            self._step_hook.remove()
            self._entrances.remove()
        self._inventory.release()
        self.gradients.release()
        self._inventory.place_residents(torch.device("cpu"))
        move_buffers(self.root, torch.device("cpu"))

"""Backward passes: each begins with the first sign of it, and ends with autograd's callback, or with its death."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ramtorch_core.engine.lend import Loan
from ramtorch_core.errors import RamtorchError
from ramtorch_core.memory.gradients import Gradients
from ramtorch_core.memory.weights import Weight, WeightGroup

if TYPE_CHECKING:
    from ramtorch_core.engine.inventory import Inventory
    from ramtorch_core.engine.updates import Updates


LONGEST = 10.0
"""Seconds to wait for the end of a backward that has failed: that of one node, in autograd's thread of the device."""


def current_task() -> int:
    """The identifier of the backward that runs in this thread, -1 outside of any."""
    return int(torch._C._current_graph_task_id())


class BackwardTask:
    """A graph task of autograd that this engine takes part in.

    Autograd alone owns it: when the backward fails, autograd drops its callbacks, and `abandon` is called instead of
    `finish`.

    Attributes:
        pending: gradients of groups that were visited several times, summed on the device until the last visit.
    """

    def __init__(self, finish: Callable[[BackwardTask], None], abandon: Callable[[], None]) -> None:
        self._finish, self._abandon = finish, abandon
        self.pending: dict[WeightGroup, dict[Weight, Tensor]] = {}
        self._open = True
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self)

    def __call__(self) -> None:
        """Autograd's final callback."""
        if self._open:
            self._open = False
            self._finish(self)

    def cancel(self) -> None:
        """The step was abandoned: the end of this task, whenever it comes, means nothing any more."""
        self._open = False

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._abandon()
            self._open = False


class _Sum:
    """The gradients of a group over several backwards, in the dtypes in which plain accumulation would add them."""

    def __init__(self) -> None:
        self.backwards = 0
        self.grads: dict[Weight, Tensor] = {}
        self._owned: set[Weight] = set()

    def add(self, grads: Mapping[Weight, Tensor], earlier: Callable[[Weight], Tensor | None]) -> None:
        """Add the gradients of one more backward.

        Args:
            earlier: gives the device copy of what earlier steps have left for a weight.
        """
        self.backwards += 1
        with torch.no_grad():
            for weight, grad in grads.items():
                known = self.grads.get(weight)
                if known is None:
                    known = earlier(weight)
                    if known is None:
                        self.grads[weight] = grad
                        continue
                    self._owned.add(weight)
                elif weight not in self._owned:
                    self._owned.add(weight)
                    wide = weight.parameter.dtype if weight.parameter.dtype.itemsize >= 4 else torch.float32
                    known = known.to(wide, copy=True)
                self.grads[weight] = known.add_(grad)


class BackwardPasses:
    """The backward passes under way, one inside another at the most, and the gradients that they leave.

    Attributes:
        inventory: whose groups the gradients are of; set before the first use.
        visit_over: called when the gradients of a group have been collected.
        finished: called when the outermost pass has ended and its gradients are published.
        failed: called when a pass died of an error.
        open: how many passes are under way.
    """

    inventory: Inventory

    def __init__(self, gradients: Gradients, updates: Updates) -> None:
        self.gradients, self.updates = gradients, updates
        self.closed = False
        self.open = 0
        self.visit_over: Callable[[WeightGroup | None], None]
        self.finished: Callable[[], None]
        self.failed: Callable[[], None]
        self._tasks: weakref.WeakValueDictionary[int, BackwardTask] = weakref.WeakValueDictionary()
        self._sums: dict[WeightGroup, _Sum] | None = None  # of several backwards that are one step
        self._awaited: int | None = None
        self._spill = False
        self._dying = 0  # tasks whose ends are being dealt with, in whatever thread
        self._over = threading.Condition()

    def enter(self) -> BackwardTask | None:
        """A sign of a backward: take part in it until it ends. None outside of any.

        Raises:
            RamtorchError: the engine was closed.
        """
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
                passes = reference()
                if passes is not None:
                    passes._die()

            task = BackwardTask(self._finish, abandon)
            self._tasks[identifier] = task
            self.open += 1
            self.inventory.rest.enter()
        return task

    def collect(self, loan: Loan, grads: Sequence[Tensor | None]) -> None:
        """Backward reached a Lend node: its visit is over, its gradients leave the device.

        If the group was lent several times in one graph, they wait on the device for the last of its nodes.
        """
        try:
            self._collect(loan, grads)
        except BaseException:
            self.failed()  # now: the traceback may keep the task, whose death would tell, for long
            raise

    def _collect(self, loan: Loan, grads: Sequence[Tensor | None]) -> None:
        task = self.enter()
        group = self._group_of(loan)
        if group is None:
            _add_directly(loan, grads)
            return
        bucket = task.pending.setdefault(group, {}) if task is not None else {}
        for weight, grad in zip(loan.weights, grads, strict=True):
            if grad is not None:
                known, dtype = bucket.get(weight), weight.parameter.dtype
                bucket[weight] = grad if known is None else known.to(dtype) + grad.to(dtype)
        if not any(other.is_due() for other in self.inventory.loans.get(group, ())):
            self._pass_on(group, bucket)
        self.visit_over(group)

    @property
    def together(self) -> bool:
        """Whether the backwards under way are one step."""
        return self._sums is not None

    def begin_together(self, backwards: int | None, *, spill: bool) -> None:
        """The backwards until `end_together` are one step: their gradients add up on the device.

        Args:
            backwards: that visit each group, after which its gradients may leave; None if that is not known. There may
                be more, since a reentrant checkpoint has a backward of its own: their gradients follow one by one.
            spill: let them leave after each backward, and come back in pieces to be added to.
        """
        self._sums, self._awaited, self._spill = {}, backwards, spill

    def end_together(self) -> None:
        """All of them are over: what is left leaves the device, and gradients are published."""
        sums, self._sums = self._sums, None
        for group, total in (sums or {}).items():
            self._send(group, total.grads, whole=True)
        self._finish_outermost()

    def _pass_on(self, group: WeightGroup, bucket: dict[Weight, Tensor]) -> None:
        """The visits of a group in one backward are over: send their gradients, or add them to those of the step."""
        sums = self._sums
        if not bucket:
            return
        if sums is None or self._spill:
            self._send(group, bucket)
            return
        total = sums.setdefault(group, _Sum())
        total.add(bucket, partial(self.gradients.recall, group))
        bucket.clear()
        if self._awaited is not None and total.backwards >= self._awaited and group.index >= 0:
            self._send(group, total.grads, whole=True)  # also what comes unexpected: to the host, in its turn

    def settle(self) -> None:
        """Outside of any backward: wait for the end of one that has failed.

        Autograd raises an error as soon as it comes up, while its other threads go on with the nodes that they have
        begun: on a GPU the host's thread may have failed, in a hook on a master, and that of the device recompute.
        """
        if (self.open or self._dying) and current_task() == -1:
            with self._over:
                self._over.wait_for(lambda: not (self.open or self._dying), LONGEST)
            if self.open:
                self.failed()

    def _die(self) -> None:
        """Autograd has dropped a task that had not ended."""
        self._dying += 1
        try:
            self.failed()
        finally:
            with self._over:
                self._dying -= 1
                self._over.notify_all()

    def abandon(self) -> None:
        """Drop what the passes under way have left."""
        for task in list(self._tasks.values()):
            task.cancel()
        for _ in range(self.open):
            self.inventory.rest.leave()
        self.open = 0
        self._tasks.clear()
        self._sums = None
        self.updates.drop()
        self.gradients.drop()

    def _finish(self, task: BackwardTask) -> None:
        try:
            for group, bucket in task.pending.items():
                self._pass_on(group, bucket)
            self.open -= 1
            self.inventory.rest.leave()
            if self.open == 0:
                self.visit_over(None)
                if self._sums is None:
                    self._finish_outermost()
        except BaseException:
            self.failed()
            raise

    def _finish_outermost(self) -> None:
        self.gradients.finish()
        self.updates.backward_over()
        self.finished()

    def _send(self, group: WeightGroup, bucket: dict[Weight, Tensor], *, whole: bool = False) -> None:
        if bucket:
            self.updates.take(group, bucket, whole=whole or self.inventory.follower.forwards[group.index] == 1)
        if bucket:
            self.gradients.receive(group, [bucket.get(weight) for weight in group.weights])
            bucket.clear()

    def _group_of(self, loan: Loan) -> WeightGroup | None:
        """None for a loan from before the tree was divided anew."""
        position, groups = loan.group.index, self.inventory.groups
        group = self.inventory.rest.group if position < 0 else groups[position] if position < len(groups) else None
        return group if group is not None and loan.weights[0] in group.weights else None


def _add_directly(loan: Loan, grads: Sequence[Tensor | None]) -> None:
    """Add gradients to `.grad` at once, for a graph that is older than the present groups."""
    for weight, grad in zip(loan.weights, grads, strict=True):
        if grad is not None:
            master = weight.parameter
            host = grad.to(device=master.device, dtype=master.dtype, copy=True)
            master.grad = host if master.grad is None else master.grad.add_(host)

"""The updater: steps each group of weights as soon as its gradients have arrived on the host.

One thread. While backward runs, groups are updated in the order of their arrival; after it, the lowest first, because
the next forward needs it first. From `submit` until its update is finished a group belongs to the updater: nobody else
reads or writes its masters, its shadows or their state, and everybody who wants to calls `wait` before.

What is held waits for `release`, which says by what gradients are scaled. Given room for copies, the thread updates
held groups ahead of that, as if they were not scaled, and does so again if they are (`ahead.py`). Nobody sees that:
whoever waits finds what is held as it was before, and from then on it stays so until `release`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramtorch_core.errors import RamtorchError
from ramtorch_core.memory.device import Event
from ramtorch_core.memory.ranges import FOR_UPDATE, Kind, Ranges, name_thread
from ramtorch_core.memory.weights import WeightGroup
from ramtorch_core.optim.ahead import Room, Undo
from ramtorch_core.optim.compiled import AdamKernel
from ramtorch_core.optim.steps import WeightUpdate, update


@dataclass(eq=False, slots=True)
class GroupUpdate:
    """A group's part of a step.

    Attributes:
        arrived: after the copies of the gradients to the host.
        finished: called when nobody reads the gradients any more.
        held: the factor of its gradients is not known yet.
        undo: what the update overwrites, from the time before it runs ahead until it is accepted or undone.
        dropped: it has to be undone, and forgotten, when it has run.
    """

    group: WeightGroup
    updates: Sequence[WeightUpdate]
    arrived: Event
    finished: Callable[[], None]
    held: bool = False
    undo: Undo | None = None
    dropped: bool = False


class Updater:
    """Steps groups in a thread of its own, which starts with the first one.

    Args:
        threads: for the compiled kernel.
        ranges: where updates are shown and timed.
        name: of the thread.

    An error in an update is raised once, by whatever waits or submits next; updates that had not begun are forgotten.
    A process that was forked off has no such thread until it submits something, and nothing to wait for.

    Attributes:
        kernel: the compiled kernel, or None for the optimizers' own code.
        updated: groups, over the whole life.
        undone: updates that had run ahead, likewise.
        order: of the last step: indices of groups as their updates began.
    """

    def __init__(self, threads: int, ranges: Ranges, name: str = "ramtorch-updater") -> None:
        self.threads, self._ranges, self._name = threads, ranges, name
        self.kernel: AdamKernel | None = None
        self.updated = self.undone = 0
        self.order: list[int] = []
        self._changed = threading.Condition()
        self._queue: list[GroupUpdate] = []
        self._ahead: list[GroupUpdate] = []  # updated, and still held
        self._running: GroupUpdate | None = None
        self._room: Room | None = None  # for copies, as long as updates may run ahead
        self._pending: set[WeightGroup] = set()
        self._lowest_first = False
        self._scale = 1.0
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def begin(self, kernel: AdamKernel | None, room: Room | None = None) -> None:
        """A backward begins whose gradients will be submitted, to be updated with `kernel`.

        Args:
            room: for copies, so that what is held may be updated ahead.

        Raises:
            RamtorchError: updates of the one before are held.
        """
        with self._changed:
            if self._queue or self._ahead:
                raise RamtorchError(
                    "the updates of the last backward are held: call clip(), release() or the optimizer's step() "
                    "before the next one, or drop() to forget them"
                )
            self.kernel, self._room = kernel, room
            if room is not None:
                room.clear()
            self._scale = 1.0
            self._lowest_first = False
            self.order = []

    def submit(self, group_update: GroupUpdate) -> None:
        """Update this group once its gradients have arrived; if it is `held`, after the next `release`.

        Raises:
            BaseException: what went wrong in an update before; this one is forgotten.
        """
        with self._changed:
            if self._error is not None:
                _give_back(group_update)
            self._raise()
            self._pending.add(group_update.group)
            self._queue.append(group_update)
            if self._thread is None or os.getpid() != self._process:
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def backward_over(self) -> None:
        """From now on the lowest group goes first."""
        with self._changed:
            self._lowest_first = True

    def release(self, scale: float = 1.0) -> None:
        """Let the groups that were held be updated, with every gradient times `scale`."""
        with self._changed:
            self._room, self._scale = None, scale
            ahead, self._ahead = self._ahead, []
            if scale != 1.0:
                self._queue += ahead
            for waiting in (*self._queue, self._running):
                if waiting is not None:
                    waiting.held = False
            self._changed.notify_all()
        if scale == 1.0:
            for chosen in ahead:
                self._succeed(chosen)

    def drop(self) -> None:
        """Forget the updates that have not begun, after an error in the step; wait for the one under way.

        What has run ahead is undone.

        The garbage collector may find what a failed step left in any thread, the updating one included.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            self._return_queued()
            if self._running is not None and self._running.held:
                self._running.dropped = True
            if not self._is_elsewhere():
                self._changed.wait_for(lambda: not self._pending)
            self._error = None

    def is_pending(self, group: WeightGroup) -> bool:
        """Whether the group belongs to the updater now."""
        return group in self._pending

    def wait(self, group: WeightGroup | None = None) -> None:
        """Wait until the group's update is finished; without an argument, until all are. Not for what is held.

        Of that nothing is updated ahead any more, and what was is undone.

        Raises:
            BaseException: what went wrong in an update.
        """
        if (self._pending or self._error is not None) and not self._is_elsewhere():
            with self._changed:
                self._stay_behind(group)
                with self._ranges.span(Kind.STALL, FOR_UPDATE, shown=self._under_way(group)):
                    self._changed.wait_for(lambda: self._error is not None or not self._under_way(group))
                self._raise()

    def close(self) -> None:
        """Finish what was submitted, but for what is held, and end the thread. Idempotent."""
        if os.getpid() != self._process:
            return  # the lock may be taken, for ever
        with self._changed:
            self._closed, self._room = True, None
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        if self._thread is None:
            with self._changed:
                self._return_queued()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    def _under_way(self, group: WeightGroup | None) -> bool:
        held = {waiting.group for waiting in self._queue if waiting.held}
        return bool(self._pending - held) if group is None else group in self._pending and group not in held

    def _stay_behind(self, group: WeightGroup | None) -> None:
        """Somebody wants to see the group, or everything: let nothing of it be ahead of the factor."""
        if group is not None and group not in self._pending:
            return
        self._room = None
        running = self._running
        if running is not None and running.held:
            self._changed.wait_for(lambda: self._running is not running)
        for chosen in self._ahead:
            self._undo(chosen)
        self._queue += self._ahead
        self._ahead.clear()

    def _undo(self, chosen: GroupUpdate) -> None:
        if chosen.undo is not None:
            chosen.undo.restore()
            chosen.undo = None
            self.undone += 1
            note_update(chosen)

    def _is_elsewhere(self) -> bool:
        """Whether the caller is a part of an update itself, or in a process without the thread."""
        return threading.current_thread() is self._thread or os.getpid() != self._process

    def _next(self) -> GroupUpdate | None:
        """The next group to update; waits for one. None when the updater was closed."""
        with self._changed:
            while True:
                ready = [waiting for waiting in self._queue if not waiting.held]
                if not ready and self._room is not None:
                    ready = self._queue
                if ready:
                    chosen = min(ready, key=lambda waiting: waiting.group.index) if self._lowest_first else ready[0]
                    self._queue.remove(chosen)
                    self.order.append(chosen.group.index)
                    self._running = chosen
                    return chosen
                if self._closed:
                    return None
                self._changed.wait()

    def _run(self) -> None:
        name_thread()
        while True:
            chosen = self._next()
            if chosen is None:
                return
            try:
                self._take_on(chosen)
            except BaseException as error:
                self._fail(chosen, error)
            with self._changed:
                self._running = None
                self._changed.notify_all()
            del chosen

    def _take_on(self, chosen: GroupUpdate) -> None:
        """Update this group, and `_succeed`; ahead of the factor, once that is known to be 1."""
        chosen.arrived.synchronize()
        chosen.group.copied.synchronize()  # no copy reads the shadows any more
        self._undo(chosen)
        with self._changed:
            if self._room is not None and not self._room.fits(chosen.updates):
                self._room = None
            ahead, room, scale = chosen.held, self._room, self._scale
        goes = not ahead or room is not None
        if goes:
            if ahead and room is not None:
                chosen.undo = Undo(chosen.updates, room)
            with self._ranges.span(Kind.UPDATE, chosen.group.index, host=True):
                update(chosen.updates, scale=scale, kernel=self.kernel, threads=self.threads, undo=chosen.undo)
            note_update(chosen)
        with self._changed:
            self._running = None
            self._changed.notify_all()
            if not chosen.dropped and chosen.held and chosen.undo is not None:
                self._ahead.append(chosen)
                return
            if not chosen.dropped and (not goes or (ahead and self._scale != 1.0)):
                self._queue.append(chosen)
                return
        if chosen.dropped:
            self._undo(chosen)
            self._let_go(chosen)
        else:
            self._succeed(chosen)

    def _succeed(self, chosen: GroupUpdate) -> None:
        """The group's update is finished."""
        chosen.undo = None
        with self._changed:
            self.updated += 1
        self._let_go(chosen)

    def _fail(self, chosen: GroupUpdate, error: BaseException) -> None:
        """The group's update has failed."""
        with self._changed:
            self._error = error
            self._return_queued()
            self._undo(chosen)
        self._let_go(chosen)

    def _let_go(self, chosen: GroupUpdate) -> None:
        chosen.finished()
        with self._changed:
            self._pending.discard(chosen.group)
            self._changed.notify_all()

    def _return_queued(self) -> None:
        """Forget what has not begun, or has run ahead."""
        self._room = None
        for dropped in (*self._queue, *self._ahead):
            self._undo(dropped)
            self._pending.discard(dropped.group)
            _give_back(dropped)
        self._queue.clear()
        self._ahead.clear()


def _give_back(forgotten: GroupUpdate) -> None:
    """The gradients of an update that will not be made, once they have arrived."""
    with contextlib.suppress(RuntimeError):  # a device that has failed makes no copies, and was reported
        forgotten.arrived.synchronize()
    forgotten.finished()


def note_update(done: GroupUpdate) -> None:
    """The group's masters and shadows are up to date with each other."""
    for each in done.updates:
        weight = each.weight
        if weight.own_shadow and weight.parameter.data_ptr() != weight.shadow.data_ptr():
            weight.touch()  # user code pointed it at other memory, which has yet to be brought home
        else:
            weight.note(sample=done.group.sampled)


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

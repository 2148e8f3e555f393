"""The updater: steps each group of weights as soon as its gradients have arrived on the host.

One thread. While backward runs, groups are updated in the order of their arrival; after it, the lowest first, because
the next forward needs it first. From `submit` until its update is finished a group belongs to the updater: nobody else
reads or writes its masters, its shadows or their state, and everybody who wants to calls `wait` before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramtorch_core.memory.device import Event
from ramtorch_core.memory.weights import WeightGroup
from ramtorch_core.optim.compiled import AdamKernel
from ramtorch_core.optim.steps import WeightUpdate, update


@dataclass(eq=False, slots=True)
class GroupUpdate:
    """A group's part of a step.

    Attributes:
        arrived: after the copies of the gradients to the host.
        finished: called in the updating thread when nobody reads the gradients any more.
    """

    group: WeightGroup
    updates: Sequence[WeightUpdate]
    arrived: Event
    finished: Callable[[], None]
    held: bool = False


class Updater:
    """Steps groups in a thread of its own, which starts with the first one.

    Args:
        threads: for the compiled kernel.

    Attributes:
        kernel: the compiled kernel, or None for the optimizers' own code.
        updated: groups, over the whole life.
        order: of the last step: indices of groups as their updates began.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.kernel: AdamKernel | None = None
        self.updated = 0
        self.order: list[int] = []
        self._changed = threading.Condition()
        self._queue: list[GroupUpdate] = []
        self._pending: set[WeightGroup] = set()
        self._lowest_first = False
        self._scale = 1.0
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, kernel: AdamKernel | None) -> None:
        """A backward begins whose gradients will be submitted, to be updated with `kernel`."""
        with self._changed:
            self.kernel = kernel
            self._scale = 1.0
            self._lowest_first = False
            self.order = []

    def submit(self, group_update: GroupUpdate) -> None:
        """Update this group once its gradients have arrived; if it is `held`, after the next `release`."""
        with self._changed:
            self._raise()
            self._pending.add(group_update.group)
            self._queue.append(group_update)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ramtorch-updater", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def backward_over(self) -> None:
        """From now on the lowest group goes first."""
        with self._changed:
            self._lowest_first = True

    def release(self, scale: float = 1.0) -> None:
        """Let the groups that were held be updated, with every gradient times `scale`."""
        with self._changed:
            for waiting in self._queue:
                waiting.held = False
            self._scale = scale
            self._changed.notify_all()

    def drop(self) -> None:
        """Forget the updates that have not begun, after an error in the step; wait for the one under way."""
        with self._changed:
            self._return_queued()
            self._changed.wait_for(lambda: not self._pending)
            self._error = None

    def is_pending(self, group: WeightGroup) -> bool:
        """Whether the group belongs to the updater now."""
        return group in self._pending

    def wait(self, group: WeightGroup | None = None) -> None:
        """Wait until the group's update is finished; without an argument, until all are.

        Raises:
            BaseException: what went wrong in an update.
        """
        if self._pending or self._error is not None:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._error is not None or (not self._pending if group is None else group not in self._pending)
                    )
                )
                self._raise()

    def close(self) -> None:
        """Finish what was submitted and end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _next(self) -> GroupUpdate | None:
        """The next group to update; waits for one. None when the updater was closed."""
        with self._changed:
            while True:
                ready = [waiting for waiting in self._queue if not waiting.held]
                if ready:
                    chosen = min(ready, key=lambda waiting: waiting.group.index) if self._lowest_first else ready[0]
                    self._queue.remove(chosen)
                    self.order.append(chosen.group.index)
                    return chosen
                if self._closed:
                    return None
                self._changed.wait()

    def _run(self) -> None:
        while True:
            chosen = self._next()
            if chosen is None:
                return
            try:
                self._update(chosen)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._return_queued()
            chosen.finished()
            with self._changed:
                self.updated += 1
                self._pending.discard(chosen.group)
                self._changed.notify_all()
            del chosen

    def _update(self, chosen: GroupUpdate) -> None:
        chosen.arrived.synchronize()
        chosen.group.copied.synchronize()  # no copy reads the shadows any more
        update(chosen.updates, scale=self._scale, kernel=self.kernel, threads=self.threads)
        for each in chosen.updates:
            each.weight.note(sample=chosen.group.sampled)

    def _return_queued(self) -> None:
        for dropped in self._queue:
            self._pending.discard(dropped.group)
            dropped.arrived.synchronize()
            dropped.finished()
        self._queue.clear()

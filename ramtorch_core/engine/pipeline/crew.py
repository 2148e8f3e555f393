"""Worker threads that outlive the steps.

A thread that launches GPU work pays for library handles on every device it touches, about 0.1 s each, so starting
new ones for every step would cost more than the step.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ramtorch_core.memory.ranges import name_thread

__all__ = ["Crew"]

Job: TypeAlias = Callable[[], None]

INTERRUPTIBLE_AFTER = 0.5
"""Seconds: a signal that comes just before a wait begins does not end it, so waits are short."""


class _Task:
    """A job that runs at most once, in whatever thread takes it, and then lets go of it."""

    def __init__(self, job: Job) -> None:
        self.over = False
        self._job: Job | None = job
        self._mutex = threading.Lock()
        self._going = threading.Lock()
        self._going.acquire()

    def run(self) -> None:
        """Run the job, unless it was cancelled."""
        job = self._take()
        if job is not None:
            try:
                job()
            finally:
                del job  # nothing of a step may live on in an idle thread
                self._end()

    def cancel(self) -> None:
        """A job that has not begun never will."""
        if self._take() is not None:
            self._end()

    def wait(self) -> None:
        """Until the job has ended, or never will begin."""
        while not self.over:
            self._going.acquire(timeout=INTERRUPTIBLE_AFTER)

    def _end(self) -> None:
        self.over = True
        self._going.release()

    def _take(self) -> Job | None:
        with self._mutex:
            job, self._job = self._job, None
        return job


class Crew:
    """Runs jobs side by side on named threads; starts as many threads as the largest call needs.

    The threads hold nothing of the owner between calls, so that it can be collected; they end with `close()`, with the
    collection of the crew, or at the end of the process.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _dismiss, self._tasks, self._threads)

    def run(self, jobs: Sequence[Job], interrupt: Callable[[BaseException], None]) -> None:
        """Run all `jobs`, which must not raise, and return when the last has ended.

        When this is interrupted (Ctrl-C), `interrupt` gets the exception and must make the jobs end; the exception is
        raised after they have. It may come between any two instructions, so nothing is counted here.
        """
        tasks = [_Task(job) for job in jobs]
        del jobs
        try:
            self._threads[:] = [thread for thread in self._threads if thread.ident is not None]
            while len(self._threads) < len(tasks):
                name = f"{self.name}-{len(self._threads)}"
                thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            for task in tasks:
                self._tasks.put(task)
            for task in reversed(tasks):  # the last often ends last: one wait for all
                task.wait()
        except BaseException as interruption:
            interrupt(interruption)
            for task in tasks:
                task.cancel()
            for task in tasks:
                task.wait()
            raise

    def close(self) -> None:
        """End and join all threads. Idempotent; a later `run` starts new ones."""
        _dismiss(self._tasks, self._threads)


def _work(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    name_thread()
    while (task := tasks.get()) is not None:
        try:
            task.run()
        finally:
            del task


def _dismiss(tasks: "queue.SimpleQueue[_Task | None]", threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join()
    threads.clear()

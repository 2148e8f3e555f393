"""Worker threads that outlive the steps.

A thread that launches GPU work pays for library handles on every device it touches, about 0.1 s each, so starting
new ones for every step would cost more than the step.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

__all__ = ["Crew"]

Job: TypeAlias = Callable[[], None]


class Crew:
    """Runs jobs side by side on named threads; starts as many threads as the largest call needs.

    The threads hold nothing of the owner between calls, so that it can be collected; they end with `close()`, with the
    collection of the crew, or at the end of the process.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _dismiss, self._jobs, self._threads)

    def run(self, jobs: Sequence[Job], interrupt: Callable[[BaseException], None]) -> None:
        """Run all `jobs`, which must not raise, and return when the last has ended.

        When the wait is interrupted (Ctrl-C), `interrupt` gets the exception and must make the jobs end; the exception
        is raised after they have.
        """
        while len(self._threads) < len(jobs):
            thread = threading.Thread(
                target=_work, args=(self._jobs, self._done), name=f"{self.name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        for job in jobs:
            self._jobs.put(job)
        left = len(jobs)
        del jobs
        try:
            while left:
                self._done.get()
                left -= 1
        except BaseException as interruption:
            interrupt(interruption)
            while left:
                self._done.get()
                left -= 1
            raise

    def close(self) -> None:
        """End and join all threads. Idempotent; a later `run` starts new ones."""
        _dismiss(self._jobs, self._threads)


def _work(jobs: "queue.SimpleQueue[Job | None]", done: "queue.SimpleQueue[None]") -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        finally:
            del job  # nothing of a step may live on in an idle thread
            done.put(None)


def _dismiss(jobs: "queue.SimpleQueue[Job | None]", threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    threads.clear()

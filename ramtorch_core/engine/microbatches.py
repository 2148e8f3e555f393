"""Several microbatches as one step on one streamed device, all of them through a chunk before the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ramtorch_core.engine.pipeline.executor import Executor, StepResult
from ramtorch_core.engine.pipeline.kept import Kept
from ramtorch_core.engine.pipeline.stages import StageMap
from ramtorch_core.engine.pipeline.step import Root
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.errors import RamtorchError, StageOrderError
from ramtorch_core.plan.itinerary import Direction, Itinerary
from ramtorch_core.plan.schedule import chunk_major, sequential

log = logging.getLogger(__name__)

__all__ = ["MicrobatchRunner", "order_of_chunks"]


class MicrobatchRunner:
    """Steps of a streamed module, each of several microbatches, until `close`.

    The graph is cut at the chunks, so that weights cross the bus once per pass instead of once per microbatch, and
    gradients add up on the device and leave it once. For this every chunk has to be called once per microbatch, always
    in one order: that of the last forward, or at first that of registration. Where the first step shows that it is not,
    one microbatch runs after the other, and the log says so. That step itself takes them one after the other, to see
    what modules keep of a microbatch from one chunk to the next.

    Args:
        streamer: attached to the module.
        begin_updates: called before the first backward whose gradients are those of the whole step; it may begin
            overlapped updates.
        end_updates: called after the last backward.
        aside: submodules for which it is true count over all microbatches, whatever they keep (metrics, for example).
    """

    def __init__(
        self,
        streamer: Streamer,
        begin_updates: Callable[[], None] = lambda: None,
        end_updates: Callable[[], None] = lambda: None,
        aside: Callable[[nn.Module], bool] = lambda module: False,
    ) -> None:
        self._streamer, self._begin_updates, self._end_updates = streamer, begin_updates, end_updates
        self._executor: Executor | None = None
        self._kept, self._aside = Kept(streamer.root, aside), aside
        self._known: list[str] = []  # names of chunks in the order in which they are called
        self._apart = False  # one microbatch runs after the other

    def train(
        self,
        function: Callable[[Any], Any],
        inputs: Sequence[Any],
        root: Root,
        *,
        accumulate: bool = False,
        step: int = 0,
    ) -> StepResult:
        """Forward and backward of all microbatches; see `Executor.run`. `.grad` of what is updated already is None."""
        updates = self._streamer.updates
        try:
            result = self._train(function, inputs, root, accumulate, step)
            for parameter in updates.taken() if updates.overlapping else ():
                parameter.grad = None
        finally:
            self._end_updates()
        return result

    def _train(
        self, function: Callable[[Any], Any], inputs: Sequence[Any], root: Root, accumulate: bool, step: int
    ) -> StepResult:
        if self._executor is not None and self._executor.stages.outdated():
            self.cut_anew()
        first, executor = self._executor is None, self._executor
        if executor is None:
            executor = self._executor = self._cut(() if self._apart else self._order())
        buffers = [(buffer, buffer.clone()) for buffer in self._streamer.root.buffers()] if first else []
        stages = executor.stages.count
        if stages == 1:
            return self._one_by_one(executor, function, inputs, root, accumulate, step)
        try:
            whole, plan = self._streamer.together(len(inputs)), chunk_major(stages, len(inputs))
            with self._kept.step(plan, training=True) as (chosen, keeping), whole:
                more: dict[str, Any] = {"accumulate": accumulate, "step": step, "keeping": keeping}
                finish, begins = self._streamer.finish_together, self._beginning(root, 0)
                return executor.run(function, inputs, chosen, begins, finish=finish, **more)
        except StageOrderError as error:
            if not first:
                raise RamtorchError(
                    f"chunk '{error.module}' was called twice or out of turn, unlike in the steps before, while "
                    f"microbatches go through one chunk after the other: pass n_microbatches=1, or make the module "
                    f"around the calls that vary one chunk (chunks=[...])"
                ) from error
            log.warning(
                "microbatches run one after the other, so weights cross for each of them: chunk '%s' is called twice, "
                "in another order than it is registered in, or in a checkpoint around several chunks",
                error.module,
            )
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        executor.close()
        self._executor = self._cut(())
        return self._one_by_one(self._executor, function, inputs, root, accumulate, step)

    def evaluate(self, function: Callable[[Any], Any], inputs: Sequence[Any], *, step: int = 0) -> list[Any]:
        """The outputs of `function` for all microbatches, one after the other, without backward."""
        with self._streamer.scope():
            return [function(data) for data in inputs]

    def cut_anew(self) -> None:
        """Other chunks stream than before, or the tree has other modules; between two steps."""
        self._apart |= self._executor is not None and self._executor.stages.count == 1
        self._kept = Kept(self._streamer.root, self._aside)
        self.close()

    def close(self) -> None:
        """Remove the hooks and end the threads. Idempotent."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _one_by_one(
        self,
        executor: Executor,
        function: Callable[[Any], Any],
        inputs: Sequence[Any],
        root: Root,
        accumulate: bool,
        step: int,
    ) -> StepResult:
        with self._streamer.scope():
            plan, begins = sequential(1, len(inputs)), self._beginning(root, len(inputs) - 1)
            return executor.run(function, inputs, plan, begins, accumulate=accumulate, step=step)

    def _beginning(self, root: Root, first: int) -> Root:
        """`root`, which tells before the backward of microbatch `first` that updates may begin."""

        def begins(output: Any, microbatch: int) -> Any:
            if microbatch == first:
                self._begin_updates()
            return root(output, microbatch)

        return begins

    def _order(self) -> list[tuple[str, nn.Module]]:
        """The chunks in the order in which they are called."""
        streamer = self._streamer
        chunks = [chunk for chunk in streamer.census.chunks if chunk.group is not None]
        order = order_of_chunks(streamer.last_itinerary)
        if order is not None and len(order) == len(chunks):
            chunks = [chunks[index] for index in order]
            self._known = [chunk.name for chunk in chunks]
        elif self._known:
            chunks.sort(key=lambda chunk: self._known.index(chunk.name) if chunk.name in self._known else chunk.index)
        return [(chunk.name, chunk.module) for chunk in chunks]

    def _cut(self, entries: Sequence[tuple[str, nn.Module]]) -> Executor:
        stages = StageMap(self._streamer.root, tuple(entries))
        weights = [weight for group in self._streamer.groups for weight in group.weights]
        for weight in (*weights, *self._streamer.census.copies):  # leaves resident chunks' parameters, and buffers
            stages.homes.pop(id(weight.parameter), None)
        return Executor(stages, [self._streamer.device] * stages.count, recompute_across=False)


def order_of_chunks(itinerary: Itinerary) -> tuple[int, ...] | None:
    """The order in which a step called every chunk once; None if it called one more often."""
    forward = [visit.chunk for visit in itinerary if visit.direction is Direction.FORWARD]
    return tuple(forward) if forward and len(set(forward)) == len(forward) else None

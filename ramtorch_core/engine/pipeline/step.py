"""One step: the drivers that take the microbatches through the stages."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ramtorch_core.engine.pipeline.deferred import Deferral
from ramtorch_core.engine.pipeline.dice import Dice
from ramtorch_core.engine.pipeline.frontier import Aside, Frontier
from ramtorch_core.engine.pipeline.kept import Keeping
from ramtorch_core.engine.pipeline.links import Links
from ramtorch_core.engine.pipeline.loans import Loans
from ramtorch_core.engine.pipeline.microbatch import Microbatch
from ramtorch_core.engine.pipeline.thread_state import engine_backward, outside_autocast
from ramtorch_core.engine.pipeline.trees import map_tensors, tensors_in
from ramtorch_core.engine.pipeline.turnstile import Aborted, Turnstile
from ramtorch_core.engine.saved import end_checkpoints
from ramtorch_core.errors import RamtorchError, StageOrderError
from ramtorch_core.memory.device import Device, Event
from ramtorch_core.plan.schedule import Op

__all__ = ["Root", "Step", "current_step", "out_of_order"]

Gradient: TypeAlias = Tensor | float | None
"""A tensor; for a scalar also a number, or None for one."""

Roots: TypeAlias = list[tuple[Tensor, Gradient]]
"""Tensors from which backward starts, each with its gradient."""

Root: TypeAlias = Callable[[Any, int], tuple[Tensor, Gradient] | Roots | None]
"""(output of the function, microbatch) -> where its backward starts: one pair, several, or nowhere."""

_driving = threading.local()


def current_step() -> "tuple[Step, Microbatch] | None":
    """The step and the microbatch that the calling thread drives, if any."""
    return getattr(_driving, "current", None)


class Step:
    """The shared state of the drivers of one step.

    The turnstile lets user code run in one driver at a time.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        inputs: Sequence[Any],
        root: Root | None,
        turnstile: Turnstile,
        devices: list[Device],
        links: Links,
        homes: dict[int, int],
        owned: Sequence[frozenset[int]],
        dice: Dice,
        deferrable: frozenset[int] | None = None,
        strict: bool = True,
        keeping: Keeping | None = None,
    ) -> None:
        self.function = function
        self.inputs: list[Any] = list(inputs)
        self.root = root
        self.turnstile = turnstile
        self.devices = devices
        self.links = links
        self.homes = homes
        self.owned = owned if deferrable is None else [mine - deferrable for mine in owned]
        self.dice = dice
        self.deferrable = deferrable
        self.strict, self.keeping = strict, keeping
        self.deferred: dict[tuple[int, int], Deferral] = {}
        self.outputs: list[Any] = [None] * len(self.inputs)
        self.ready: dict[torch.device, Event] = {device.torch: device.record() for device in devices}
        self.loans = Loans(homes, devices, links, self.ready, deferrable is not None)
        self.anchor = torch.empty(0, device="cpu", requires_grad=True)
        self._several_devices = len(self.ready) > 1
        self._remaining = iter(range(len(self.inputs)))
        self._mutex = threading.Lock()

    def drive(self, forwards_first: bool = False) -> None:
        """Take microbatch after microbatch through the stages, until none is left; errors end the step.

        Args:
            forwards_first: begin no backward before all forwards have ended.
        """
        begun: list[tuple[Microbatch, Roots, Frontier]] = []
        try:
            while (m := self._next()) is not None:
                begun.append(self._go(m))
                if not forwards_first:
                    self._return(*begun.pop())
            while begun:
                self._return(*begun.pop(0))
            self.turnstile.rest()
        except Aborted:
            pass
        except BaseException as error:
            end_checkpoints(error)
            self.turnstile.abort(error)
        finally:
            _driving.current = None

    def weigh(self, ops: Sequence[Op]) -> None:
        """Run the W ops among `ops`, one device's lane."""
        try:
            for op in ops:
                if op.kind == "W":
                    self.turnstile.enter("W", op.stage, op.microbatch)
                    self.devices[op.stage].activate()
                    with outside_autocast():
                        self.deferred.pop((op.stage, op.microbatch)).finish()
                    self.turnstile.leave("W", op.stage, op.microbatch)
            self.turnstile.rest()
        except Aborted:
            pass
        except BaseException as error:
            self.turnstile.abort(error)

    def enter_stage(self, microbatch: Microbatch, stage: int, name: str, arguments: Any) -> Any:
        """A module that begins `stage` is called: pass the turn on, wait for the next one, bring the arguments in.

        Out of turn it runs in the current stage, unless that is an error.
        """
        with Aside():
            late = stage <= microbatch.stage
            if late and self.strict and not microbatch.in_backward:
                raise StageOrderError(name, out_of_order(name, stage, microbatch.stage))
            if not late and not microbatch.in_backward:  # else a recompute of a region that spans stages
                microbatch.end()
                if self._several_devices:
                    microbatch.prefetch(tensors_in(arguments), stage)
                if self.keeping is not None:
                    self.keeping.end(microbatch.index, microbatch.stage, over=False)
                self._pass_on(microbatch, stage)
            args, kwargs = arguments
            return map_tensors(microbatch.admit, args), map_tensors(microbatch.admit, kwargs) if kwargs else kwargs

    def _next(self) -> int | None:
        with self._mutex:
            return next(self._remaining, None)

    def _go(self, m: int) -> tuple[Microbatch, Roots, Frontier]:
        """The forward of a microbatch; returns what its backward takes."""
        data, self.inputs[m] = self.inputs[m], None
        known = set(map(id, tensors_in(data))) if self._several_devices else set()
        microbatch = Microbatch(
            m,
            self.devices,
            self.links,
            self.loans,
            self.homes,
            self.owned,
            known,
            self.ready,
            self.anchor,
            self.deferrable,
        )
        _driving.current = (self, microbatch)
        torch.clear_autocast_cache()  # as between the microbatches of plain accumulation
        frontier = Frontier(microbatch, self._several_devices)
        roots = self._forward(microbatch, data, frontier)
        del data
        microbatch.end_forward()
        _driving.current = None
        return microbatch, roots, frontier

    def _return(self, microbatch: Microbatch, roots: Roots, frontier: Frontier) -> None:
        """Its backward, if there is one."""
        m = microbatch.index
        _driving.current = (self, microbatch)
        if self.root is not None:
            self.turnstile.enter("B", last := len(self.devices) - 1, m)
            for stage in range(last, -1, -1):
                if stage < last:
                    self.turnstile.enter("B", stage, m, after=stage + 1)
                self._backward(microbatch, stage, roots, frontier)
            self.turnstile.leave("B", 0, m)
        _driving.current = None

    def _forward(self, microbatch: Microbatch, data: Any, frontier: Frontier) -> Roots:
        """Run the user's function through all stages; returns where backward begins."""
        m = microbatch.index
        if self.keeping is not None:
            self.keeping.wait(m, lambda: self.turnstile.error is not None)
        self._begin_forward(microbatch, 0)
        with frontier:
            output = self.function(data)
            root = None if self.root is None else self.root(output, m)
        pairs = root if isinstance(root, list) else [root] if root is not None else []
        roots = [(microbatch.admit(tensor), gradient) for tensor, gradient in pairs if tensor.requires_grad]
        microbatch.last = microbatch.stage
        microbatch.end()
        self.outputs[m] = output if self.root is None else map_tensors(Tensor.detach, output)
        if self.keeping is not None:
            self.keeping.end(m, microbatch.stage, over=True)
        self._pass_on(microbatch, len(self.devices))
        return roots

    def _begin_forward(self, microbatch: Microbatch, stage: int, after: int | None = None) -> None:
        self.turnstile.enter("F", stage, microbatch.index, after)
        device = self.devices[stage]
        device.activate()
        self.dice.throw(microbatch.index, stage, device)
        microbatch.begin(stage)
        if self.keeping is not None:
            self.keeping.begin(microbatch.index)

    def _pass_on(self, microbatch: Microbatch, target: int) -> None:
        """Give up the turn of the current stage and those of stages in between; begin `target`, if there is such."""
        m, running = microbatch.index, microbatch.stage
        for skipped in range(running + 1, target):
            self.turnstile.enter("F", skipped, m, after=running)
            microbatch.begin(skipped)
            microbatch.end()
            running = skipped
        if target < len(self.devices):
            self._begin_forward(microbatch, target, after=running)
        else:
            self.turnstile.leave("F", running, m)

    def _backward(self, microbatch: Microbatch, stage: int, loss: Roots, frontier: Frontier) -> None:
        m = microbatch.index
        self.devices[stage].activate()
        microbatch.resume(stage)
        roots = microbatch.owed(stage)
        if stage == microbatch.last:
            roots = [(t, g if isinstance(g, Tensor) else _filled(t, g)) for t, g in loss] + roots
            loss.clear()
        returned = self.loans.returned(stage, m, microbatch.early[stage])
        if microbatch.deferrals is not None and self.deferrable is not None:
            deferral = self.deferred[stage, m] = microbatch.deferrals[stage]
            returned = deferral.take(returned, self.deferrable)
        roots += returned
        if roots:
            _run_backward(roots, stage, frontier)
        del roots
        microbatch.settle(stage)
        self.loans.collect(stage, m, microbatch.early)


def _run_backward(roots: list[tuple[Tensor, Tensor]], stage: int, frontier: Frontier) -> None:
    """`torch.autograd.backward`, below the level at which it would switch the frontier off for hooks and recomputes."""
    tensors, gradients = zip(*roots, strict=True)
    try:
        with outside_autocast(), frontier:
            engine_backward(tensors, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise RamtorchError(
            f"stage {stage} met a part of its graph that has had its backward: either the model frees it itself, or an "
            "autograd.Function (or an extension) of a later stage got a tensor of this stage without passing through "
            "the module that begins the later stage, or from an object that all microbatches share. "
            "Pass the tensor to that module, or cut elsewhere (stages=[...])"
        ) from error


def _filled(loss: Tensor, value: float | None) -> Tensor:
    if loss.numel() != 1:
        raise RuntimeError(f"the loss must be a scalar to start a backward, but has shape {tuple(loss.shape)}")
    return torch.full_like(loss, 1.0 if value is None else value, memory_format=torch.preserve_format)


def out_of_order(name: str, stage: int, running: int) -> str:
    """What is wrong where module `name`, which begins `stage`, is entered while stage `running` runs."""
    return (
        f"module '{name}', which begins stage {stage}, was entered while stage {running} ran: each stage must be "
        "entered once per forward, in order. Cut elsewhere (stages=[...]), at modules that run once and in this order"
    )

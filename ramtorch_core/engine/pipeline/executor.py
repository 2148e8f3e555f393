"""Runs steps of one module over several devices."""

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame

from ramtorch_core.engine.pipeline.compiled import Arrive, shield
from ramtorch_core.engine.pipeline.crew import Crew
from ramtorch_core.engine.pipeline.dice import Dice
from ramtorch_core.engine.pipeline.frontier import Frontier
from ramtorch_core.engine.pipeline.kept import Keeping
from ramtorch_core.engine.pipeline.links import Links
from ramtorch_core.engine.pipeline.microbatch import Bystander
from ramtorch_core.engine.pipeline.stages import StageMap
from ramtorch_core.engine.pipeline.step import Root, Step, current_step
from ramtorch_core.engine.pipeline.thread_state import ThreadState
from ramtorch_core.engine.pipeline.trees import map_tensors
from ramtorch_core.engine.pipeline.turnstile import Order, Recorder, Turnstile
from ramtorch_core.errors import StageOrderError
from ramtorch_core.memory.device import Device
from ramtorch_core.plan.schedule import Op, Schedule

__all__ = ["Executor", "StepResult"]

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step leaves behind."""

    outputs: list[Any]
    """Per microbatch, what the function returned; without graphs after a backward."""
    gradients: dict[Tensor, Tensor]
    """Parameter -> its gradient, summed over the microbatches in their order, unless it was added to `.grad`."""


class _Followed(NamedTuple):
    """A schedule, and what is made from it once for all steps that follow it."""

    schedule: Schedule
    exclusive: bool
    order: Order
    drivers: int
    deferrable: frozenset[int] | None
    forwards_first: bool
    """One driver takes all microbatches forward, and then all of them back."""


class Executor:
    """Owns the entry hooks, the threads and the links of one module.

    Args:
        stages: the stages of the module; parameters and buffers are on their devices already.
        devices: per stage.
        recompute_across: allow a checkpoint around several stages, which is recomputed in the backward of each.
    """

    def __init__(self, stages: StageMap, devices: Sequence[Device], *, recompute_across: bool = True) -> None:
        self.stages, self._recompute_across = stages, recompute_across
        self.devices = list(devices)
        self._unique = list({device.torch: device for device in devices}.values())
        self._links = Links(self._unique)
        # a recompute in the backward sets and restores the state of generators, which stages may share
        self._exclusive = len(self._unique) < len(self.devices) or any(d.torch.type == "cpu" for d in self._unique)
        homes = stages.homes.items()
        self._owned = [frozenset(key for key, home in homes if home == stage) for stage in range(stages.count)]
        self._ranges = [device.ranges for device in self.devices]
        self._followed: _Followed | None = None
        self._local = threading.local()
        self._crew = Crew(f"pipeline-{next(_serial)}")
        self._hooks = [
            module.register_forward_pre_hook(_Entry(self, stage, name, module), with_kwargs=True, prepend=True)
            for stage, (name, module) in enumerate(stages.entries, start=1)
        ]
        shields = [shield(module, _arriving(weakref.ref(self))) for module in stages.root.modules()]
        self._unshield = [undo for undo in shields if undo is not None]
        if len(self._unique) > 1:
            begin, end = _Whole(self, "begin_whole"), _Whole(self, "end_whole")
            self._hooks.append(stages.root.register_forward_pre_hook(begin, prepend=True))
            self._hooks.append(stages.root.register_forward_hook(end, always_call=True))

    def run(
        self,
        function: Callable[[Any], Any],
        inputs: Sequence[Any],
        schedule: Schedule,
        root: Root | None = None,
        *,
        accumulate: bool = False,
        step: int = 0,
        finish: Callable[[], None] | None = None,
        recorder: Recorder | None = None,
        exclusive: bool = False,
        strict: bool = True,
        keeping: Keeping | None = None,
    ) -> StepResult:
        """Call `function` once per microbatch, in the order of `schedule`, with backward if `root` is given.

        Args:
            function: user code; every microbatch runs it once, in a thread of its own, from entry to entry.
            inputs: its argument, per microbatch.
            schedule: a checked schedule for as many stages and microbatches.
            root: takes an output and its microbatch's number to the tensor from which backward starts, with its
                gradient (for a scalar also a number, or None for one), or to None for no backward; runs as part of the
                last stage.
            accumulate: add to `.grad` where there is one. Otherwise `.grad` is as before, and the result has it.
            step: number of the step; random numbers depend on it.
            finish: called after the last op, before gradients are collected.
            recorder: is told when each op began and ended on the host.
            exclusive: launch no two ops at the same time, even if their devices compute on their own.
            strict: refuse a module that begins a stage whose turn is over; else it runs in the stage that runs then.
            keeping: what modules keep of microbatches from stage to stage.

        Raises:
            BaseException: the first error of any thread, itself; gradients of the step are dropped then.
        """
        assert schedule.stages == self.stages.count
        assert schedule.microbatches == len(inputs)
        parameters = [p for owned in self.stages.owned for p in owned if p.requires_grad] if root else []
        held = [(p, p.grad) for p in parameters]
        if not accumulate:
            for parameter in parameters:
                parameter.grad = None
        dice = Dice(step, self._unique)
        followed = self._follow(schedule, exclusive or keeping is not None)
        turnstile = Turnstile(followed.order, self._exclusive, recorder, self._ranges)
        state = ThreadState(self._unique)
        homes, owned, split = self.stages.homes, self._owned, followed.deferrable
        devices, links = self.devices, self._links
        work = Step(function, inputs, root, turnstile, devices, links, homes, owned, dice, split, strict, keeping)
        drive = functools.partial(work.drive, followed.forwards_first)
        jobs = [lambda: state.run(drive)] * followed.drivers
        if split is not None:
            jobs += [functools.partial(state.run, functools.partial(work.weigh, lane)) for lane in schedule.lanes]
        try:
            self._crew.run(jobs, turnstile.abort)
            if turnstile.error is not None:
                raise turnstile.error
            work.loans.settle()
            if finish is not None:
                finish()
            if accumulate:
                held[:] = [pair for pair in held if pair[1] is None]  # the sums stay
                parameters = [p for p, _ in held]
            return StepResult(work.outputs, {p: p.grad for p in parameters if p.grad is not None})
        finally:
            turnstile.error = None  # its traceback holds this frame
            dice.restore()
            for parameter, gradient in held:
                parameter.grad = gradient

    def _follow(self, schedule: Schedule, exclusive: bool) -> "_Followed":
        """What this schedule takes, from the step before if that had the same."""
        found = self._followed
        if found is None or found.schedule is not schedule or found.exclusive != exclusive:
            order = Order(schedule, exclusive or self._exclusive)
            deferrable = self.stages.deferrable() if schedule.split_backward else None
            on_host = self._exclusive and not any(device.asynchronous for device in self._unique)
            alone = on_host and _is_forwards_first(schedule)
            drivers = 1 if alone else _drivers(schedule)
            found = self._followed = _Followed(schedule, exclusive, order, drivers, deferrable, alone)
        return found

    def enter(self, stage: int, name: str, arguments: Any) -> Any:
        """The module that begins `stage` is called with `arguments`; returns what it shall get."""
        current = current_step()
        if current is not None and current[0].homes is self.stages.homes:
            if not self._recompute_across and not current[1].in_backward:
                self._refuse_region(name)
            return current[0].enter_stage(current[1], stage, name, arguments)
        if len(self._unique) == 1:
            return arguments
        bystander: Bystander | None = getattr(self._local, "bystander", None)
        if bystander is not None:
            bystander.stage = stage
        device = self.devices[stage].torch
        return map_tensors(lambda t: t.to(device) if self._links.owns(t.device) else t, arguments)

    def _refuse_region(self, name: str) -> None:
        """Raise if the checkpoint in which stage `name` begins had another stage begin in it."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack = hooks[0] if hooks else None
        if not getattr(pack, "__qualname__", "").startswith("_checkpoint_hook"):
            return
        region: weakref.ref[Any] | None = getattr(self._local, "region", None)
        if region is not None and region() is pack:
            raise StageOrderError(name, f"module '{name}', which begins a stage, runs in a checkpoint around several")
        self._local.region = weakref.ref(pack)

    @contextlib.contextmanager
    def transparent(self) -> Iterator[None]:
        """Inside, the calling thread may call the module whole; tensors move to where they are needed."""
        if len(self._unique) == 1 or getattr(self._local, "bystander", None) is not None:
            yield
            return
        self._local.bystander = Bystander(self.devices, self._links)
        try:
            with Frontier(self._local.bystander, several_devices=True):
                yield
        finally:
            self._local.bystander = None

    def begin_whole(self) -> None:
        """The root is called: outside a step this is as if under `transparent`, until `end_whole`."""
        calls: list[AbstractContextManager[None]] = self._local.__dict__.setdefault("calls", [])
        calls.append(self.transparent() if current_step() is None else contextlib.nullcontext())
        calls[-1].__enter__()

    def end_whole(self) -> None:
        """The call of the root has ended, or failed."""
        calls: list[AbstractContextManager[None]] = self._local.__dict__.get("calls", [])
        if calls:
            calls.pop().__exit__(None, None, None)

    def arrive(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a compiled module, in the stage that runs."""
        current = current_step()
        if current is None or current[0].homes is not self.stages.homes:
            return args, kwargs
        arrived: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(current[1].admit, (args, kwargs))
        return arrived

    def close(self) -> None:
        """Remove the hooks and end the threads. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for undo in self._unshield:
            undo()
        self._unshield.clear()
        self._crew.close()


def _arriving(executor: "weakref.ref[Executor]") -> Arrive:
    """`Executor.arrive`, for a module that must not keep the executor alive."""

    def arrive(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        owner = executor()
        return (args, kwargs) if owner is None else owner.arrive(args, kwargs)

    return arrive


class _Hook:
    """A hook on a module of the pipeline. Copies of the module get a hook that does nothing."""

    def __init__(self, executor: Executor, module: nn.Module) -> None:
        self._executor = weakref.ref(executor)
        self._module = weakref.ref(module)

    def executor_for(self, module: nn.Module) -> Executor | None:
        """The executor, if it lives and `module` is the one that got the hook."""
        return self._executor() if module is self._module() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_inert, ()


class _Whole(_Hook):
    """Before and after a call of the root."""

    def __init__(self, executor: Executor, action: Literal["begin_whole", "end_whole"]) -> None:
        super().__init__(executor, executor.stages.root)
        self._action = action

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *_: Any) -> None:
        executor = self.executor_for(module)
        if executor is not None:
            getattr(executor, self._action)()


class _Entry(_Hook):
    """Before a call of a module that begins a stage."""

    def __init__(self, executor: Executor, stage: int, name: str, module: nn.Module) -> None:
        super().__init__(executor, module)
        self._stage = stage
        self._name = name

    @functools.partial(torch._dynamo.disable, recursive=False)
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        executor = self.executor_for(module)
        if executor is None:
            return None
        compiler = set_eval_frame(None)
        try:
            return executor.enter(self._stage, self._name, (args, kwargs))
        finally:
            set_eval_frame(compiler)


def _inert(*_: Any) -> None:
    """What is left of a hook in a copy of its module."""


def _make_inert() -> Callable[..., None]:
    return _inert


def _is_forwards_first(schedule: Schedule) -> bool:
    """Whether one thread can follow it: one microbatch forward through all stages after the other, and so back."""

    def when(op: Op) -> tuple[bool, int, int]:
        return op.kind != "F", op.microbatch, op.stage if op.kind == "F" else -op.stage

    return not schedule.split_backward and all(list(ops) == sorted(ops, key=when) for ops in schedule.lanes)


def _drivers(schedule: Schedule) -> int:
    """How many microbatches are under way at once: begun on stage 0 and not back there."""
    under_way = most = 0
    kinds = [op.kind for op in schedule.lanes[schedule.placement[0]] if op.stage == 0]
    for kind in kinds:
        under_way += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
        most = max(most, under_way)
    only_forward = all(kind == "F" for kind in kinds)
    return min(most, schedule.stages + 1) if only_forward else most

"""Attaches a pipeline to any module tree: stages, devices and schedules."""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ramtorch_core.engine.observe import is_compiled
from ramtorch_core.engine.pipeline.balance import WORTH_OPENING, Balance, StageSpec, find_stages
from ramtorch_core.engine.pipeline.executor import Executor, StepResult
from ramtorch_core.engine.pipeline.given import ScheduleSpec, plan_schedule, resolve_devices, stage_weights
from ramtorch_core.engine.pipeline.kept import Kept
from ramtorch_core.engine.pipeline.running_order import AS_REGISTERED, Observed, RunningOrder, optimizers_follow
from ramtorch_core.engine.pipeline.stages import StageMap, StageRow, format_stage_rows, place
from ramtorch_core.engine.pipeline.step import Root, out_of_order
from ramtorch_core.engine.pipeline.streamed import StreamedStages, StreamOptions
from ramtorch_core.engine.pipeline.timing import ModuleTimes, slowest
from ramtorch_core.errors import ConfigurationError, StageOrderError
from ramtorch_core.plan.schedule import Schedule, forward_only, one_by_one

__all__ = ["PipelineRunner", "ScheduleSpec", "StageSpec", "format_stage_rows", "plan_schedule", "resolve_devices"]

log = logging.getLogger(__name__)

TIMED_STEP = 2
"""Which step is timed, from 0: the first shows the running order, and the second has everything allocated."""

WORTH_CUTTING_ANEW = 0.05
"""Share of the weights' bytes away from where they run at which stages follow the running order."""

STILL_EVEN = 1.5
"""Largest stage over what it would be otherwise up to which stages begin where an evaluation enters them in turn."""


class PipelineRunner:
    """A module spread over several devices, stage after stage, until `close()`.

    Nothing in the module tree is renamed or moved: parameters stay the same objects, on the devices of their stages.
    The first training step shows in which order modules run. If that is not the order of their registration, stages are
    cut, and weights placed, anew after it; cuts of the user's stay, and what runs between them is placed. The first
    evaluation shows it too, and counts where automatic cuts make it enter stages out of turn.

    Args:
        root: the module; its parameters and buffers move.
        devices: one per pipeline device, in the order of the stages; the CPU may be given several times.
        stages: where stages begin. None: balanced automatically.
        schedule: the default schedule.
        balance: what is balanced: numbers of parameters, bytes with gradients and two moments, or time: then stages are
            cut by parameters first, the third training step is timed, and they are cut anew after it.
        device_weights: relative speed, or size, of each device.
        aside: submodules for which it is true stay where they are (metrics, for example).
        stream: let the chunks of every stage stay in RAM and stream through a window on its device.
        say: takes what is told of stages that were cut anew, where that is no reason to worry.

    Raises:
        ConfigurationError: duplicate or unknown devices, cuts that cannot begin a stage, too few modules.
        PlanError: a schedule that cannot run.
    """

    def __init__(
        self,
        root: nn.Module,
        devices: Sequence[torch.device | str | int],
        *,
        stages: StageSpec = None,
        schedule: ScheduleSpec = "staggered_1b1f",
        balance: Balance = "parameters",
        device_weights: Sequence[float] | None = None,
        aside: Callable[[nn.Module], bool] = lambda module: False,
        stream: StreamOptions | None = None,
        say: Callable[[str], None] = lambda message: log.info("%s", message),
    ) -> None:
        self.devices = resolve_devices(devices)
        self.schedule = schedule
        self._schedules: dict[int, Schedule] = {}
        self._fixed_logged = False
        placement = plan_schedule(schedule, len(self.devices), 1).placement
        self.stage_devices = [self.devices[d] for d in placement]
        weights = stage_weights(device_weights, placement, len(self.devices))
        self._cut = functools.partial(find_stages, root, stages, len(placement), balance, weights)
        self._speeds = weights or [1.0] * len(placement)
        self._by_time = stages is None and balance == "time" and len(placement) > 1 and not is_compiled(root)
        if stages is None and balance == "time" and is_compiled(root):
            log.warning("balance='time': parts of the model are compiled and cannot be timed: parameters are counted")
        self._seconds: dict[int, float] | None = None
        self._steps = 0
        self._aside, self._stream, self._automatic, self._say = aside, stream, stages is None, say
        self._kept = Kept(root, aside)
        self.streamed: StreamedStages | None = None
        self._following: list[RemovableHandle] = []
        self._settle(self._find(AS_REGISTERED))
        self._observed = self._observer()

    @property
    def root_device(self) -> torch.device:
        """The device of the last stage, where loss and labels belong."""
        return self.stage_devices[-1].torch

    @property
    def settled(self) -> bool:
        """Whether stages stay as they are, as far as is known: no training step is still to be timed for them."""
        return not self._by_time or self._seconds is not None

    def stage_table(self) -> list[StageRow]:
        """One row per stage."""
        return self.stages.rows([str(device.torch) for device in self.stage_devices])

    def plan(self, microbatches: int) -> Schedule:
        """The checked schedule for so many microbatches."""
        found = self._schedules.get(microbatches)
        if found is None:
            found = self._schedules[microbatches] = self._build(microbatches)
        return found

    def train(
        self,
        function: Callable[[Any], Any],
        inputs: Sequence[Any],
        root: Root,
        *,
        accumulate: bool = False,
        step: int = 0,
        schedule: Schedule | None = None,
    ) -> StepResult:
        """Forward and backward of all microbatches, by default in the order of `plan`; see `Executor.run`."""
        self._follow_tree()
        plan = schedule or self.plan(len(inputs))
        due = not self.settled and self._steps >= TIMED_STEP
        times = ModuleTimes(self.stages, self.stage_devices, self._speeds) if due else None
        timing = contextlib.nullcontext(function) if times is None else times.around(function)
        streaming = contextlib.nullcontext() if self.streamed is None else self.streamed.step(len(inputs))
        with self._observed.run(True) as first, timing as called, streaming as finish:
            more = {"root": root, "accumulate": accumulate, "finish": finish}
            result = self._run(called, inputs, plan, first, step=step, **more)
        self._steps += 1
        if times is not None:
            self._follow_times(times.seconds)
        elif first:
            self._follow_step()
        else:
            return result
        return replace(result, gradients={p: gradient.to(p.device) for p, gradient in result.gradients.items()})

    def evaluate(self, function: Callable[[Any], Any], inputs: Sequence[Any], *, step: int = 0) -> list[Any]:
        """The outputs of `function` for all microbatches, without backward."""
        self._follow_tree()
        plan = forward_only(self.plan(len(inputs)))
        streaming = contextlib.nullcontext() if self.streamed is None else self.streamed.scopes()
        with self._observed.run(False) as first, streaming:
            outputs = self._run(function, inputs, plan, first, step=step).outputs
        if first:
            self._follow_evaluation()
        return outputs

    def transparent(self) -> AbstractContextManager[object]:
        """Inside, the calling thread may call the module as if it were on one device, with its graph whole."""
        return self._executor.transparent()

    def close(self) -> None:
        """Remove the hooks and end the threads; parameters stay where they are. Idempotent."""
        self._executor.close()
        if self.streamed is not None:
            self.streamed.close()
        for hook in self._following:
            hook.remove()

    def _settle(self, stages: StageMap) -> None:
        self.stages = stages
        if self.streamed is not None:
            self.streamed.close()
        if self._stream is not None:
            self.streamed = StreamedStages(stages, self.stage_devices, self._stream)
        try:
            place(stages, [device.torch for device in self.stage_devices], self._stays)
            self._executor = Executor(stages, self.stage_devices)
        except BaseException:
            if self.streamed is not None:
                self.streamed.close()
            raise

    def _stays(self, module: nn.Module) -> bool:
        return self._aside(module) or (self.streamed is not None and self.streamed.holds(module))

    def _run(self, function: Any, inputs: Sequence[Any], plan: Schedule, first: bool, **more: Any) -> StepResult:
        shared = self.streamed is not None  # where user code skips a module that begins a stage, chunks run in another
        strict = not (first and self._automatic)  # cuts that are only a guess are no reason to refuse a model
        with self._kept.step(plan, "root" in more) as (chosen, keeping):
            more |= {"exclusive": shared, "strict": strict, "keeping": keeping}
            return self._executor.run(function, inputs, chosen, **more)

    def _observer(self) -> Observed:
        """What notes in which order the next runs call the modules, if that can be told and makes a difference."""
        if is_compiled(self.stages.root) or self.stages.count == 1:
            return Observed(self.stages.root, ())
        return Observed(self.stages.root, (True, False) if self._automatic else (True,))

    def _find(self, order: RunningOrder) -> StageMap:
        return self._cut(order, self._seconds)

    def _replace(self, stages: StageMap) -> None:
        before = {parameter: parameter.device for owned in self.stages.owned for parameter in owned}
        self._executor.close()
        with torch.inference_mode(False):
            self._settle(stages)
        self._kept = Kept(stages.root, self._aside)  # what runs in which stage has changed
        self._following.append(optimizers_follow({p: device for p, device in before.items() if p.device != device}))
        weakref.finalize(self, self._following[-1].remove)

    def _follow_tree(self) -> None:
        """Cut the stages anew where user code has put other modules into the tree, whose weights nobody knows."""
        if self.stages.outdated():
            self._seconds, self._steps = None, 0
            self._replace(self._find(AS_REGISTERED))
            self._observed = self._observer()
            self._say(f"the model has other modules than before:\n{self._shown()}")

    def _find_anew(self) -> StageMap:
        """The stages for the running order; an evaluation counts unless they become uneven by it."""
        stages, both = self._find(self._observed.order(evaluated=False)), self._observed.order()
        if self._automatic and stages.out_of_turn(both) is not None:
            with contextlib.suppress(ConfigurationError):
                other = self._find(both)
                if other.largest() < STILL_EVEN * stages.largest():
                    return other
        return stages

    def _follow_evaluation(self) -> None:
        """Cut the stages anew if the first evaluation entered them out of turn."""
        order = self._observed.order()
        clash = self.stages.out_of_turn(order)
        if clash is None:
            return
        stages = self._find_anew()
        if stages.out_of_turn(order) is not None:
            raise StageOrderError(clash[0], out_of_order(*clash))
        self._replace(stages)
        self._say(f"an evaluation entered stages out of turn, so they begin elsewhere:\n{self._shown()}")

    def _follow_times(self, seconds: dict[int, float]) -> None:
        """Cut the stages anew if that makes the slowest one faster."""
        self._seconds = seconds
        stages, now = self.stages, slowest(self.stages, seconds, self._speeds)
        with contextlib.suppress(ConfigurationError):
            stages = self._find_anew()
        then = slowest(stages, seconds, self._speeds)
        if then < now * WORTH_OPENING:
            self._replace(stages)
        share = sum(seconds.values()) / sum(self._speeds)
        self._say(
            f"the slowest stage computes {now:.4g} s per step; cut by time it would be {then:.4g} s, and {share:.4g} s "
            f"with equal ones:\n{self._shown()}"
        )

    def _follow_step(self) -> None:
        """Let the stages follow the running order, if that is another one."""
        order = self._observed.order(evaluated=False)
        away, clash = self.stages.away(order), self.stages.out_of_turn(order)
        astray = self.streamed is not None and self.streamed.out_of_place(order)
        if not (away >= WORTH_CUTTING_ANEW or astray or clash or self.stages.never_entered(order)):
            return
        try:
            stages = self._find_anew()
        except ConfigurationError as error:  # too few modules are called, and called once, to begin stages
            if clash is not None:
                raise StageOrderError(clash[0], out_of_order(*clash)) from error
            stages = StageMap(self.stages.root, self.stages.entries, order)
        self._replace(stages)
        if (late := stages.out_of_turn(self._observed.order())) is not None:
            log.warning("training is cut evenly, and evaluation cannot be: %s", out_of_order(*late))
        if idle := self.stages.never_entered(order):
            log.warning(
                "the first step did not call %s, where a stage begins: what follows belongs to the stage before, and a "
                "device has nothing to do: cut elsewhere (stages=[...])",
                " and ".join(f"'{name}'" for name in idle),
            )
        if astray:
            log.info("chunks that run in another stage than it seemed stream there, those of several stages nowhere")
        if away >= WORTH_CUTTING_ANEW or clash:
            log.warning(
                "modules run in another order than they are registered in, and %.0f %% of the weights were copied to "
                "where they are used. From now on they are there:\n%s",
                100 * away,
                self._shown(),
            )

    def _shown(self) -> str:
        return format_stage_rows(self.stage_table())

    def _build(self, microbatches: int) -> Schedule:
        fixed = self.schedule
        if not isinstance(fixed, Schedule) or fixed.microbatches == microbatches:
            return plan_schedule(fixed, len(self.devices), microbatches)
        if not self._fixed_logged:
            self._fixed_logged = True
            log.warning(
                "the schedule %r is for %d microbatches; a batch with %d runs one microbatch after the other. Pass a "
                "function of (devices, microbatches) to cover every number.",
                fixed.name,
                fixed.microbatches,
                microbatches,
            )
        return one_by_one(fixed.placement, microbatches)

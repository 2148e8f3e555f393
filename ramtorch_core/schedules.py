"""`schedule="auto"`: the first steps are timed, the schedules are simulated, and the fastest that fits is taken.

Every candidate gives the same bits, so nothing but time and memory changes when the schedule does.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ramtorch_core.advice import advising_pipeline
from ramtorch_core.engine.laps import op_seconds
from ramtorch_core.engine.pipeline.executor import StepResult
from ramtorch_core.engine.pipeline.runner import PipelineRunner, ScheduleSpec, plan_schedule
from ramtorch_core.engine.pipeline.step import Root
from ramtorch_core.errors import sized
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import Kind, Listener, Range
from ramtorch_core.plan.check import peak_activations
from ramtorch_core.plan.schedule import Schedule
from ramtorch_core.simulate import ChunkCost, PipelinePlan, simulate_pipeline
from ramtorch_core.tuning import WARM_UP
from ramtorch_core.wishes import USABLE

__all__ = ["AUTO", "CANDIDATES", "FIRST", "AutoSchedule", "ScheduledRunner"]

log = logging.getLogger(__name__)

AUTO = "auto"
FIRST, SPLIT = "staggered_1b1f", "zb_h1"
CANDIDATES = (FIRST, SPLIT, "eager_1f1b", "gpipe")
"""One stage per device each, so that nothing moves; of equally fast ones the first that holds least is taken."""
TOLERANCE = 0.005
"""Part of a step by which schedules count as equally fast."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """One step.

    Attributes:
        seconds: stage and kind of op -> mean seconds of one.
        makespan: seconds from the first op of the first device to its last.
        base, peak: bytes of each device before the step, with gradients, and at its peak; None where that is not known.
    """

    seconds: dict[tuple[int, str], float]
    makespan: float
    base: list[int | None]
    peak: list[int | None]


class AutoSchedule:
    """Chooses the schedule of one runner.

    The steps that are timed are the first two after the warm-up, which begins when stages are settled: one runs 1F1B,
    the other one splits its backward, if it finds room. Only steps of several microbatches count.

    Args:
        gpu_memory: bytes that may be used of each device; by default what is free.
        say: takes the one message.

    Attributes:
        name: of the schedule that steps take now.
        done: it was chosen.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        gpu_memory: int | None = None,
        say: Callable[[str], None] = lambda message: log.info("%s", message),
    ) -> None:
        self._runner, self._gpu_memory, self._say = runner, gpu_memory, say
        self.name = FIRST
        self.done = len(runner.devices) == 1
        self._steps = 0
        self._microbatches = 0
        self._timed: dict[str, _Timed] = {}

    def missed(self) -> str | None:
        """What to tell somebody whose training is over; None where a schedule was chosen."""
        if self.done:
            return None
        steps = f"{WARM_UP + 2} steps of several microbatches, and more while stages are cut anew"
        return f"training ended before schedule='{AUTO}' was chosen, and took '{self.name}': that needs {steps}"

    def __call__(self, devices: int, microbatches: int) -> Schedule:
        """The schedule that the step under way takes; as a `ScheduleSpec`."""
        self._microbatches = microbatches
        return plan_schedule(self.name, devices, microbatches)

    @contextlib.contextmanager
    def around(self, spec: ScheduleSpec, microbatches: int) -> Iterator[ScheduleSpec]:
        """Around a training step; what is inside takes the schedule that this yields, `spec` unless that is "auto"."""
        with advising_pipeline(self._runner, microbatches):
            if not isinstance(spec, str) or spec != AUTO:
                yield spec
            elif self.done or self._steps < WARM_UP:
                settled = self._runner.settled
                yield self
                self._steps += self._microbatches > 1 and settled
            else:
                with self._timing():
                    yield self

    @contextlib.contextmanager
    def _timing(self) -> Iterator[None]:
        devices, begun = self._runner.devices, [device.allocated_bytes() for device in self._runner.devices]
        for device in devices:
            device.synchronize()
            device.forget_peak()
        listeners = [device.ranges.listen() for device in devices]
        try:
            yield
            for device in devices:
                device.synchronize()
            if self._microbatches > 1:
                self._timed[self.name] = self._read(listeners, begun)
                self._next()
        finally:
            for listener in listeners:
                listener.close()

    def _next(self) -> None:
        """One more step was timed."""
        if self.name == FIRST and self._fits(SPLIT, 1.0):
            self.name = SPLIT
            return
        self.done = True
        m, found = self._microbatches, {}
        timed = self._timed[FIRST]
        send = self._send(timed)
        for name in CANDIDATES:
            if self._fits(name, USABLE):
                found[name] = self._seconds(name, m, send)
        fastest = min(found.values(), default=0.0)
        close = [name for name, seconds in found.items() if seconds <= fastest * (1 + TOLERANCE)]
        self.name = min(close or [FIRST], key=lambda name: max(peak_activations(self._plan(name, m))))
        seconds = found.get(self.name, timed.makespan)
        others = ", ".join(f"{name} {value:.4g} s" for name, value in found.items() if name != self.name)
        held = peak_activations(self._plan(self.name, m))
        halved = self._seconds(self.name, 2 * m, send, 0.5)
        lines = [
            f"schedule='{self.name}': {seconds:.4g} s per step of {m} microbatches, of which each device holds at most "
            f"{', '.join(map(str, held))}{self._memory(self.name)} ({others})",
            f"limited by: {self._limit(send)}",
            f"n_microbatches={2 * m} of half the size would buy {_gain(halved, seconds)}",
        ]
        dear = {name: self._seconds(name, m, send) for name in CANDIDATES if name not in found}
        if dear:
            best = min(dear, key=lambda name: dear[name])
            lines.append(
                f"more GPU memory would buy {_gain(dear[best], seconds)}, with schedule='{best}'{self._memory(best)}"
            )
        self._say("\n".join(lines))

    def _plan(self, name: str, microbatches: int) -> Schedule:
        return plan_schedule(name, len(self._runner.devices), microbatches)

    def _stages(self, name: str, part: float = 1.0) -> tuple[list[list[ChunkCost]], float]:
        """The cost of each stage, and the weights' share of backward, where the schedule splits it."""
        timed = self._timed.get(SPLIT if name == SPLIT else FIRST, self._timed[FIRST]).seconds
        kinds = ("I", "W") if (0, "I") in timed else ("B",)
        stages = [
            [ChunkCost(forward=part * timed[s, "F"], backward=part * sum(timed.get((s, kind), 0.0) for kind in kinds))]
            for s in range(len(self._runner.stage_devices))
        ]
        both = sum(seconds for (_, kind), seconds in timed.items() if kind in kinds)
        weights = sum(seconds for (_, kind), seconds in timed.items() if kind == "W")
        return stages, weights / both if both else 0.0

    def _seconds(self, name: str, microbatches: int, send: float, part: float = 1.0) -> float:
        """Of a step, as simulated."""
        stages, share = self._stages(name, part)
        plan = PipelinePlan(weight_share=share, send=part * send)
        return simulate_pipeline(self._plan(name, microbatches), stages, plan).seconds

    def _send(self, timed: _Timed) -> float:
        """Seconds that a microbatch is on its way between two stages, so that the timed step took as long as it did."""
        low, high = 0.0, timed.makespan / self._microbatches
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (
                (low, middle) if self._seconds(FIRST, self._microbatches, middle) > timed.makespan else (middle, high)
            )
        return low

    def _limit(self, send: float) -> str:
        stages, share = self._stages(self.name)
        plan = PipelinePlan(weight_share=share, send=send)
        result = simulate_pipeline(self._plan(self.name, self._microbatches), stages, plan)
        busiest = max(range(len(result.devices)), key=lambda d: result.devices[d].compute)
        return (
            f"the compute of device {busiest}, {result.devices[busiest].compute:.0%} busy; all wait for other stages "
            f"{result.bubble:.0%} of the time, and links are {result.link:.0%} busy"
        )

    def _peak(self, name: str, device: int) -> float | None:
        """Bytes at the peak of a step: measured, or from what a microbatch was seen to hold."""
        measured, first = self._timed.get(name), self._timed[FIRST]
        base, peak = first.base[device], first.peak[device]
        if measured is not None:
            return measured.peak[device]
        if base is None or peak is None:
            return None
        held, ours = (peak_activations(self._plan(each, self._microbatches))[device] for each in (name, FIRST))
        return base + max(0, peak - base) / ours * held

    def _fits(self, name: str, part: float) -> bool:
        for index, device in enumerate(self._runner.devices):
            usable, peak = device.usable_bytes(), self._peak(name, index)
            limit = self._gpu_memory or (None if usable is None else part * usable)
            if peak is not None and limit is not None and peak > limit:
                return False
        return True

    def _memory(self, name: str) -> str:
        peaks = [self._peak(name, index) for index in range(len(self._runner.devices))]
        known = [peak for peak in peaks if peak is not None]
        return f", {sized(max(known))} of GPU memory" if known else ""

    def _read(self, listeners: Sequence[Listener], begun: Sequence[int | None]) -> _Timed:
        seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
        lanes: list[list[Range]] = []
        for listener in listeners:
            ended = listener.collect()
            lanes.append([each for each in ended if each.kind is Kind.OP])
            for op, taken in op_seconds(ended):
                seconds[op.stage, op.kind].append(taken)
        first = sorted(lanes[0], key=lambda each: each.begun)
        makespan = max(each.end.seconds_since(first[0].start) for each in first)
        devices: list[Device] = self._runner.devices
        owned = zip(self._runner.stages.owned, self._runner.stage_devices, strict=True)
        gradients: dict[int, int] = defaultdict(int)
        for parameters, device in owned:
            gradients[id(device)] += sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
        base = [None if b is None else b + gradients[id(d)] for b, d in zip(begun, devices, strict=True)]
        means = {key: statistics.mean(values) for key, values in seconds.items()}
        return _Timed(means, makespan, base, [device.peak_bytes() for device in devices])


class ScheduledRunner:
    """A runner whose training steps take the schedule that `auto` chooses.

    Args:
        gpu_memory, say: as for `AutoSchedule`.
    """

    def __init__(self, runner: PipelineRunner, gpu_memory: int | None, say: Callable[[str], None]) -> None:
        self._runner, self.auto = runner, AutoSchedule(runner, gpu_memory, say)

    def train(
        self,
        function: Callable[[Any], Any],
        inputs: Sequence[Any],
        root: Root,
        *,
        accumulate: bool = False,
        step: int = 0,
    ) -> StepResult:
        """Forward and backward of all microbatches; see `PipelineRunner.train`."""
        with self.auto.around(AUTO, len(inputs)) as spec:
            plan = plan_schedule(spec, len(self._runner.devices), len(inputs))
            return self._runner.train(function, inputs, root, accumulate=accumulate, step=step, schedule=plan)

    def evaluate(self, function: Callable[[Any], Any], inputs: Sequence[Any], *, step: int = 0) -> list[Any]:
        """The outputs of `function` for all microbatches, without backward."""
        return self._runner.evaluate(function, inputs, step=step)


def _gain(seconds: float, now: float) -> str:
    gain = 100 * (1 - seconds / now) if now else 0.0
    return f"{gain:.0f} % less time" if gain >= 1 else "nothing"

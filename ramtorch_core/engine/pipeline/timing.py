"""How long each module takes in one training step, as stages of equal time need it."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ramtorch_core.engine.laps import op_seconds
from ramtorch_core.engine.pipeline.stages import StageMap
from ramtorch_core.engine.pipeline.step import current_step
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import Mark

__all__ = ["ModuleTimes", "slowest"]


class ModuleTimes:
    """Times the modules of one step.

    A module is charged from its call until the next call of any module, or until its stage is over, and for as large a
    share of its stage's backward as of its forward.

    Args:
        devices: per stage.
        speeds: of these devices, relative to each other: modules are charged as on one of speed 1.

    Attributes:
        seconds: `id` of a module -> seconds, over all microbatches; after `around`.
    """

    def __init__(self, stages: StageMap, devices: Sequence[Device], speeds: Sequence[float]) -> None:
        self._stages, self._devices, self._speeds = stages, devices, speeds
        self._open: dict[int, tuple[int, int, Mark]] = {}
        """Microbatch -> the stage, the module's `id`, and when it was called."""
        self._spans: list[tuple[int, int, Mark, Mark]] = []
        self.seconds: dict[int, float] = {}

    @contextlib.contextmanager
    def around(self, function: Callable[[Any], Any]) -> Iterator[Callable[[Any], Any]]:
        """Around a training step of `function`; yields what is to be called instead of it."""
        root, unique = self._stages.root, list(dict.fromkeys(self._devices))

        def timed(item: Any) -> Any:
            self._enter(root)
            output = function(item)
            self._leave()
            return output

        hooks = [module.register_forward_pre_hook(self._enter) for module in root.modules()]
        hooks += [m.register_forward_pre_hook(self._leave, prepend=True) for _, m in self._stages.entries]
        listeners = [device.ranges.listen() for device in unique]
        try:
            yield timed
            for device in unique:
                device.synchronize()
            self.seconds = self._read([op for listener in listeners for op in op_seconds(listener.collect())])
        finally:
            for handle in hooks:
                handle.remove()
            for listener in listeners:
                listener.close()

    def _enter(self, module: nn.Module, _args: Any = ()) -> None:
        """`module` is called: the one before is over."""
        current = current_step()
        if current is None or current[1].in_backward:
            return
        self._leave()
        stage = current[1].stage
        self._open[current[1].index] = stage, id(module), self._devices[stage].mark()

    def _leave(self, _module: Any = None, _args: Any = ()) -> None:
        """The stage is over, or the next module is called. Comes before the next stage is waited for."""
        current = current_step()
        begun = None if current is None else self._open.pop(current[1].index, None)
        if begun is not None:
            stage, key, start = begun
            self._spans.append((stage, key, start, self._devices[stage].mark()))

    def _read(self, ops: Sequence[tuple[Any, float]]) -> dict[int, float]:
        forward, backward = ([0.0] * self._stages.count for _ in range(2))
        for stage, _, start, end in self._spans:
            forward[stage] += end.seconds_since(start)
        for op, seconds in ops:
            backward[op.stage] += seconds if op.kind != "F" else 0.0
        found: dict[int, float] = defaultdict(float)
        for stage, key, start, end in self._spans:
            both = 1.0 + (backward[stage] / forward[stage] if forward[stage] else 0.0)
            found[key] += self._speeds[stage] * both * end.seconds_since(start)
        return dict(found)


def slowest(stages: StageMap, seconds: Mapping[int, float], speeds: Sequence[float]) -> float:
    """What the slowest stage would take, by the `seconds` of modules on a device of speed 1."""
    totals = [0.0] * stages.count
    for stage, module in stages.walk():
        totals[stage] += seconds.get(id(module), 0.0)
    return max(total / speed for total, speed in zip(totals, speeds, strict=True))

"""Chooses knobs that were given as "auto": from steps that run anyway, or from an example, with the simulator.

The first steps run with two slots, nothing pinned, and checkpoints. Visits are timed and activations counted in them;
then every plan that fits is simulated, the fastest is chosen, and the model is rearranged between two steps.
"""

from __future__ import annotations

import logging
import statistics
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ramtorch_core.engine.calibration import Calibration
from ramtorch_core.engine.measuring import AHEAD, PLAIN, Measuring
from ramtorch_core.engine.rates import Rates, known_rates
from ramtorch_core.engine.rearrange import Knobs, knobs_of, rearrange, why_not_now
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.visits import Activations
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.device import Device
from ramtorch_core.prediction import Optimizer as Where
from ramtorch_core.prediction import (
    StreamingPlan,
    calibrate,
    fitted,
    half_precision,
    machine,
    planned_costs,
    seconds_alone,
    step_cost,
)
from ramtorch_core.pricing import as_run, doubled
from ramtorch_core.simulate import Choice, Order, choose
from ramtorch_core.simulate.choose import WINDOWS, pins
from ramtorch_core.simulate.costs import resident_chunks
from ramtorch_core.wishes import PLANNED, USABLE, Auto, Wish, bytes_of

__all__ = ["Auto", "Order", "Tuner", "Wish", "bytes_of", "choose_for", "known_from", "tune_lazily"]

log = logging.getLogger(__name__)

HALF_COPIES = "precision='bf16-mixed', by half the copies alone,"
WARM_UP = 2
"""Steps before the measured ones: the first lays weights out as they are found to be used."""
TIMED = 1 + PLAIN + AHEAD
"""Steps that are measured: in one memory is counted, the others are timed."""


class Tuner:
    """Measures the first steps of a streamer, then rearranges it; see the module.

    Args:
        wish: what to choose.
        rates: of the machine.
        base: what is not chosen: microbatches, their order, and where updates happen; asked when the time comes. None:
            as the steps that are measured show it.
        changed: called after the streamer was rearranged.
        say: takes the one message, and whether it is a warning.

    Attributes:
        choice: what was chosen, once it was.
        measured, simulated: seconds of the steps before the choice, as `seconds_alone` counts them, and what they would
            take by their parts.
        done: nothing more is to come.
    """

    def __init__(
        self,
        streamer: Streamer,
        wish: Wish,
        rates: Rates,
        *,
        base: Callable[[], StreamingPlan] | None = None,
        changed: Callable[[], None] = lambda: None,
        say: Callable[[str, bool], None] = lambda message, warns: log.log(30 if warns else 20, message),
    ) -> None:
        self._streamer, self._wish, self._rates, self._base = streamer, wish, rates, base or self._as_it_runs
        self._changed, self._say = changed, say
        self._steps = 0
        self.choice: Choice | None = None
        self.measured = self.simulated = 0.0
        self.done = False
        self._measuring = Measuring(streamer, train=base is None or base().train)
        self._measuring.begin_activations()

    def between_steps(self, optimizers: Iterable[Optimizer] = ()) -> bool:
        """A step is over and the next one has not begun; returns whether this was the moment of choice.

        Args:
            optimizers: whose state follows parameters that move.
        """
        if self.done:
            return False
        self._steps += 1
        if self._steps == 1:
            self._measuring.end_activations()
        if self._steps == WARM_UP:
            self._measuring.begin_peaks()
        elif self._steps == WARM_UP + 1:
            self._measuring.end_peaks()
            self._measuring.begin_times()
        else:
            self._measuring.end_lap()
        if self._steps < WARM_UP + TIMED or why_not_now(self._streamer) is not None:
            return False
        self._choose(optimizers)
        self.close()
        return True

    def close(self) -> None:
        """Measure no more. Idempotent."""
        self.done = True
        self._measuring.close()

    def _choose(self, optimizers: Iterable[Optimizer]) -> None:
        streamer, before = self._streamer, knobs_of(self._streamer)
        calibration = self._measuring.calibration(self._rates)
        if calibration is None:
            never = ", ".join(streamer.never_visited()[:5]) or "none streams"
            self._say(f"{self._keeps(before)}: not every chunk could be measured ({never})", True)
            return
        plan = self._as_updated(calibration, self._plan_of(before))
        try:
            fit = self._fitted(calibration, plan)
            choice = choose_for(
                fit,
                self._wish,
                self._as_updated(calibration, self._base()),
                streamer.device,
                measured=plan,
                step_bytes=_step_bytes(optimizers, streamer),
            )
        except ConfigurationError as error:
            self._say(f"{self._keeps(before)}: {error}", True)
            return
        chunks = [chunk.index for chunk in streamer._inventory.chunk_of.values()]
        new = _knobs(choice.plan, chunks, before, self._wish)
        if new != before:
            try:
                rearrange(streamer, new, optimizers)
            except torch.OutOfMemoryError as error:
                rearrange(streamer, before, optimizers)
                self._changed()
                self._say(f"{self._keeps(before)}: {_text(new, self._wish)} found no memory ({error})", True)
                return
            self._changed()
        self.choice = choice
        so_far = (
            f"steps so far, with {_text(before, self._wish)}, took {self.measured:.4g} s, without updates that may run "
            f"on, of which the simulator explains {self.simulated:.4g} s"
        )
        self._say(f"{_text(new, self._wish)}: {str(choice).partition(': ')[2]}\n{so_far}", False)

    def _as_it_runs(self) -> StreamingPlan:
        streamer, passes = self._streamer, [lap.passes for lap in self._measuring.laps]
        overlapped = Where.OVERLAPPED if streamer.updates.run_on else Where.JOINED
        return StreamingPlan(
            microbatches=statistics.median_low(passes) if passes else 1,
            optimizer=overlapped if streamer.updates.updated else Where.PUBLISHED,
            recast=streamer.conservative,
            clip=self._measuring.held,
        )

    def _plan_of(self, knobs: Knobs) -> StreamingPlan:
        """The plan of the steps that were measured; what is resident did not stream, and counts as in no chunk."""
        return replace(self._base(), window=knobs.window, pin=0, checkpoint=knobs.activations is Activations.CHECKPOINT)

    def _as_updated(self, calibration: Calibration, plan: StreamingPlan) -> StreamingPlan:
        """The plan with updates as the last step made them: where that was scaled, none runs ahead."""
        return as_run(calibration, plan, self._streamer.updates.ahead.nbytes)

    def _fitted(self, calibration: Calibration, plan: StreamingPlan) -> Calibration:
        """The calibration with which the steps that were measured take as long as they took."""
        measuring = self._measuring
        passes = [lap.passes for lap in measuring.laps]  # fewer in the last step of an epoch
        whole = [each for each, found in zip(measuring.seconds, passes, strict=True) if found == max(passes)]
        self.measured = min(whole)  # another one may have had a validation in it
        self.simulated = seconds_alone(calibration, plan)
        return fitted(calibration, plan, self.measured, measuring.update_seconds())

    def _keeps(self, knobs: Knobs) -> str:
        return f"goes on with {_text(knobs, self._wish)}"


def choose_for(
    calibration: Calibration,
    wish: Wish,
    base: StreamingPlan,
    device: Device,
    *,
    measured: StreamingPlan | None = None,
    step_bytes: float = 0.0,
) -> Choice:
    """The fastest plan with what was wished for; resident chunks are counted among those that were calibrated.

    Args:
        base: what is not chosen.
        device: whose free memory is taken where none is given.
        measured: the plan of the calibration, by default that of `calibrate`.
        step_bytes: device memory that optimizers need to step what is resident.

    Raises:
        ConfigurationError: nothing fits.
    """
    base = as_run(calibration, base)
    half = half_precision(calibration)
    usable = device.usable_bytes()
    given, free = wish.gpu_memory, None if usable is None else USABLE * usable
    chunks = len(calibration.chunks)
    most = max(6, min(16, 512 // (chunks * min(base.backwards, 8))))  # so that it takes seconds
    whole = machine(calibration.rates, free if given is None else PLANNED * given)
    return choose(
        planned_costs(calibration, base),
        replace(whole, gpu_whole=given),
        base=base,
        beside=replace(step_cost(calibration, measured, train=base.train), step_bytes=step_bytes),
        windows=WINDOWS if wish.window == "auto" else (wish.window,),
        resident=pins(chunks, most) if wish.pin == "auto" else (0,),
        checkpoint=(False, True) if wish.activations == "auto" else (wish.activations != "keep",),
        doubled=doubled(calibration, base),
        variants={} if half is None else {HALF_COPIES: planned_costs(half, base)},
    )


def known_from(
    module: nn.Module, example: Any, wish: Wish, *, device: torch.device | str | int, training: bool, **options: Any
) -> dict[str, Any]:
    """Window, pin and activations for `attach`, chosen with an example; the log says which, and why.

    Args:
        options: of `calibrate`.

    Raises:
        ConfigurationError: nothing fits.
    """
    target = Device(device)
    kind = target.torch.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    calibration = calibrate(module, example, device=device, autocast=autocast, **options)
    base = StreamingPlan(optimizer=Where.OVERLAPPED if training else Where.NONE, train=training)
    choice = choose_for(calibration, wish, base, target)
    log.info("%s", choice)
    names = [chunk.name for chunk in calibration.chunks]
    chosen = {
        "window": choice.plan.window,
        "pin": [names[position] for position in sorted(resident_chunks(choice.plan.pin, len(names)))],
        "activations": "checkpoint" if choice.plan.checkpoint else "keep",
    }
    return {name: chosen[name] if getattr(wish, name) == "auto" else given for name, given in wish.first().items()}


def tune_lazily(streamer: Streamer, wish: Wish) -> None:
    """Choose after some steps of an optimizer; each of them counts as the end of a step of the model."""
    streamer.tuning = Tuner(streamer, wish, known_rates(streamer.device))
    optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    reference = weakref.ref(streamer)

    def after(optimizer: Optimizer, *_: Any) -> None:
        """Stays when nothing is to come: torch is going through such hooks, and one that leaves breaks that off."""
        owner = reference()
        if owner is None or not isinstance(owner.tuning, Tuner) or owner.tuning.done:
            return
        if owner.closed:
            owner.tuning.close()
            return
        mine = {id(parameter) for parameter in owner.root.parameters()}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            optimizers.add(optimizer)
            owner.tuning.between_steps(optimizers)

    handle = register_optimizer_step_post_hook(after)
    weakref.finalize(streamer, handle.remove)


def _knobs(plan: StreamingPlan, chunks: Sequence[int], before: Knobs, wish: Wish) -> Knobs:
    """What the plan means for the streamer: `chunks` are the indices of those that stream now."""
    pinned = frozenset(chunks[position] for position in resident_chunks(plan.pin, len(chunks)))
    return Knobs(
        window=plan.window if wish.window == "auto" else before.window,
        resident=before.resident | pinned,
        activations=Activations.CHECKPOINT if plan.checkpoint else Activations.KEEP,
    )


def _text(knobs: Knobs, wish: Wish) -> str:
    """The knobs as they can be given."""
    pin: Any = wish.pin
    if pin == "auto":
        first = knobs.resident == frozenset(range(len(knobs.resident)))
        pin = f"range({len(knobs.resident)})" if first and knobs.resident else sorted(knobs.resident) or 0
    return f"window={knobs.window}, pin={pin}, activations={knobs.activations.value}"


def _step_bytes(optimizers: Iterable[Optimizer], streamer: Streamer) -> float:
    """Device memory that the optimizers need besides their state; that of Adam, where it is not fused."""
    weights = {id(weight.parameter) for group in streamer.groups for weight in group.weights}
    largest = 0
    for group in (group for optimizer in optimizers for group in optimizer.param_groups if not group.get("fused")):
        sizes = [parameter.nbytes for parameter in group["params"] if id(parameter) in weights]
        largest = max([largest, sum(sizes) if group.get("foreach") else 2 * max(sizes, default=0)])
    return float(largest)

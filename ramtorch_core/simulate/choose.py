"""Chooses window, resident chunks and activation policy: every combination that fits is simulated, the fastest wins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ramtorch_core.errors import ConfigurationError, shown, sized
from ramtorch_core.simulate.costs import BOTH_WAYS, HOST_MEMORY, ChunkCost, Machine, StepCost, resident_chunks
from ramtorch_core.simulate.knobs import Accumulate, Optimizer, Order, StreamingPlan
from ramtorch_core.simulate.streaming import Outline, StreamingResult, outline, simulate_streaming

TOLERANCE = 0.002
"""Among plans whose step times differ by less than this part, the one that needs least GPU memory is chosen."""

ODD = 0.02
"""A narrower window is hardly ever faster, and then by less than this part: what comes sooner may get in the way."""

WINDOWS = (1, 2, 3, 4)


class DoesNotFit(ConfigurationError):
    """No plan fits into the GPU's memory."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a change would buy: `change` in words, and the best plan with it.

    `seconds` is per step of the original size: with twice the microbatches or batches, half of the longer step.
    """

    change: str
    seconds: float
    plan: StreamingPlan
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest plan that fits.

    Attributes:
        seconds: predicted per step of the optimizer.
        compute_seconds: what the chosen plan computes; the step cannot be shorter.
        peak_bytes: predicted peak of GPU memory.
        bounds: resource -> part of the step, 0 to 1, in which it is busy; the fullest first.
        offers: what more GPU memory, and more microbatches, would buy.
        simulated: how many combinations were run.
    """

    plan: StreamingPlan
    seconds: float
    compute_seconds: float
    peak_bytes: float
    bounds: dict[str, float]
    offers: tuple[Offer, ...]
    simulated: int
    result: StreamingResult

    @property
    def binding(self) -> str:
        """The resource that limits the step, as in `host memory 92 % busy`."""
        name, part = next(iter(self.bounds.items()))
        return f"{name} {100 * part:.0f} % busy"

    def __str__(self) -> str:
        share = 100 * self.compute_seconds / self.seconds if self.seconds else 100.0
        lines = [
            f"{describe(self.plan)}: {timed(self.seconds, self.plan)}, {sized(self.peak_bytes)} of GPU memory",
            f"limited by: {self.binding}; the GPU computes {share:.0f} % of the time",
        ]
        for offer in self.offers:
            gain = 100 * (1 - offer.seconds / self.seconds) if self.seconds else 0.0
            bought = f"{gain:.0f} % less time per sample, with {describe(offer.plan)}" if gain >= 1 else "nothing"
            lines.append(f"{offer.change} would buy {bought}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Knobs:
    """What is combined."""

    windows: Sequence[int]
    pins: Sequence[int | tuple[int, ...]]
    checkpoint: Sequence[bool]


def choose(
    chunks: Sequence[ChunkCost],
    machine: Machine,
    *,
    base: StreamingPlan | None = None,
    beside: StepCost | None = None,
    windows: Sequence[int] = WINDOWS,
    resident: Sequence[int | tuple[int, ...]] | None = None,
    checkpoint: Sequence[bool] = (False, True),
    offers: bool = True,
    doubled: tuple[StreamingPlan, Sequence[ChunkCost]] | None = None,
    variants: Mapping[str, Sequence[ChunkCost]] = MappingProxyType({}),
) -> Choice:
    """The fastest plan whose peak fits into `machine.gpu_bytes`.

    Windows, activation policies and resident chunks (each count, spread evenly or the first ones) are combined. A
    combination is skipped when a bound shows that it cannot fit, or cannot beat the best so far, and where a wider
    window is far from that.

    Args:
        base: what is not chosen here: microbatches, order, optimizer (default: overlapped on the host), accumulation.
        beside: what a step costs that is in no chunk.
        resident: sets of chunks to compare; None for all of those counts.
        offers: also simulate what more memory and more microbatches would buy.
        doubled: `twice(base)` as it would be carried out, and what the chunks cost then; by default as without.
        variants: changes in words -> what the chunks would cost then; they are offered too.

    Raises:
        DoesNotFit: no combination fits; says what the least would be.
        ConfigurationError: there is nothing to choose from, or a value is none of such a knob.
    """
    base = base or StreamingPlan(optimizer=Optimizer.OVERLAPPED)
    beside = beside or StepCost()
    _check(base, windows=windows, resident=resident, checkpoint=checkpoint)
    knobs = _Knobs(windows, pins(len(chunks)) if resident is None else resident, checkpoint)
    (plan, _), simulated = _search(chunks, machine, base, beside, knobs)
    result = simulate_streaming(chunks, plan, machine, beside)
    found: list[Offer] = []
    more = doubled or (twice(base), chunks)
    for change, others, there, what in _changes(chunks, more, machine, base, variants) if offers else ():
        with contextlib.suppress(ConfigurationError):  # it would not fit
            (other, its), count = _search(others, there, what, beside, knobs)
            simulated += count
            seconds = its.seconds * base.backwards / what.backwards
            found.append(Offer(change, seconds, other, its.peak_bytes))
    return Choice(
        plan=plan,
        seconds=result.seconds,
        compute_seconds=result.compute * result.seconds,
        peak_bytes=result.peak_bytes,
        bounds=_bounds(result),
        offers=tuple(found),
        simulated=simulated,
        result=result,
    )


def _check(base: StreamingPlan, **given: Any) -> None:
    """Refuse what is no list, an empty one, and values that are none of the knob."""
    knobs = {"windows": "window", "resident": "pin", "checkpoint": "checkpoint"}
    for name, values in given.items():
        if values is None:
            continue
        if not isinstance(values, Sequence) or not values:
            raise ConfigurationError(f"{name}={shown(values)}: a list with at least one entry is needed")
        for value in values:
            replace(base, **{knobs[name]: value})


def _changes(
    chunks: Sequence[ChunkCost],
    doubled: tuple[StreamingPlan, Sequence[ChunkCost]],
    machine: Machine,
    base: StreamingPlan,
    variants: Mapping[str, Sequence[ChunkCost]],
) -> Iterator[tuple[str, Sequence[ChunkCost], Machine, StreamingPlan]]:
    """What might be changed, in words, and what would be simulated then."""
    if machine.gpu_bytes is not None:
        for factor in (1.5, 2.0):
            larger = replace(machine, gpu_bytes=factor * machine.gpu_bytes)
            planned = sized(factor * machine.gpu_bytes, 1)
            change = f"{factor:g} times the memory for the plan ({planned})"
            if machine.gpu_whole is not None:
                whole = sized(factor * machine.gpu_whole, 1)
                change = f"{factor:g} times the GPU memory ({whole}, of which the plan may take {planned})"
            yield change, chunks, larger, base
    plan, others = doubled
    what = f"{plan.microbatches} microbatches instead of {base.microbatches}"
    if plan.microbatches == base.microbatches:
        what = f"{plan.batches} accumulated batches instead of {base.batches}"
    yield what, others, machine, plan
    for change, others in variants.items():
        yield change, others, machine, base


def twice(base: StreamingPlan) -> StreamingPlan:
    """The plan with twice the microbatches; twice the batches, where those accumulate and have one microbatch each."""
    if base.batches > 1 and base.microbatches == 1:
        return replace(base, batches=2 * base.batches)
    return replace(base, microbatches=2 * base.microbatches)


def describe(plan: StreamingPlan) -> str:
    """The chosen knobs, as they are passed to the strategy."""
    pin = plan.pin if isinstance(plan.pin, int) else f"range({len(plan.pin)})"
    return f"window={plan.window}, pin={pin}, activations={'checkpoint' if plan.checkpoint else 'keep'}"


def timed(seconds: float, plan: StreamingPlan) -> str:
    """Seconds per step of the optimizer in words; where a step has several batches, those of a batch too."""
    if plan.batches == 1:
        return f"{seconds:.4g} s per step"
    each = f"{seconds / plan.batches:.4g} s per batch in the mean"
    return f"{each}, {seconds:.4g} s per step of the optimizer ({plan.batches} batches)"


def _search(
    chunks: Sequence[ChunkCost],
    machine: Machine,
    base: StreamingPlan,
    beside: StepCost,
    knobs: _Knobs,
) -> tuple[tuple[StreamingPlan, Outline], int]:
    limit = float("inf") if machine.gpu_bytes is None else machine.gpu_bytes
    families = sorted(
        (_least_seconds(chunks, machine, replace(base, pin=pin, checkpoint=recompute), beside), number, recompute)
        for recompute in knobs.checkpoint
        for number, pin in enumerate(knobs.pins)
    )
    fastest = least = float("inf")
    fitting: list[tuple[StreamingPlan, Outline]] = []
    simulated = 0
    for soonest, number, recompute in families:
        pin = knobs.pins[number]
        if soonest > fastest * (1 + TOLERANCE):
            break
        streamed, besides = max(1, len(chunks) - _count(pin)), 0.0
        for window in sorted({min(most, streamed) for most in knobs.windows}, reverse=True):
            plan = replace(base, window=window, pin=pin, checkpoint=recompute)
            nbytes = bound = _least_bytes(chunks, plan, beside) + besides
            if nbytes <= limit:
                result = outline(chunks, plan, machine, beside)
                simulated, nbytes = simulated + 1, result.peak_bytes
                if base.updates is not Optimizer.GPU:  # whose state comes and goes with time, not in order
                    besides += nbytes - bound  # the same for each window: only slots differ
            if nbytes > limit:
                least = min(least, nbytes)
                continue
            if result.seconds > fastest * (1 + ODD):
                break
            fastest = min(fastest, result.seconds)
            fitting.append((plan, result))
    if not fitting:
        of = "" if machine.gpu_whole is None else f" (a plan's part of {sized(machine.gpu_whole)})"
        fewer = " Use fewer microbatches at once, or smaller ones" if base.together > 1 else " Use smaller microbatches"
        raise DoesNotFit(
            f"no window, pin and activation policy fits into {sized(limit)} of GPU memory{of}: about "
            f"{sized(least)} are needed.{fewer}, or smaller chunks"
        )
    close = [entry for entry in fitting if entry[1].seconds <= fastest * (1 + TOLERANCE)]
    return min(close, key=lambda entry: (entry[1].peak_bytes, entry[1].seconds)), simulated


def pins(chunks: int, most: int | None = None) -> list[int | tuple[int, ...]]:
    """Counts, spread evenly; and the first ones, where that is another set. With `most`, about so many counts."""
    step = 1 if most is None else max(1, chunks // most)
    counts: list[int | tuple[int, ...]] = list(dict.fromkeys([*range(0, chunks, step), chunks]))
    first = (tuple(range(count)) for count in counts if isinstance(count, int) and 2 <= count < chunks)
    return counts + [pin for pin in first if resident_chunks(len(pin), chunks) != frozenset(pin)]


def _count(pin: int | tuple[int, ...]) -> int:
    return pin if isinstance(pin, int) else len(pin)


def _least_seconds(chunks: Sequence[ChunkCost], machine: Machine, plan: StreamingPlan, beside: StepCost) -> float:
    """A step cannot be shorter than the work of any one resource."""
    resident = resident_chunks(plan.pin, len(chunks))
    streamed = [chunk for i, chunk in enumerate(chunks) if i not in resident]
    compute = plan.backwards * (
        beside.loss
        + sum(c.forward_seconds(i in resident) for i, c in enumerate(chunks))
        + sum(c.backward_seconds(checkpoint=plan.checkpoint, resident=i in resident) for i, c in enumerate(chunks))
        * plan.train
    )
    on_host = plan.train and plan.updates in (Optimizer.PUBLISHED, Optimizer.JOINED, Optimizer.OVERLAPPED)
    update = sum(c.update for c in streamed) * on_host
    gradients = sum(c.gradient for c in streamed) * on_host
    in_turns = plan.updates is Optimizer.PUBLISHED and (beside.awaited or plan.clip)
    apart = compute + update if in_turns else max(compute, update)
    host_bytes = sum(c.update_bytes + c.gradient_bytes for c in streamed) * on_host
    memory = host_bytes / machine.host_memory if machine.host_memory else 0.0
    return max(apart, gradients, sum(c.transfer for c in streamed), memory)


def _least_bytes(chunks: Sequence[ChunkCost], plan: StreamingPlan, beside: StepCost) -> float:
    """Slots, resident chunks, and the activations of the moment when the first backward begins."""
    resident = resident_chunks(plan.pin, len(chunks))
    streamed = [chunk.weight_bytes for i, chunk in enumerate(chunks) if i not in resident]
    updated = plan.train and plan.optimizer is not Optimizer.NONE
    kept = sum(
        chunks[i].resident_bytes + chunks[i].own_gradient_bytes * plan.train + chunks[i].state_bytes * updated
        for i in resident
    )
    held = sum(c.held_bytes(plan.checkpoint) for c in chunks) * plan.together * plan.train + beside.loss_bytes
    summed = plan.accumulate is Accumulate.GPU and plan.order is Order.MICROBATCH and plan.backwards > 1
    gradients = sum(c.gradient_bytes for i, c in enumerate(chunks) if i not in resident) * summed * plan.train
    slots = min(plan.window, len(streamed)) * max(streamed, default=0.0)
    return beside.base_bytes + slots + kept + max(held, gradients)


def _bounds(result: StreamingResult) -> dict[str, float]:
    parts = {
        "GPU compute": result.compute,
        "copies to the GPU": result.h2d,
        "copies to the host": result.d2h,
        "optimizer on the host": result.host,
    }
    names = {HOST_MEMORY: "host memory bandwidth", BOTH_WAYS: "PCIe both ways"}
    parts |= {names[name]: part for name, part in result.shared.items()}
    return dict(sorted(parts.items(), key=lambda item: -item[1]))

"""Predicted peaks hold what the engine allocates, counted as an allocator would count it, and little more."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from virtual_device import BOUNCE_BYTES
from virtual_world_cases import WIDTH, Times, World

from ramtorch_core import pricing, tuning
from ramtorch_core.engine.peaks import Peaks
from ramtorch_core.engine.rates import Rates
from ramtorch_core.prediction import Machine, Optimizer, Order, StreamingPlan, predict
from ramtorch_core.tuning import Wish

RATES = Rates(1e7, 1e7, 1e30, 1e30, 1e-9, 1e-30, 1 << 40, 1e7)
"""Copies are slow, so that more memory buys time."""
TIMES = Times(1e-3, 2e-3)
EVEN, UNEVEN = (256,) * 6, (64, 256, 512, 64)
WORLDS = {
    f"{name}-{tokens}-{'half' if half else 'full'}": World(
        RATES, [(hidden, TIMES) for hidden in sizes], tokens=tokens, autocast=half
    )
    for name, sizes in (("even", EVEN), ("uneven", UNEVEN))
    for tokens in (4, 512)  # weights need most, or activations
    for half in (True, False)
}
SAMPLES = 2048
"""Bytes of samples of the masters, at the most, which a GPU would not hold."""
KNOBS = list(itertools.product((1, 3), (True, False), (1, 2)))  # slots, checkpoints, microbatches


@pytest.fixture(autouse=True)
def small_bounce_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the virtual device has it."""
    monkeypatch.setattr(pricing, "BOUNCE_BYTES", BOUNCE_BYTES)


@pytest.mark.parametrize("name", WORLDS)
def test_no_plan_takes_more_than_predicted_nor_much_less(name: str) -> None:
    world = WORLDS[name]
    calibration = world.calibrate()
    for number, (window, checkpoint, microbatches) in enumerate(KNOBS):
        for pin in (0, (2, len(world.chunks))[number % 2]):
            plan = StreamingPlan(
                window=window,
                pin=pin,
                checkpoint=checkpoint,
                microbatches=microbatches,
                optimizer=Optimizer.OVERLAPPED,
            )
            real = world.train(plan)[1]
            assert real <= predict(calibration, plan, Machine()).peak_bytes <= 1.12 * real, plan


@pytest.mark.parametrize(("name", "more"), [("even-4-full", 1.02), ("even-4-half", 1.12)])
def test_published_gradients_pass_through_a_buffer_only_where_they_are_cast_or_added(name: str, more: float) -> None:
    world = WORLDS[name]
    calibration = world.calibrate()
    for pin, microbatches in itertools.product((0, 2, len(world.chunks)), (1, 2)):
        plan = StreamingPlan(pin=pin, microbatches=microbatches, optimizer=Optimizer.PUBLISHED)
        real = world.train(plan)[1]
        assert real - SAMPLES <= predict(calibration, plan, Machine()).peak_bytes <= more * real, plan


def test_microbatches_side_by_side_keep_the_activations_and_sums_that_were_predicted() -> None:
    world = WORLDS["even-512-full"]
    calibration = world.calibrate()
    for checkpoint in (True, False):
        plan = StreamingPlan(microbatches=3, order=Order.CHUNK, checkpoint=checkpoint, optimizer=Optimizer.OVERLAPPED)
        real = world.train(plan)[1]
        assert real <= predict(calibration, plan, Machine()).peak_bytes <= 1.15 * real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [Optimizer.OVERLAPPED, Optimizer.PUBLISHED])
def test_sums_of_microbatches_side_by_side_take_what_was_predicted(dtype: torch.dtype, optimizer: Optimizer) -> None:
    """Of half-precision masters they are in float32, and pass through a buffer where they are published."""
    world = World(RATES, [(256, TIMES)] * 6, tokens=4, dtype=dtype)  # weights need most
    calibration = world.calibrate()
    for (microbatches, batches), pin in itertools.product(((3, 1), (2, 2)), (0, 2)):
        plan = StreamingPlan(
            pin=pin, microbatches=microbatches, batches=batches, order=Order.CHUNK, optimizer=optimizer
        )
        real = world.train(plan)[1]
        assert real - SAMPLES <= predict(calibration, plan, Machine()).peak_bytes <= 1.06 * real, plan


def test_only_published_sums_of_half_precision_masters_pass_through_a_buffer() -> None:
    worlds = [World(RATES, [(256, TIMES)] * 6, tokens=4, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    full, half = (world.calibrate() for world in worlds)
    base = StreamingPlan(microbatches=2, order=Order.CHUNK, optimizer=Optimizer.PUBLISHED)
    overlapped, batches = replace(base, optimizer=Optimizer.OVERLAPPED), replace(base, batches=2)
    for calibration, plan, passes in (
        (full, base, False),
        (half, base, True),
        (half, overlapped, False),
        (half, replace(batches, optimizer=Optimizer.OVERLAPPED), True),  # all but the last batch
        (half, replace(base, microbatches=1), False),
    ):
        assert plan.bounces(pricing.planned_costs(calibration, plan), others=False) is passes


@pytest.mark.parametrize("name", ["even-4-half", "uneven-512-full"])
@pytest.mark.parametrize("share", [0.7, 0.8, 0.9])
def test_what_is_chosen_keeps_to_the_memory_that_is_given(name: str, share: float) -> None:
    world = WORLDS[name]
    everything = StreamingPlan(pin=len(world.chunks), checkpoint=False, optimizer=Optimizer.OVERLAPPED)
    limit = int(share * world.train(everything)[1])
    tuner, _, peak = world.tune(Wish(window="auto", pin="auto", activations="auto", gpu_memory=limit))
    assert tuner.choice is not None
    assert peak - SAMPLES <= tuner.choice.peak_bytes <= limit


@pytest.mark.parametrize("plain", [True, False])
def test_gradients_of_resident_chunks_are_not_counted_beside_a_backward_that_has_dropped_them(
    monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    monkeypatch.setattr(tuning, "known_rates", lambda device: device.rates)
    world = World(RATES, [(256, TIMES)] * 4, wide=256)  # most memory is taken when the backward begins, for its logits
    limit = int(1.05 * world.train(StreamingPlan(pin=3, optimizer=Optimizer.OVERLAPPED))[1])
    tuner, _, peak = world.tune(Wish(window=2, pin="auto", activations="auto", gpu_memory=limit), plain=plain)
    assert tuner.choice is not None
    assert tuner.choice.plan.pin not in (0, ())
    assert peak - SAMPLES <= tuner.choice.peak_bytes <= 1.02 * peak


def test_the_phases_of_a_step_are_told_apart() -> None:
    world = World(RATES, [(64, TIMES)] * 3, tokens=8)
    found: Any = world.calibrate().peaks
    assert isinstance(found, Peaks)
    weights, x, inner = 4 * 2 * WIDTH * 64, 4 * 8 * WIDTH, 4 * 8 * 64
    assert 2 * weights + x <= found.before < 2 * weights + x + SAMPLES
    assert found.forward >= found.before + 2 * x + inner  # two inputs of chunks, and what the last one computes
    assert found.before + 3 * x < found.loss < found.forward  # a forward keeps no more than inputs, and the output
    assert found.first > found.before + 2 * x + inner + weights // 2  # what is recomputed, and the first gradient
    assert found.backward > found.before + 2 * weights  # those of three chunks are on their way

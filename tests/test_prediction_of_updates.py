"""Predicted times where updates run ahead of the norm, or follow several batches, are those that the engine takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from virtual_world_cases import WIDTH, Times, World

from ramtorch_core.engine.rates import Rates
from ramtorch_core.prediction import Machine, Optimizer, Order, StreamingPlan, predict

MS = 1e-3
CHUNK = 8 * WIDTH * 32
"""Bytes of the weights of a chunk with 32 hidden values, in float32."""
SIZES = (32, 64, 16, 32, 32, 48)


def world(update: float) -> World:
    """Chunks of 32 hidden values compute for 3 ms, and their update on the host takes so many."""
    rates = Rates(
        h2d=CHUNK / (0.3 * MS),
        d2h=CHUNK / (0.4 * MS),
        both_ways=1e30,
        host_memory=1e30,
        host_update=update * MS / (CHUNK // 4),
        device_update=1e-30,
        device_bytes=1 << 40,
        accumulated=CHUNK / MS,
    )
    times = [(hidden, Times(hidden / 32 * MS, hidden / 16 * MS, 0.2 * MS, 0.3 * MS)) for hidden in SIZES]
    return World(rates, times, Times(0.5 * MS, 0.7 * MS, 0.1 * MS, 0.2 * MS), between=0.6 * MS)


WORLDS = {"compute": world(0.5), "both": world(2.5), "updates": world(9.0)}


@pytest.fixture(scope="module")
def calibrations() -> dict[str, Any]:
    return {name: replace(each.calibrate(), between=each.between) for name, each in WORLDS.items()}


AHEAD: list[dict[str, Any]] = [
    {"ahead": 0.25, "pin": 0},
    {"pin": 0},
    {"ahead": 0.6, "pin": 2, "microbatches": 2, "order": Order.CHUNK},
    {"ahead": 1.0, "pin": 0, "optimizer": Optimizer.JOINED},
    {"ahead": 1.0, "pin": 2},
]
SEVERAL: list[dict[str, Any]] = [
    {"batches": 2, "pin": 0},
    {"batches": 3, "pin": 2, "optimizer": Optimizer.JOINED},
    {"batches": 2, "pin": 2, "optimizer": Optimizer.PUBLISHED},
    {"batches": 2, "pin": 0, "clip": True},
    {"batches": 2, "pin": 0, "clip": True, "ahead": 0.6, "optimizer": Optimizer.JOINED},
]


@pytest.mark.parametrize("limit", WORLDS)
def test_updates_that_run_ahead_of_the_norm_take_as_long_as_predicted(calibrations: dict[str, Any], limit: str) -> None:
    for knobs in AHEAD:
        plan = StreamingPlan(**{"clip": True, "optimizer": Optimizer.OVERLAPPED, **knobs})
        found = predict(calibrations[limit], plan, Machine())
        assert any(span.label.startswith("k") for span in found.result.timeline.spans)
        assert WORLDS[limit].train(plan)[0] == pytest.approx(found.seconds), plan


@pytest.mark.parametrize("limit", WORLDS)
def test_steps_of_several_batches_of_microbatches_side_by_side_take_as_long_as_predicted(
    calibrations: dict[str, Any], limit: str
) -> None:
    for knobs in SEVERAL:
        plan = StreamingPlan(**{"microbatches": 2, "order": Order.CHUNK, "optimizer": Optimizer.OVERLAPPED, **knobs})
        found = predict(calibrations[limit], plan, Machine()).seconds
        assert WORLDS[limit].train(plan, steps=4)[0] == pytest.approx(found), plan


def test_sums_of_gradients_in_half_precision_take_as_long_as_predicted() -> None:
    """They are in float32, and leave rounded besides where they are published."""
    rates = replace(WORLDS["compute"].rates, d2h=CHUNK / (40 * MS), accumulated=CHUNK / (60 * MS))  # what limits
    slow = replace(WORLDS["compute"], dtype=torch.bfloat16, rates=rates)
    calibration = replace(slow.calibrate(), between=slow.between)
    side = {"microbatches": 2, "order": Order.CHUNK}
    for knobs in (side, {**side, "batches": 2}, {**side, "optimizer": Optimizer.PUBLISHED}, {"microbatches": 3}):
        plan = StreamingPlan(**{"pin": 0, "optimizer": Optimizer.OVERLAPPED, **knobs})  # type: ignore[arg-type]
        found = predict(calibration, plan, Machine()).seconds
        assert slow.train(plan, steps=4)[0] == pytest.approx(found, rel=5e-3), plan

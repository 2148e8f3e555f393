"""Host memory of plans, beside what the engine allocates."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from ramtorch_core import attach
from ramtorch_core.engine.microbatches import MicrobatchRunner
from ramtorch_core.planning import Estimate, Subject, describe_machine, described, estimate, host_bytes
from ramtorch_core.prediction import Optimizer, Order, StreamingPlan

LAYERS, WIDTH = 6, 32
WEIGHT = 4 * WIDTH**2


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)))


def estimated(autocast: torch.dtype | None = None, dtype: torch.dtype = torch.float32) -> Estimate:
    return estimate(
        lambda: Subject(model(dtype), None, "*"),
        describe_machine(device_bytes=1e9, pcie=1e9, host_memory=1e9),
        1e12,
        tokens=2,
        resident_below=0,
        autocast=autocast,
    )


def taken(plan: StreamingPlan, steps: int) -> int:
    """Bytes of host memory that the engine keeps gradients in, and copies of what may be put back."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    engine = attach(module, device="cpu", chunks="*", resident_below=0, pin=plan.pin)
    try:
        for _ in range(steps):
            for m in range(plan.microbatches):
                last = m == plan.microbatches - 1 and plan.optimizer is not Optimizer.PUBLISHED
                with engine.updates.overlap(optimizer, hold=plan.clip) if last else contextlib.nullcontext():
                    module(torch.ones(2, WIDTH)).sum().backward()
            if plan.clip:
                engine.updates.clip(module.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        return engine.gradients.host_bytes() + engine.updates.host_bytes()
    finally:
        engine.close()


@pytest.mark.parametrize("pin", [0, 2])
@pytest.mark.parametrize(
    ("plan", "gradients"),
    [
        (StreamingPlan(optimizer=Optimizer.OVERLAPPED), 4),
        (StreamingPlan(optimizer=Optimizer.PUBLISHED), LAYERS),
        (StreamingPlan(optimizer=Optimizer.OVERLAPPED, clip=True), LAYERS),
        (StreamingPlan(optimizer=Optimizer.OVERLAPPED, microbatches=2), LAYERS),
        (StreamingPlan(optimizer=Optimizer.JOINED, microbatches=2, clip=True), LAYERS),
    ],
)
def test_the_host_keeps_as_many_gradients_as_the_engine_does(plan: StreamingPlan, gradients: int, pin: int) -> None:
    found = estimated()
    plan = described(found, replace(plan, pin=pin), ram=None)
    module_bytes = (LAYERS - pin) * WEIGHT
    copies = 3 * module_bytes // 4 if plan.clip and plan.microbatches == 1 else 0  # of updates that run ahead
    kept = host_bytes(found, plan) - 3 * module_bytes
    assert kept == min(gradients, LAYERS - pin) * WEIGHT + copies
    assert taken(plan, steps=2) <= kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("published", [False, True])
def test_the_host_keeps_sums_of_batches_beside_what_goes_to_updates(
    dtype: torch.dtype, clip: bool, published: bool
) -> None:
    where = Optimizer.PUBLISHED if published else Optimizer.OVERLAPPED
    plan = StreamingPlan(microbatches=2, batches=2, order=Order.CHUNK, optimizer=where, clip=clip)
    found = estimated(dtype=dtype)
    plan = described(found, plan, ram=None)
    module = model(dtype)
    optimizer = torch.optim.AdamW(module.parameters())
    engine = attach(module, device="cpu", chunks="*", resident_below=0)
    last = False
    runner = MicrobatchRunner(
        engine, lambda: engine.updates.begin(optimizer, hold=clip) if last else None, engine.updates.end
    )
    inputs = [torch.ones(2, WIDTH, dtype=dtype)] * 2
    try:
        for batch in range(8):
            last = batch % 2 == 1 and not published
            result = runner.train(module, inputs, lambda out, _: (out.sum(), None), accumulate=batch % 2 == 1)
            for parameter, gradient in result.gradients.items():
                parameter.grad = gradient
            if batch % 2:
                if clip:
                    engine.updates.clip(module.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
        taken, kept = (
            engine.gradients.host_bytes() + engine.updates.host_bytes(),
            host_bytes(found, plan) - 3 * found.bytes,
        )
        assert taken <= kept
        if clip or published:  # otherwise updates may be so fast that few buffers are taken
            assert taken == pytest.approx(kept, rel=0.02)
    finally:
        runner.close()
        engine.close()


def test_sums_that_stay_on_the_device_leave_through_a_few_wider_buffers() -> None:
    found = estimated(torch.bfloat16)
    plans = [StreamingPlan(optimizer=Optimizer.OVERLAPPED, microbatches=m, order=Order.CHUNK) for m in (1, 2)]
    shadows = LAYERS * WEIGHT // 2
    kept = [host_bytes(found, plan) - 3 * LAYERS * WEIGHT - shadows for plan in plans]
    assert kept == [4 * WEIGHT // 2, 4 * WEIGHT]

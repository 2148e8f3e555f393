"""Streaming, simulated: rules that hold for every model and every knob, and that the engine follows too."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramtorch_core import attach
from ramtorch_core.memory.gradients import MAXIMUM_IN_FLIGHT
from ramtorch_core.plan.itinerary import straight_itinerary
from ramtorch_core.plan.transfers import plan_transfers
from ramtorch_core.simulate import (
    Accumulate,
    ChunkCost,
    Optimizer,
    Order,
    StreamingPlan,
    StreamingResult,
    simulate_streaming,
)
from ramtorch_core.simulate.costs import resident_chunks
from ramtorch_core.simulate.lane import GRADIENTS_IN_FLIGHT

small = st.integers(0, 6).map(float)
costs = st.builds(
    ChunkCost,
    forward=st.integers(1, 4).map(float),
    backward=small,
    transfer=small,
    gradient=small,
    update=small,
    device_update=small,
    state_in=small,
    state_out=small,
    weight_bytes=small,
    gradient_bytes=small,
    state_bytes=small,
    update_bytes=small,
    kept_bytes=small,
    boundary_bytes=small,
)
positive = st.integers(1, 6).map(float)
working = st.builds(ChunkCost, forward=positive, backward=positive, transfer=positive, gradient=small)
models = st.lists(costs, min_size=1, max_size=7)
plans = st.builds(
    StreamingPlan,
    window=st.integers(1, 4),
    pin=st.integers(0, 7),
    checkpoint=st.booleans(),
    microbatches=st.integers(1, 3),
    order=st.sampled_from(Order),
    optimizer=st.sampled_from(Optimizer),
    accumulate=st.sampled_from(Accumulate),
    staging=st.sampled_from([None, 1, 3]),
    train=st.booleans(),
)


def spans(result: StreamingResult, resource: str) -> list[tuple[str, float, float]]:
    return [(span.label, span.start, span.end) for span in result.timeline.spans if span.resource == resource]


@settings(deadline=None, max_examples=60)
@given(models, plans, st.integers(1, 3))
def test_no_resource_does_two_things_at_once_and_a_step_is_no_shorter_than_the_work_of_any(chunks, plan, steps):
    result = simulate_streaming(chunks, plan, steps=steps)
    for resource in result.timeline.resources:
        mine = sorted((span.start, span.end) for span in result.timeline.spans if span.resource == resource)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
    compute = sum(c.forward + (c.backward + c.forward * plan.checkpoint) * plan.train for c in chunks)
    assert result.seconds >= compute * plan.microbatches
    if steps == 1:
        for resource in result.timeline.resources:
            assert result.seconds >= sum(s.seconds for s in result.timeline.spans if s.resource == resource)
    assert result.peak_chunks <= len(resident_chunks(plan.pin, len(chunks))) + plan.window
    assert result.peak_bytes >= result.weight_bytes


@settings(deadline=None, max_examples=60)
@given(models, plans)
def test_gaps_and_work_fill_the_compute_stream(chunks, plan):
    result = simulate_streaming(chunks, plan)
    assert result.stall + result.compute * result.seconds == pytest.approx(result.seconds)


@settings(deadline=None, max_examples=60)
@given(st.lists(working, min_size=1, max_size=7), st.integers(1, 4), st.booleans())
def test_every_visit_waits_for_its_transfer_and_every_transfer_for_its_slot(chunks, window, train):
    knobs = StreamingPlan(window=window, train=train)
    result = simulate_streaming(chunks, knobs, steps=1)
    plan = plan_transfers(straight_itinerary(range(len(chunks)), backward=train), min(window, len(chunks)))
    visits, copies = spans(result, "compute"), spans(result, "H2D")
    for transfer, (label, start, _) in zip(plan.transfers, copies, strict=True):
        assert label == f"t{transfer.chunk}"
        assert transfer.after < 0 or start >= visits[transfer.after][2]
    for position, (visit, (label, start, _)) in enumerate(zip(plan.itinerary, visits, strict=True)):
        assert label == str(visit)
        mine = [n for n, t in enumerate(plan.transfers) if t.slot == plan.slot_of_visit[position]]
        assert start >= copies[max(n for n in mine if plan.transfers[n].needed_by <= position)][2]


def test_the_engine_lets_as_many_gradients_be_on_their_way() -> None:
    assert GRADIENTS_IN_FLIGHT == MAXIMUM_IN_FLIGHT


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_engine_makes_the_visits_and_transfers_that_are_simulated(window: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    engine = attach(model, device="cpu", chunks="leaves", resident_below=0, window=window, activations="keep")
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    itinerary, transfers = engine.follower.last
    engine.close()
    chunk = ChunkCost(forward=1, backward=1, transfer=1)
    result = simulate_streaming([chunk] * 5, StreamingPlan(window=window, checkpoint=False), steps=1)
    assert [label for label, _, _ in spans(result, "compute")] == list(map(str, itinerary))
    assert [label for label, _, _ in spans(result, "H2D")] == [f"t{transfer.chunk}" for transfer in transfers]


@settings(deadline=None, max_examples=60)
@given(models, plans)
def test_waiting_for_less_is_never_slower(chunks, plan):
    if plan.train:
        knobs = {name: getattr(plan, name) for name in ("window", "pin", "checkpoint", "order")}
        published, joined = (
            simulate_streaming(chunks, StreamingPlan(optimizer=optimizer, **knobs)).seconds
            for optimizer in (Optimizer.PUBLISHED, Optimizer.JOINED)
        )
        assert joined <= published

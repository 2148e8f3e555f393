"""Choosing knobs: the fastest plan that fits, what limits it, and what a change would buy."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.simulate import (
    ChunkCost,
    Machine,
    Optimizer,
    Order,
    StepCost,
    StreamingPlan,
    choose,
    chunk_cost,
    simulate_streaming,
)
from ramtorch_core.simulate.choose import TOLERANCE, WINDOWS, describe, pins

MACHINE = Machine(
    h2d=50e9, d2h=50e9, both_ways=90e9, host_memory=110e9, gpu_bytes=24e9, host_update=0.3e-9, gpu_update=0.01e-9
)


def model(blocks: int = 6, parameters: float = 200e6, forward: float = 0.01) -> list[ChunkCost]:
    """Blocks whose activations are 1 GB kept and 0.1 GB checkpointed."""
    cost = chunk_cost(parameters, MACHINE, forward=forward, backward=2 * forward, kept_bytes=1e9, boundary_bytes=0.1e9)
    return [cost] * blocks


def test_the_cost_of_a_chunk_follows_from_its_parameters() -> None:
    cost = chunk_cost(100e6, MACHINE, forward=1, backward=2)
    assert cost.weight_bytes == 200e6
    assert cost.transfer == pytest.approx(200e6 / 50e9)
    assert cost.gradient == pytest.approx(400e6 / 50e9)
    assert cost.update == pytest.approx(0.03)
    assert cost.resident_bytes + cost.gradient_bytes + cost.state_bytes == 16 * 100e6
    assert chunk_cost(100e6, Machine(), forward=1, backward=2).transfer == 0


small = st.integers(0, 5).map(float)
costs = st.builds(
    ChunkCost,
    forward=st.integers(1, 3).map(float),
    backward=small,
    transfer=small,
    gradient=small,
    update=small,
    weight_bytes=st.integers(1, 5).map(float),
    gradient_bytes=small,
    state_bytes=small,
    kept_bytes=small,
    boundary_bytes=st.just(0.0),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(costs, min_size=1, max_size=4), st.integers(5, 40), st.sampled_from(Optimizer), st.integers(1, 2))
def test_nothing_that_fits_is_faster(chunks, gpu_bytes, optimizer, microbatches):
    base = StreamingPlan(optimizer=optimizer, microbatches=microbatches)
    every = [
        simulate_streaming(chunks, dataclasses.replace(base, window=window, pin=pin, checkpoint=checkpoint))
        for window in WINDOWS
        for pin in pins(len(chunks))
        for checkpoint in (False, True)
    ]
    fitting = [result.seconds for result in every if result.peak_bytes <= gpu_bytes]
    try:
        choice = choose(chunks, Machine(gpu_bytes=gpu_bytes), base=base, offers=False)
    except ConfigurationError:
        assert not fitting
        return
    assert choice.peak_bytes <= gpu_bytes
    assert min(fitting) <= choice.seconds <= min(fitting) * (1 + TOLERANCE)
    assert choice.seconds >= choice.compute_seconds


def test_few_of_many_plans_are_simulated() -> None:
    choice = choose(model(blocks=40), dataclasses.replace(MACHINE, gpu_bytes=24e9), offers=False)
    assert choice.simulated < 30  # of more than 600


def test_with_room_for_everything_all_chunks_stay_and_nothing_is_recomputed() -> None:
    chunks = [ChunkCost(forward=1, backward=2, transfer=9, gradient=9, kept_bytes=1e9, weight_bytes=1e9)] * 6
    choice = choose(chunks, Machine(gpu_bytes=80e9))
    assert describe(choice.plan) == "window=1, pin=6, activations=keep"
    assert choice.seconds == 6 * 3
    assert choice.binding == "GPU compute 100 % busy"


def test_the_binding_resource_is_named_with_how_busy_it_is() -> None:
    choice = choose(model(blocks=12, forward=1e-3), dataclasses.replace(MACHINE, gpu_bytes=6e9), offers=False)
    assert choice.binding.startswith("host memory bandwidth ")
    name, part = next(iter(choice.bounds.items()))
    assert part == max(choice.bounds.values())
    assert f"{name} {100 * part:.0f} % busy" in str(choice)


def test_of_equally_fast_plans_the_one_with_least_memory_is_chosen() -> None:
    chunks = [ChunkCost(forward=1, backward=2, transfer=0.1, weight_bytes=10)] * 6
    choice = choose(chunks, Machine(gpu_bytes=1000), base=StreamingPlan(train=False), offers=False)
    assert choice.plan.pin == 0
    assert choice.peak_bytes == 20


def test_more_memory_and_more_microbatches_are_offered_with_what_they_would_buy() -> None:
    choice = choose(model(blocks=12), dataclasses.replace(MACHINE, gpu_bytes=8e9))
    memory, more, batches = choice.offers
    assert memory.change == "1.5 times the memory for the plan (12.0 GB)"
    assert more.change == "2 times the memory for the plan (16.0 GB)"
    assert choice.seconds >= memory.seconds >= more.seconds
    assert choice.peak_bytes <= 8e9 < more.peak_bytes <= 16e9
    assert batches.change == "2 microbatches instead of 1"
    assert batches.seconds < choice.seconds
    assert "would buy" in str(choice)


def test_offers_of_memory_say_what_is_the_gpus_and_what_is_the_plans() -> None:
    machine = dataclasses.replace(MACHINE, gpu_bytes=8e9, gpu_whole=10e9)
    memory, more, _ = choose(model(), machine).offers
    assert memory.change == "1.5 times the GPU memory (15.0 GB, of which the plan may take 12.0 GB)"
    assert more.change == "2 times the GPU memory (20.0 GB, of which the plan may take 16.0 GB)"
    with pytest.raises(ConfigurationError, match=r"into 0\.50 GB of GPU memory \(a plan's part of 0\.60 GB\)"):
        choose(model(), Machine(gpu_bytes=0.5e9, gpu_whole=0.6e9))


def test_seconds_are_those_of_a_step_of_the_optimizer_and_of_a_batch_where_that_has_several() -> None:
    chunks = [ChunkCost(forward=1, backward=2, transfer=0.1, update=5)] * 4
    base = StreamingPlan(batches=4, microbatches=2, order=Order.CHUNK, optimizer=Optimizer.JOINED)
    side = choose(chunks, Machine(), base=base, checkpoint=[False], resident=[4])
    assert side.seconds == 4 * 2 * (4 + 8)  # resident: the GPU updates in no time
    assert "24 s per batch in the mean, 96 s per step of the optimizer (4 batches)" in str(side)
    assert side.offers[-1].change == "4 microbatches instead of 2"
    assert side.offers[-1].seconds == side.seconds  # half of a step with twice as many
    alone = choose(chunks, Machine(), base=dataclasses.replace(base, microbatches=1), resident=[4])
    assert alone.offers[-1].change == "8 accumulated batches instead of 4"
    assert "s per batch" not in str(choose(chunks, Machine()))


def test_memory_outside_of_chunks_counts() -> None:
    plenty = choose(model(), Machine(gpu_bytes=20e9), offers=False)
    scarce = choose(model(), Machine(gpu_bytes=20e9), beside=StepCost(base_bytes=15e9), offers=False)
    assert scarce.peak_bytes >= 15e9
    assert scarce.seconds >= plenty.seconds
    assert plenty.peak_bytes <= 20e9 >= scarce.peak_bytes


def test_little_memory_is_told_in_megabytes() -> None:
    small = [ChunkCost(forward=1, backward=2, weight_bytes=1e6)] * 3
    assert "1 MB of GPU memory" in str(choose(small, Machine(gpu_bytes=2e6), base=StreamingPlan(), offers=False))
    with pytest.raises(ConfigurationError, match=r"fits into 0\.5 MB of GPU memory: about 1 MB are needed"):
        choose(small, Machine(gpu_bytes=0.5e6))


def test_what_cannot_fit_is_refused_with_both_numbers_and_a_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"fits into 0\.50 GB .* about 1\.\d\d GB are needed\. Use smaller"):
        choose(model(), Machine(gpu_bytes=0.5e9))
    side = StreamingPlan(microbatches=64, order=Order.CHUNK)
    with pytest.raises(ConfigurationError, match="Use fewer microbatches at once, or smaller ones, or smaller chunks"):
        choose(model(), Machine(gpu_bytes=0.5e9), base=side)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windows": ()}, r"windows=\(\): a list with at least one"),
        ({"windows": 3}, "windows=3: a list"),
        ({"windows": (2, float("nan"))}, "window=nan"),
        ({"resident": ()}, r"resident=\(\): a list"),
        ({"resident": ("all",)}, "pin=.*'all'"),
        ({"checkpoint": ()}, r"checkpoint=\(\): a list"),
        ({"checkpoint": True}, "checkpoint=True: a list"),
        ({"checkpoint": ("keep",)}, "checkpoint='keep'"),
    ],
)
def test_nothing_to_choose_from_is_refused_by_name(options, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose(model(), MACHINE, **options)

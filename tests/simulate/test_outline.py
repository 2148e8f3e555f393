"""Steps of many microbatches, outlined: the length and the peak that walking through each of them gives."""

from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest

from ramtorch_core.simulate import (
    Accumulate,
    ChunkCost,
    Machine,
    Optimizer,
    Order,
    StepCost,
    StreamingPlan,
    choose,
    simulate_streaming,
)
from ramtorch_core.simulate.streaming import outline


@pytest.mark.parametrize("seed", range(3))
def test_an_outline_is_what_walking_through_every_microbatch_gives(seed: int) -> None:
    random = Random(seed)

    def some(most: float = 5) -> float:
        return random.choice([0, random.uniform(0, most)])

    def amounts(kind: type[Any]) -> Any:
        return kind(**{field.name: some() for field in fields(kind) if field.name != "awaited"})

    for _ in range(40):
        chunks = [amounts(ChunkCost) for _ in range(random.randint(1, 4))]
        beside = replace(amounts(StepCost), awaited=random.random() < 0.5)
        plan = StreamingPlan(
            window=random.randint(1, 3),
            pin=random.randint(0, len(chunks)),
            checkpoint=random.random() < 0.5,
            microbatches=random.choice([1, 3, 4, 9]),
            batches=random.choice([1, 2, 7]),
            order=random.choice(list(Order)),
            optimizer=random.choice(list(Optimizer)),
            accumulate=random.choice(list(Accumulate)),
            train=random.random() < 0.8,
            staging=random.choice([1, 4, None]),
            recast=random.random() < 0.3,
            clip=random.random() < 0.3,
            ahead=random.random(),
        )
        machine = Machine(
            both_ways=random.choice([None, 3.0]),
            host_memory=random.choice([None, 4.0]),
            asynchronous=random.random() < 0.8,
        )
        walked, found = simulate_streaming(chunks, plan, machine, beside), outline(chunks, plan, machine, beside)
        assert found.seconds == pytest.approx(walked.seconds, rel=1e-9), plan
        assert found.peak_bytes == pytest.approx(walked.peak_bytes, rel=1e-9), plan


@pytest.mark.parametrize("order", Order)
def test_knobs_are_chosen_for_hundreds_of_microbatches(order: Order) -> None:
    chunk = ChunkCost(forward=1, backward=2, transfer=2.5, gradient=1, update=3, weight_bytes=4, kept_bytes=1e-3)
    base = StreamingPlan(microbatches=300, order=order, optimizer=Optimizer.OVERLAPPED)
    choice = choose([chunk] * 8, Machine(gpu_bytes=30), base=base)
    assert choice.seconds == pytest.approx(simulate_streaming([chunk] * 8, choice.plan).seconds)
    assert len(choice.offers) == 3

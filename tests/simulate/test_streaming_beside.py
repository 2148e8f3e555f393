"""What a step costs beside its chunks, what resident chunks cost besides, and a device that copies as it computes."""

from collections.abc import Container
from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.simulate import (
    Accumulate,
    ChunkCost,
    Machine,
    Optimizer,
    Order,
    StepCost,
    StreamingPlan,
    simulate_streaming,
)
from ramtorch_core.simulate.choose import _least_bytes, _least_seconds

KEEP = StreamingPlan(checkpoint=False)
PLAIN = [ChunkCost(forward=1, backward=2)] * 2


def seconds(chunks: list[ChunkCost], plan: StreamingPlan, beside: StepCost | None = None, **machine: bool) -> float:
    return simulate_streaming(chunks, plan, Machine(**machine), beside).seconds  # type: ignore[arg-type]


def peak(chunks: list[ChunkCost], plan: StreamingPlan, beside: StepCost | None = None) -> float:
    return simulate_streaming(chunks, plan, beside=beside).peak_bytes


def test_the_loss_is_compute_of_each_microbatch() -> None:
    for count in (1, 3):
        plan = replace(KEEP, microbatches=count)
        assert seconds(PLAIN, plan, StepCost(loss=1.5)) == count * (6 + 1.5)
        assert seconds(PLAIN, replace(plan, train=False), StepCost(loss=1.5)) == count * (2 + 1.5)


def test_the_host_takes_its_time_before_each_microbatch_and_between_steps() -> None:
    beside = StepCost(issue_begin=0.5, between=3)
    for count in (1, 2):
        assert seconds(PLAIN, replace(KEEP, microbatches=count), beside) == 3 + count * (6 + 0.5)


def test_the_loss_is_issued_while_forwards_are_still_computed() -> None:
    chunks = [ChunkCost(forward=4, backward=1, issue_forward=1, issue_backward=1)] * 2
    assert seconds(chunks, KEEP, StepCost(issue_loss=5)) == 8 + 2  # the host has issued it after 7
    assert seconds(chunks, KEEP, StepCost(issue_loss=9)) == 2 + 9 + 2


def test_the_host_waits_for_copies_of_masters_before_it_issues_the_loss() -> None:
    chunk = ChunkCost(forward=1, backward=1, issue_forward=0.1, issue_backward=0.1, transfer=5, weight_bytes=4)
    for master, expected in ((4, 5 + 5 + 3 + 2), (8, 5 + 5 + 1 + 2)):  # its own shadow, or not
        chunks = [replace(chunk, master_bytes=master)] * 2
        assert seconds(chunks, KEEP, StepCost(issue_loss=3)) == pytest.approx(expected)


def test_the_host_waits_for_all_compute_only_where_what_stays_is_trained() -> None:
    beside = StepCost(between=2)
    resident = replace(KEEP, pin=2)
    assert seconds(PLAIN, resident, beside) == 6 + 2
    assert seconds(PLAIN, resident, replace(beside, awaited=False)) == 6


def test_a_recompute_may_be_shorter_than_the_forward() -> None:
    chunks = [ChunkCost(forward=3, recompute=2, backward=4)] * 2
    assert seconds(chunks, replace(KEEP, checkpoint=True)) == 2 * (3 + 2 + 4)
    assert seconds(chunks, KEEP) == 2 * (3 + 4)


def test_resident_chunks_cast_their_weights_and_collect_their_gradients() -> None:
    chunks = [ChunkCost(forward=3, backward=4, cast=0.5, add=0.25)]
    plan = replace(KEEP, pin=1)
    assert seconds(chunks, KEEP) == 7
    assert seconds(chunks, plan) == 7 + 2 * 0.5
    assert seconds(chunks, replace(plan, checkpoint=True)) == 10 + 3 * 0.5
    assert seconds(chunks, replace(plan, microbatches=3)) == 3 * (7 + 2 * 0.5) + 2 * 0.25


def test_masters_that_may_be_written_are_cast_before_their_first_copy() -> None:
    chunks = [ChunkCost(forward=1, backward=2, transfer=1, recast=4, weight_bytes=1, master_bytes=2)]
    assert seconds(chunks, KEEP) == 1 + 1 + 2
    assert seconds(chunks, replace(KEEP, recast=True)) == 4 + 1 + 1 + 2
    assert seconds(chunks, replace(KEEP, recast=True, microbatches=2)) == 4 + 2 * (1 + 1 + 2)
    assert seconds(chunks, replace(KEEP, recast=True, pin=1)) == 1 + 2


def test_a_device_that_is_not_asynchronous_copies_and_computes_in_turns() -> None:
    chunks = [ChunkCost(forward=1, backward=2, transfer=3, gradient=4, update=1)] * 3
    plan = replace(KEEP, window=2, optimizer=Optimizer.JOINED)
    found = simulate_streaming(chunks, plan, Machine(asynchronous=False))
    assert found.seconds == 3 * (1 + 2 + 4) + 4 * 3 + 1  # four transfers, and the last update
    assert found.compute * found.seconds == pytest.approx(9)
    assert found.h2d * found.seconds == pytest.approx(4 * 3)
    assert found.d2h * found.seconds == pytest.approx(3 * 4)
    assert simulate_streaming(chunks, plan).seconds < found.seconds


# ------------------------------------------------------------------ memory

SIZES = ChunkCost(
    forward=1, backward=2, weight_bytes=1, master_bytes=2, gradient_bytes=10, state_bytes=4, kept_bytes=100
)


def test_memory_counts_in_the_phase_that_needs_it() -> None:
    chunks, plan = [replace(SIZES, gradient_bytes=0)] * 3, replace(KEEP, window=1)
    base = 1 + 300
    assert peak(chunks, plan) == base
    for name, more in (("base_bytes", 7), ("loss_bytes", 7), ("turn_bytes", 7), ("first_bytes", 7)):
        assert peak(chunks, plan, StepCost(**{name: more})) == base + 7  # even where it takes no time
    assert peak(chunks, plan, StepCost(work_bytes=99)) == base  # in other visits activations are gone
    assert peak(chunks, plan, StepCost(work_bytes=101)) == base + 1
    assert peak(chunks, plan, StepCost(bounce_bytes=7)) == base
    assert peak(chunks, replace(plan, microbatches=2), StepCost(bounce_bytes=7)) == base + 7


def test_gradients_that_are_cast_or_added_on_their_way_to_the_host_pass_through_a_buffer() -> None:
    alike = [replace(SIZES, kept_bytes=0)] * 2
    cast = [alike[0], replace(SIZES, kept_bytes=0, produced_bytes=5)]
    beside = StepCost(bounce_bytes=7)

    def buffer(chunks: list[ChunkCost], plan: StreamingPlan, **others: bool) -> float:
        return peak(chunks, plan, replace(beside, **others)) - peak(chunks, plan)

    for optimizer in (Optimizer.NONE, Optimizer.PUBLISHED):
        plan = replace(KEEP, optimizer=optimizer)
        assert buffer(alike, plan) == 0
        assert buffer(cast, plan) == 7
        assert buffer(cast, replace(plan, pin=(1,))) == 0  # what is resident does not leave
        assert buffer(cast, replace(plan, train=False)) == 0
    several = replace(KEEP, microbatches=2)
    assert buffer(alike, several) == 7
    assert buffer(cast, replace(several, accumulate=Accumulate.GPU)) == 0  # sums are in the master's dtype
    assert buffer(alike, replace(several, pin=2)) == 7  # of tensors in no chunk
    assert buffer(alike, replace(several, pin=2), awaited=False) == 0


def test_gradients_keep_their_place_until_two_more_have_left() -> None:
    chunks = [replace(SIZES, kept_bytes=0)] * 5
    assert peak(chunks, replace(KEEP, window=1)) == 1 + 3 * 10  # though copies take no time
    produced = [replace(chunk, produced_bytes=5) for chunk in chunks]
    assert peak(produced, replace(KEEP, window=1)) == 1 + 3 * 5


def test_a_forward_meets_the_gradients_of_the_step_before_and_what_autocast_has_cast() -> None:
    chunk = replace(SIZES, kept_bytes=0, resident_gradient_bytes=20)
    plan = StreamingPlan(pin=3, optimizer=Optimizer.OVERLAPPED)
    stays = 3 * (2 + 4)
    assert peak([chunk] * 3, plan) == stays + 3 * 20 + 3 * 1
    assert peak([chunk] * 3, plan, StepCost(loss_bytes=50)) == stays + 3 * 20 + 3 * 1 + 50
    assert peak([chunk] * 3, plan, StepCost(turn_bytes=70)) == stays + 70  # both are gone
    passing = [replace(chunk, passing_bytes=11)] * 3
    assert peak(passing, plan) == stays + 3 * 20 + 1 + 11  # the last of them is on its way
    assert peak([chunk] * 3, plan, StepCost(step_bytes=30)) == stays + 3 * 20 + 30


def test_no_step_is_shorter_nor_smaller_than_the_bounds_by_which_plans_are_left_out() -> None:
    random = Random(0)

    def some(most: float = 5) -> float:
        return random.choice([0, random.uniform(0, most)])

    def amounts(kind: type[Any], without: Container[str] = ()) -> Any:
        return kind(**{field.name: some() for field in fields(kind) if field.name not in without})

    for _ in range(150):
        chunks = [amounts(ChunkCost) for _ in range(random.randint(1, 6))]
        beside = amounts(StepCost, {"awaited"})
        plan = StreamingPlan(
            window=random.randint(1, 3),
            pin=random.randint(0, len(chunks)),
            checkpoint=random.random() < 0.5,
            microbatches=random.randint(1, 3),
            batches=random.randint(1, 2),
            order=random.choice(list(Order)),
            optimizer=random.choice(list(Optimizer)),
            accumulate=random.choice(list(Accumulate)),
            train=random.random() < 0.8,
            recast=random.random() < 0.3,
            clip=random.random() < 0.3,
            ahead=random.random(),
        )
        beside = replace(beside, awaited=random.random() < 0.5)
        machine = Machine(
            both_ways=random.choice([None, 3.0]),
            host_memory=random.choice([None, 4.0]),
            asynchronous=random.random() < 0.8,
        )
        found = simulate_streaming(chunks, plan, machine, beside)
        assert found.seconds >= _least_seconds(chunks, machine, plan, beside) * (1 - 1e-9)
        assert found.peak_bytes >= _least_bytes(chunks, plan, beside) * (1 - 1e-9)
        assert found.seconds >= beside.between * (1 - 1e-9)
        assert all(part <= 1 + 1e-6 for part in (found.compute, found.h2d, found.d2h, *found.shared.values()))


def test_amounts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="loss_bytes=-1"):
        StepCost(loss_bytes=-1)
    with pytest.raises(ConfigurationError, match="between=nan"):
        StepCost(between=float("nan"))

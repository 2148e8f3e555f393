"""Streaming, simulated: the host, which issues visits, adds gradients up and updates; and the reference work."""

from dataclasses import replace
from typing import Any

import pytest

from ramtorch_core.simulate import (
    ChunkCost,
    Machine,
    Optimizer,
    Order,
    Recipe,
    StepCost,
    StreamingPlan,
    StreamingResult,
    chunk_cost,
    simulate_streaming,
)


def starts(result: StreamingResult, resource: str) -> dict[str, float]:
    return {span.label: span.start for span in result.timeline.spans if span.resource == resource}


def test_a_device_that_is_faster_than_the_host_waits_for_it() -> None:
    chunk = ChunkCost(forward=1, backward=1, issue_forward=3, issue_recompute=3, issue_backward=5)
    plan = StreamingPlan(window=4, checkpoint=False)
    assert simulate_streaming([chunk] * 4, plan, steps=1).seconds == 4 * (3 + 5)
    again = simulate_streaming([chunk] * 4, replace(plan, checkpoint=True), steps=1)
    assert again.seconds == 4 * (3 + 5 + 3)
    assert again.stall == again.seconds - 4 * 3
    assert {gap.reason for gap in again.timeline.gaps} == {"for the host to issue it"}


def test_a_resident_chunk_takes_the_host_what_its_launches_take() -> None:
    chunk = ChunkCost(forward=1, backward=1, issue_forward=3, issue_recompute=3, issue_backward=5)
    launched = replace(chunk, launch_forward=2, launch_backward=4)
    for pin, cost, expected in ((4, launched, 4 * 6), (4, chunk, 4 * 8), (0, launched, 4 * 8), (2, launched, 2 * 14)):
        plan = StreamingPlan(window=4, pin=pin, checkpoint=False)
        assert simulate_streaming([cost] * 4, plan, steps=1).seconds == expected
        again = simulate_streaming([cost] * 4, replace(plan, checkpoint=True), steps=1)
        assert again.seconds == expected + 3 * 4 - (cost is launched) * pin


def test_a_host_that_is_faster_than_the_device_costs_nothing() -> None:
    chunk = ChunkCost(forward=3, backward=6, transfer=2, gradient=1, update=4)
    for optimizer in Optimizer:
        plan = StreamingPlan(optimizer=optimizer)
        plain = simulate_streaming([chunk] * 5, plan)
        issued = simulate_streaming([replace(chunk, issue_forward=1, issue_backward=1)] * 5, plan)
        assert issued.seconds == pytest.approx(plain.seconds, rel=0.05)
        assert issued.seconds >= plain.seconds


def test_the_host_issues_a_visit_once_the_update_of_its_chunk_is_over() -> None:
    chunk = ChunkCost(forward=1, backward=1, update=10, issue_forward=2, issue_backward=2)
    plan = StreamingPlan(window=2, checkpoint=False, optimizer=Optimizer.OVERLAPPED)
    result = simulate_streaming([chunk] * 2, plan)
    (end,) = (span.end for span in result.timeline.spans if span.label == "u0")
    assert starts(result, "issuing")["iF0"] + result.seconds == end


def test_no_update_begins_before_the_norm_of_all_gradients_is_known() -> None:
    chunk = ChunkCost(forward=1, backward=2, gradient=3, update=4)
    free = StreamingPlan(window=2, checkpoint=False, optimizer=Optimizer.OVERLAPPED, staging=1)
    results = [simulate_streaming([chunk] * 3, replace(free, clip=clip), steps=1) for clip in (False, True)]
    begun, clipped = (starts(result, "host") for result in results)
    arrived = max(span.end for span in results[1].timeline.spans if span.resource == "D2H")
    assert begun["u2"] == 3 + 2 + 3
    assert [clipped[f"u{i}"] for i in range(3)] == [arrived, arrived + 4, arrived + 8]  # the lowest goes first
    assert arrived == 3 + 2 + 3 * 3  # nothing waits for a buffer: each gradient has one


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0.0, {"u0": 14, "u1": 18, "u2": 22}),
        (0.5, {"k2": 8, "u2": 9, "u0": 14, "u1": 18}),  # there is room for one of three
        (1.0, {"k2": 8, "u2": 9, "k1": 13, "u1": 14, "u0": 18}),  # the third is not begun when the norm is known
    ],
)
def test_updates_run_ahead_of_the_norm_from_copies_as_long_as_there_is_room(ahead: float, expected: Any) -> None:
    chunk = ChunkCost(forward=1, backward=2, gradient=3, update=4, save=1, saved_bytes=12)
    plan = StreamingPlan(window=2, checkpoint=False, optimizer=Optimizer.OVERLAPPED, staging=1, clip=True, ahead=ahead)
    result = simulate_streaming([chunk] * 3, plan, steps=1)
    assert starts(result, "host") == expected  # gradients arrive at 8, 11 and 14, the norm is known at 14
    assert result.seconds == max(expected.values()) + 4


def test_what_has_not_begun_to_run_ahead_when_all_gradients_are_there_waits_for_the_norm() -> None:
    chunk = ChunkCost(forward=1, backward=2, gradient=1, update=4, save=1)
    plan = StreamingPlan(window=3, pin=(0,), checkpoint=False, optimizer=Optimizer.OVERLAPPED, clip=True, ahead=0.7)
    chunks = [replace(chunk, backward=20), chunk, chunk, chunk]
    result = simulate_streaming(chunks, plan, beside=StepCost(awaited=False), steps=1)
    # Gradients arrive at 7, 9 and 11, and the resident chunk's backward ends at 30. The lowest finds no room.
    assert starts(result, "host") == {"k3": 7, "u3": 8, "u1": 30, "u2": 34}


def test_larger_chunks_take_more_of_the_room_for_copies_and_the_first_without_room_ends_it() -> None:
    chunk = ChunkCost(forward=1, backward=1, gradient=1, update=1, save=1)
    chunks = [replace(chunk, saved_bytes=size) for size in (1, 1, 5, 3)]
    plan = StreamingPlan(window=4, optimizer=Optimizer.JOINED, clip=True, ahead=0.7)  # room for 7
    copied = [label for label in starts(simulate_streaming(chunks, plan, steps=1), "host") if label[0] == "k"]
    assert copied == ["k3"]
    unsized = [replace(chunk, saved_bytes=0)] * 4  # then chunks are counted
    assert [label for label in starts(simulate_streaming(unsized, plan, steps=1), "host") if label[0] == "k"] == [
        "k3",
        "k2",
    ]


def test_copies_for_updates_that_run_ahead_write_to_the_hosts_memory() -> None:
    chunk = ChunkCost(forward=1, backward=1, update=1, save=1, saved_bytes=12)
    plan = StreamingPlan(optimizer=Optimizer.OVERLAPPED, clip=True, ahead=1.0)
    result = simulate_streaming([chunk] * 2, plan, Machine(host_memory=6), steps=1)
    (copy,) = (span for span in result.timeline.spans if span.label == "k1")
    assert copy.end - copy.start == 12 / 6


def test_an_update_comes_after_the_last_of_several_batches_to_which_the_sum_comes_back() -> None:
    chunk = ChunkCost(forward=1, backward=1, gradient=2, recall=3, update=5)
    plan = StreamingPlan(
        window=1, checkpoint=False, microbatches=2, batches=2, order=Order.CHUNK, optimizer=Optimizer.JOINED
    )
    result = simulate_streaming([chunk], plan, steps=1)
    spans = {(s.resource, s.label): (s.start, s.end) for s in result.timeline.spans}
    assert spans == {
        ("compute", "F0.0"): (0, 1),
        ("compute", "F0.1"): (1, 2),
        ("compute", "B0.0"): (2, 3),
        ("compute", "B0.1"): (3, 4),
        ("compute", "g0"): (9, 12),  # before the second backward of the second batch
        ("compute", "F0.2"): (6, 7),
        ("compute", "F0.3"): (7, 8),
        ("compute", "B0.2"): (8, 9),
        ("compute", "B0.3"): (12, 13),
        ("D2H", "g0"): (13, 15),
        ("host", "u0"): (15, 20),
    }
    assert result.seconds == 20


def test_batches_one_after_the_other_are_microbatches_one_after_the_other() -> None:
    chunk = ChunkCost(forward=1, backward=2, transfer=1, gradient=1, accumulate=2, update=3, gradient_bytes=4)
    for optimizer in Optimizer:
        plan = StreamingPlan(optimizer=optimizer, microbatches=4)
        batches = replace(plan, microbatches=1, batches=4)
        one, other = (simulate_streaming([chunk] * 3, each) for each in (plan, batches))
        assert (one.seconds, one.peak_bytes) == (other.seconds, other.peak_bytes)


def test_where_gradients_are_clipped_updates_leave_the_gpu_and_sums_are_published() -> None:
    chunk = ChunkCost(forward=1, backward=2, gradient=3, update=4, device_update=1, state_in=2, state_out=2)
    plan = StreamingPlan(window=2, checkpoint=False, optimizer=Optimizer.GPU, clip=True)
    overlapped, published = (replace(plan, optimizer=o) for o in (Optimizer.OVERLAPPED, Optimizer.PUBLISHED))
    assert simulate_streaming([chunk] * 3, plan).seconds == simulate_streaming([chunk] * 3, overlapped).seconds
    several = [replace(each, microbatches=2) for each in (overlapped, published)]
    assert len({simulate_streaming([chunk] * 3, each).seconds for each in several}) == 1
    assert replace(several[0], order=Order.CHUNK).updates is Optimizer.OVERLAPPED


def test_a_sum_on_the_host_needs_no_staging_buffer() -> None:
    chunk = ChunkCost(forward=1, backward=1, gradient=0.1, update=10)
    plan = StreamingPlan(checkpoint=False, microbatches=2, optimizer=Optimizer.OVERLAPPED, staging=1)
    few, many = (simulate_streaming([chunk] * 6, replace(plan, staging=count), steps=1) for count in (1, 6))
    assert few.seconds == many.seconds
    alone = replace(plan, microbatches=1)
    few, many = (simulate_streaming([chunk] * 6, replace(alone, staging=count), steps=1) for count in (1, 6))
    assert starts(few, "compute")["B0"] > starts(many, "compute")["B0"]


def test_adding_a_gradient_takes_what_was_measured_or_as_long_as_its_copy() -> None:
    chunk = ChunkCost(forward=1, backward=1, gradient=2)
    plan = StreamingPlan(checkpoint=False, microbatches=2)
    for cost, seconds in ((chunk, 2), (replace(chunk, accumulate=7), 7)):
        result = simulate_streaming([cost], plan, steps=1)
        assert [span.seconds for span in result.timeline.spans if span.resource == "D2H"] == [2, seconds]


def test_a_backward_is_over_when_the_host_has_issued_all_of_it() -> None:
    chunk = ChunkCost(forward=1, backward=1, gradient=1, update=1)
    slow = replace(chunk, issue_backward=50)
    plan = StreamingPlan(pin=(0,), checkpoint=False, optimizer=Optimizer.PUBLISHED)
    result = simulate_streaming([slow, chunk], plan, steps=1)
    issued = max(span.end for span in result.timeline.spans if span.label == "iB0")
    assert issued == 50
    assert starts(result, "host")["u1"] >= issued


def test_the_lowest_chunk_goes_first_once_every_gradient_has_arrived() -> None:
    chunk = ChunkCost(forward=1, backward=1, gradient=3, update=4)
    result = simulate_streaming([chunk] * 3, StreamingPlan(optimizer=Optimizer.OVERLAPPED, checkpoint=False), steps=1)
    begun, arrived = starts(result, "host"), {s.label: s.end for s in result.timeline.spans if s.resource == "D2H"}
    assert begun["u1"] < arrived["g0"] < begun["u0"]
    chunk = replace(chunk, gradient=0.1, update=10)
    result = simulate_streaming([chunk] * 3, StreamingPlan(optimizer=Optimizer.OVERLAPPED, checkpoint=False), steps=1)
    begun = starts(result, "host")
    assert begun["u2"] < begun["u0"] < begun["u1"]


# ------------------------------------------------------------------ the reference work

MACHINE = Machine(
    h2d=55e9, d2h=55e9, both_ways=100e9, host_memory=150e9, host_update=28 / 123.9e9, gpu_update=9e-12
)  # one H200 with 16 cores; AdamW alone moves 123.9 GB/s


def reference(part: float, *, wide: bool) -> list[ChunkCost]:
    """The stack of docs/performance.md: compute is that of a resident step of 16384 tokens, of which this is a part."""
    gradient = 4 if wide else 2
    recipe = Recipe(weight=2, gradient=gradient, update=24 + gradient + 2)
    block = chunk_cost(201.4e6, MACHINE, forward=0.01135 * part, backward=0.0227 * part, recipe=recipe)
    head = chunk_cost(131e6, MACHINE, forward=0.0074 * part, backward=0.0148 * part, recipe=recipe)
    exact = Recipe(weight=4, gradient=4, update=28)
    embedding = chunk_cost(131e6, MACHINE, forward=0.0005 * part, backward=0.001 * part, recipe=exact)
    return [embedding, *[block] * 12, head]


@pytest.mark.parametrize(
    ("part", "wide", "plan", "measured"),
    [
        (1, True, StreamingPlan(), 0.622),
        (1, False, StreamingPlan(optimizer=Optimizer.OVERLAPPED), 0.778),
        ((0.1025 - 0.024) / 0.571, False, StreamingPlan(optimizer=Optimizer.OVERLAPPED), 0.705),
        (1, True, StreamingPlan(optimizer=Optimizer.OVERLAPPED, microbatches=4, order=Order.CHUNK), 2.329),
        (1, True, StreamingPlan(optimizer=Optimizer.OVERLAPPED, microbatches=4), 3.174),
    ],
    ids=["forward and backward", "16k tokens", "2k tokens", "64k tokens, by chunk", "64k tokens, accumulated"],
)
def test_the_reference_work_takes_about_as_long_as_it_was_measured(part, wide, plan, measured) -> None:
    chunks = reference(part, wide=wide)
    tolerance = 0.1
    if plan.microbatches > 1 and plan.order is Order.MICROBATCH:  # measured when sums came in and left in turns
        chunks = [replace(chunk, accumulate=2 * chunk.gradient) for chunk in chunks]
        tolerance = 0.13  # what adding on the device costs besides the copies was not measured there
    assert simulate_streaming(chunks, plan, MACHINE).seconds == pytest.approx(measured, rel=tolerance)

"""Streaming, simulated: timelines worked out by hand."""

import itertools
import re
import warnings

import pytest

from ramtorch_core.engine.chunks import choose_resident
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.simulate import (
    Accumulate,
    ChunkCost,
    Machine,
    Optimizer,
    Order,
    StreamingPlan,
    StreamingResult,
    simulate_streaming,
)
from ramtorch_core.simulate.costs import resident_chunks
from ramtorch_core.simulate.lane import GRADIENTS_IN_FLIGHT


def spans(result: StreamingResult, resource: str) -> list[tuple[str, float, float]]:
    return [(span.label, span.start, span.end) for span in result.timeline.spans if span.resource == resource]


def keep(**knobs: object) -> StreamingPlan:
    return StreamingPlan(checkpoint=False, **knobs)  # type: ignore[arg-type]


def test_a_cold_step_of_three_chunks_through_two_slots_is_as_worked_out_by_hand() -> None:
    chunks = [ChunkCost(forward=2, backward=4, transfer=3)] * 3
    result = simulate_streaming(chunks, keep(window=2), steps=1)
    # Chunk 2 takes the slot of chunk 0, which is needed again last; chunk 0 comes back once B2 has freed that slot.
    assert spans(result, "H2D") == [("t0", 0, 3), ("t1", 3, 6), ("t2", 6, 9), ("t0", 15, 18)]
    assert spans(result, "compute") == [
        ("F0", 3, 5),
        ("F1", 6, 8),
        ("F2", 9, 11),
        ("B2", 11, 15),
        ("B1", 15, 19),
        ("B0", 19, 23),
    ]
    assert result.seconds == 23
    assert result.stall == 3 + 1 + 1
    assert {gap.reason for gap in result.timeline.gaps} == {"for a transfer"}
    assert result.compute == 18 / 23
    assert result.transfers == 4


def test_one_slot_never_overlaps_a_transfer_with_compute() -> None:
    chunks = [ChunkCost(forward=2, backward=4, transfer=3)] * 3
    result = simulate_streaming(chunks, keep(window=1), steps=1)
    # F0 F1 F2 and B2 share the transfers of 0, 1, 2; then 1 and 0 come back.
    assert result.seconds == 3 * (3 + 2) + 4 + 2 * (3 + 4)


def test_a_checkpoint_adds_one_forward_to_each_backward() -> None:
    chunks = [ChunkCost(forward=2, backward=4)] * 5
    assert simulate_streaming(chunks, keep(window=2)).seconds == 5 * 6
    assert simulate_streaming(chunks, StreamingPlan(window=2)).seconds == 5 * 8


@pytest.mark.parametrize(
    ("optimizer", "period"),
    [
        (Optimizer.NONE, 1 + 2 + 1 + 4),  # forward, backward, gradient leaves, weights come for the next step
        (Optimizer.PUBLISHED, 1 + 2 + 1 + 3 + 4),
        (Optimizer.OVERLAPPED, 1 + 2 + 1 + 3 + 4),
        (Optimizer.GPU, 1 + 2 + 0.5 + 1.5 + 4),  # update on the GPU, its state goes back
    ],
)
def test_a_single_chunk_has_nothing_to_overlap_with(optimizer: Optimizer, period: float) -> None:
    chunk = ChunkCost(
        forward=1, backward=2, transfer=4, gradient=1, update=3, device_update=0.5, state_in=1, state_out=1.5
    )
    assert simulate_streaming([chunk], keep(optimizer=optimizer)).seconds == period


def test_after_backward_the_lowest_chunk_is_updated_first_and_the_next_forward_waits_for_it_alone() -> None:
    chunks = [ChunkCost(forward=1, backward=1, update=5)] * 3
    cold = simulate_streaming(chunks, keep(optimizer=Optimizer.OVERLAPPED), steps=1)
    assert spans(cold, "host") == [("u2", 4, 9), ("u1", 14, 19), ("u0", 9, 14)]
    # Steady: F0, then F1 waits for u1 (5 s), F2, B2 B1 B0 (6 s in all); u2 began with B1, u0 follows: 5 + 5 - 2.
    overlapped = simulate_streaming(chunks, keep(optimizer=Optimizer.OVERLAPPED))
    joined = simulate_streaming(chunks, keep(optimizer=Optimizer.JOINED))
    published = simulate_streaming(chunks, keep(optimizer=Optimizer.PUBLISHED))
    assert overlapped.seconds == 18
    assert joined.seconds == 4 + 15
    assert published.seconds == 6 + 15
    assert {gap.reason for gap in joined.timeline.gaps} == {"for an update"}


def test_while_backward_goes_on_updates_come_in_the_order_of_their_gradients() -> None:
    chunks = [ChunkCost(forward=1, backward=4, update=1)] * 4
    result = simulate_streaming(chunks, keep(optimizer=Optimizer.OVERLAPPED), steps=1)
    assert [start for _, start, _ in spans(result, "host")] == [8, 12, 16, 20]


def test_a_backward_waits_for_the_updates_when_the_staging_buffers_are_full() -> None:
    chunks = [ChunkCost(forward=1, backward=1, update=5)] * 4
    free = simulate_streaming(chunks, keep(optimizer=Optimizer.JOINED, staging=None), steps=1)
    bound = simulate_streaming(chunks, keep(optimizer=Optimizer.JOINED, staging=2), steps=1)
    assert [start for _, start, _ in spans(free, "compute")[4:]] == [4, 5, 6, 7]
    # The gradient of chunk 1 waits from 7 until u3 ends at 10; B0 begins then, and its gradient waits for u2.
    assert [start for _, start, _ in spans(bound, "compute")[4:]] == [4, 5, 6, 10]
    assert spans(bound, "host") == [("u3", 5, 10), ("u2", 10, 15), ("u1", 20, 25), ("u0", 15, 20)]
    assert free.seconds == bound.seconds == 25


def test_compute_waits_before_a_third_gradient_would_be_on_its_way() -> None:
    chunks = [ChunkCost(forward=1, backward=1, gradient=10)] * 5
    result = simulate_streaming(chunks, keep(), steps=1)
    backward = spans(result, "compute")[5:]
    leaving = spans(result, "D2H")
    for position, (_, start, _) in enumerate(backward):
        if position > GRADIENTS_IN_FLIGHT:
            assert start >= leaving[position - 1 - GRADIENTS_IN_FLIGHT][2]
    assert {gap.reason for gap in result.timeline.gaps} == {"for gradients to leave"}


def test_gradients_of_later_microbatches_cross_the_bus_each_time_on_the_host_and_once_on_the_gpu() -> None:
    chunks = [ChunkCost(forward=1, backward=1, gradient=1, gradient_bytes=8)] * 6
    on_host = simulate_streaming(chunks, keep(microbatches=4), steps=1)
    on_gpu = simulate_streaming(chunks, keep(microbatches=4, accumulate=Accumulate.GPU), steps=1)
    by_chunk = simulate_streaming(chunks, keep(microbatches=4, order=Order.CHUNK), steps=1)
    moved = [sum(end - start for _, start, end in spans(result, "D2H")) for result in (on_host, on_gpu, by_chunk)]
    assert moved == [6 * 4, 6, 6]
    assert on_gpu.peak_bytes == 6 * 8
    assert on_host.peak_bytes == (GRADIENTS_IN_FLIGHT + 1) * 8


def test_a_sum_that_comes_in_while_it_leaves_shares_both_ways_with_what_else_crosses() -> None:
    """8 bytes in and 8 out take a second at 8 bytes per second each way, and two where both share that."""
    chunk = ChunkCost(forward=1, backward=1, gradient=1, gradient_bytes=8)

    def seconds(machine: Machine) -> list[float]:
        found = simulate_streaming([chunk], keep(microbatches=2), machine, steps=1)
        return [end - start for _, start, end in spans(found, "D2H")]

    assert seconds(Machine(h2d=8, d2h=8)) == seconds(Machine(h2d=8, d2h=8, both_ways=16)) == [1, 1]
    assert seconds(Machine(h2d=8, d2h=8, both_ways=8)) == [1, 2]
    assert seconds(Machine(h2d=4, d2h=8)) == [1, 2]


def test_weights_and_sums_share_the_way_in() -> None:
    chunk = ChunkCost(forward=1, backward=1, gradient=4, gradient_bytes=32, transfer=1, weight_bytes=8)
    plan = keep(microbatches=3, window=1)
    alone, shared = (simulate_streaming([chunk] * 2, plan, machine, steps=1) for machine in (None, Machine(h2d=8)))
    copies = [[end - start for _, start, end in spans(found, "H2D")] for found in (alone, shared)]
    assert set(copies[0]) == {1}
    assert max(copies[1]) == 2


def test_optimizer_state_and_sums_share_the_way_in() -> None:
    """From second 14 on: 6 bytes of state are still to come then, and take twice as long beside the sum."""
    chunk = ChunkCost(
        forward=1, backward=2, transfer=1, weight_bytes=1, gradient=10, gradient_bytes=10, state_in=10, state_bytes=10
    )
    plan = keep(microbatches=3, window=1, optimizer=Optimizer.GPU)
    alone, shared = (simulate_streaming([chunk], plan, machine, steps=1) for machine in (None, Machine(h2d=1)))
    assert spans(alone, "H2D")[-1] == ("s0", 10, 20)
    assert spans(alone, "D2H") == [("g0", 4, 14), ("g0", 14, 24), ("g0", 24, 34)]
    assert spans(shared, "H2D")[-1] == ("s0", 10, 26)
    assert spans(shared, "D2H") == [("g0", 4, 14), ("g0", 14, 30), ("g0", 30, 40)]


def test_a_sum_that_is_brought_back_shares_the_way_in() -> None:
    """From second 7 on, when 5 bytes of state are still to come; its 4 bytes take twice as long beside them."""
    chunk = ChunkCost(forward=1, backward=2, gradient=4, gradient_bytes=4, state_in=8, state_bytes=8)
    plan = keep(microbatches=2, window=1, optimizer=Optimizer.GPU)
    alone, shared = (simulate_streaming([chunk], plan, machine, steps=1) for machine in (None, Machine(h2d=1)))
    assert [spans(alone, stream)[-1] for stream in ("H2D", "D2H")] == [("s0", 4, 12), ("g0", 7, 11)]
    assert [spans(shared, stream)[-1] for stream in ("H2D", "D2H")] == [("s0", 4, 16), ("g0", 7, 15)]


def test_chunk_order_brings_the_weights_once_per_step() -> None:
    chunks = [ChunkCost(forward=1, backward=2, transfer=1)] * 6
    by_microbatch = simulate_streaming(chunks, keep(microbatches=4))
    by_chunk = simulate_streaming(chunks, keep(microbatches=4, order=Order.CHUNK))
    assert by_microbatch.transfers == 4 * by_chunk.transfers == 4 * (6 + 4)


def test_prediction_overlaps_the_end_of_one_batch_with_the_copies_of_the_next() -> None:
    chunks = [ChunkCost(forward=2, backward=9, transfer=1, gradient=5)] * 4
    result = simulate_streaming(chunks, StreamingPlan(window=2, train=False))
    assert result.seconds == 4 * 2
    assert result.d2h == 0
    assert result.stall == 0


def test_the_next_step_begins_when_all_gradients_have_arrived_though_its_first_chunk_waits_for_none() -> None:
    chunks = [ChunkCost(forward=1, backward=1, gradient=10)] * 2
    result = simulate_streaming(chunks, keep(pin=(0,), optimizer=Optimizer.OVERLAPPED))
    assert result.seconds == 3 + 10  # F0 F1 B1, and the gradient of chunk 1 leaves beside B0


def test_resident_chunks_are_never_copied_and_are_updated_on_the_gpu() -> None:
    chunks = [ChunkCost(forward=1, backward=2, transfer=9, gradient=9, update=9, device_update=0.5)] * 3
    result = simulate_streaming(chunks, keep(pin=3, optimizer=Optimizer.JOINED))
    assert result.seconds == 3 * 3 + 3 * 0.5
    assert result.h2d == result.d2h == result.host == 0
    assert result.peak_chunks == 3


def test_memory_is_slots_resident_chunks_and_what_the_policy_holds() -> None:
    chunks = [
        ChunkCost(
            forward=1,
            backward=2,
            weight_bytes=weight,
            master_bytes=2 * weight,
            gradient_bytes=0,
            kept_bytes=100,
            boundary_bytes=1,
        )
        for weight in (10, 20, 30, 40)
    ]
    keeping = simulate_streaming(chunks, keep(window=2, pin=(0,)), steps=1)
    assert keeping.weight_bytes == 2 * 40 + 20
    assert keeping.peak_bytes == keeping.weight_bytes + 4 * 100 + 10  # the resident chunk in half precision
    checkpointing = simulate_streaming(chunks, StreamingPlan(window=2, pin=(0,)), steps=1)
    assert checkpointing.peak_bytes == keeping.weight_bytes + 1 + 100 + 10  # in the backward of the resident chunk
    assert simulate_streaming(chunks, keep(window=9), steps=1).weight_bytes == 4 * 40


def test_copies_and_updates_share_the_bandwidth_of_the_hosts_memory() -> None:
    chunk = ChunkCost(forward=1, backward=1, transfer=1, gradient=1, update=2, weight_bytes=50, update_bytes=200)
    machine = Machine(host_memory=100)
    free = simulate_streaming([chunk] * 8, keep(optimizer=Optimizer.OVERLAPPED))
    bound = simulate_streaming([chunk] * 8, keep(optimizer=Optimizer.OVERLAPPED), machine)
    assert bound.seconds > free.seconds
    # Per step: 8 updates, and 14 transfers, since the last two chunks are still there when backward begins.
    assert bound.seconds >= (8 * 200 + 14 * 50) / 100
    assert bound.shared["host memory"] == pytest.approx((8 * 200 + 14 * 50) / 100 / bound.seconds)


def test_steady_state_does_not_depend_on_how_many_steps_came_before() -> None:
    chunks = [ChunkCost(forward=1, backward=2, transfer=2, gradient=1, update=2)] * 6
    plan = keep(optimizer=Optimizer.OVERLAPPED, window=3, pin=1)
    assert simulate_streaming(chunks, plan, steps=3).seconds == simulate_streaming(chunks, plan, steps=6).seconds


@pytest.mark.parametrize(("pin", "chunks"), list(itertools.product(range(9), range(1, 8))))
def test_the_resident_chunks_are_those_that_the_engine_would_keep(pin: int, chunks: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more than there are
        assert resident_chunks(pin, chunks) == choose_resident(pin, [str(i) for i in range(chunks)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamingPlan(window=0), "window=0: at least 1 slot"),
        (lambda: StreamingPlan(microbatches=0), "microbatches=0"),
        (lambda: StreamingPlan(ahead=2), "ahead=2: a number between 0 and 1"),
        (lambda: ChunkCost(forward=-1, backward=1), r"forward=-1: it must be finite and not negative"),
        (lambda: ChunkCost(forward="1", backward=1), "forward='1': a number is needed"),
        (lambda: Machine(gpu_bytes="24GB"), "gpu_bytes='24GB': a number is needed"),
        (lambda: Machine(h2d=0), "h2d=0: it must be positive"),
        (lambda: simulate_streaming([], StreamingPlan()), "0 chunks"),
        (lambda: simulate_streaming([ChunkCost(forward=1, backward=1)], StreamingPlan(), steps=0), "steps=0"),
        (lambda: simulate_streaming([ChunkCost(forward=1, backward=1)], StreamingPlan(), steps=1.5), "steps=1.5"),
        (lambda: simulate_streaming([ChunkCost(forward=1, backward=1)], StreamingPlan(pin=-2)), "pin=-2"),
        (lambda: simulate_streaming([ChunkCost(forward=1, backward=1)], StreamingPlan(pin=(3,))), "index 3 is out"),
    ],
)
def test_what_cannot_be_is_refused_with_the_number(make, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    "knob",
    [
        {"window": float("nan")},
        {"window": 1.5},
        {"window": True},
        {"pin": "all"},
        {"pin": 1.5},
        {"pin": None},
        {"pin": (0.5,)},
        {"microbatches": 2.5},
        {"batches": float("inf")},
        {"order": "chunk"},
        {"optimizer": "overlapped"},
        {"accumulate": "gpu"},
        {"checkpoint": "keep"},
        {"train": "no"},
        {"recast": 1},
        {"clip": 1.0},
        {"staging": "4"},
        {"ahead": "1"},
        {"ahead": float("nan")},
    ],
)
def test_knobs_of_another_type_are_refused_by_name(knob) -> None:
    ((name, value),) = knob.items()
    with pytest.raises(ConfigurationError, match=rf"^{name}={re.escape(repr(value))}: "):
        StreamingPlan(**knob)

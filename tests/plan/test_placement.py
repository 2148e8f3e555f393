"""Placements: hand-computed cases, and what must hold for any chunks and any machine."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.plan.placement import Chunk, Load, Machine, Place, Placement, place

GB = 10**9
MACHINE = Machine(h2d=50e9, d2h=50e9, host_memory=100e9, host_update=0.3e-9, gpu_update=0.01e-9)
CHUNK = Chunk(
    name="block",
    compute=0.05,
    parameters=GB,
    weight_bytes=2 * GB,
    master_bytes=4 * GB,
    state_bytes=8 * GB,
    gradient_bytes=2 * GB,
)
FROZEN = replace(CHUNK, name="frozen", parameters=0, state_bytes=0, gradient_bytes=0, master_bytes=2 * GB)


def blocks(count: int, **changes: Any) -> list[Chunk]:
    return [replace(CHUNK, name=f"block {index}", **changes) for index in range(count)]


def letters(placement: Placement) -> str:
    return "".join(row.place.name[0] for row in placement.rows)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_an_update_on_the_host_moves_34_bytes_a_parameter_through_its_memory() -> None:
    """bf16 weights twice 2 and the gradient 2; float32 master and moments 24, gradient 2, shadow 2."""
    machine = replace(MACHINE, h2d=1e9)  # so slow that nothing more will cross
    found = place(blocks(4), machine, gpu_bytes=0)
    assert letters(found) == "HHHH"
    assert found.load.host_memory == pytest.approx(4 * 34 / 100)
    assert found.load.values()[0] == pytest.approx(4 * 0.05)
    assert found.load.h2d == pytest.approx(4 * 4 / 1)
    assert found.load.d2h == pytest.approx(4 * 2 / 50)
    assert found.load.host_update == pytest.approx(4 * 0.3)
    assert found.load.limit == "the bus to the device"


def test_some_are_updated_on_the_gpu_until_the_bus_is_as_busy_as_the_memory() -> None:
    """On the GPU 16 come and 14 go: memory 1.36, 1.32, 1.28, 1.24, 1.20 s; bus 0.32, 0.56, 0.80, 1.04, 1.28 s."""
    found = place(blocks(4), MACHINE, gpu_bytes=0)
    assert letters(found) == "GGGH"
    assert found.seconds == pytest.approx(1.24)
    assert found.load.h2d == pytest.approx(1.04)
    assert found.load.limit == "host memory"
    assert found.rows[3].reason == "an update on the GPU would lengthen the step by 40 ms, which host memory limits"
    assert found.rows[0].reason == "an update on the host would lengthen the step by 40 ms, which host memory limits"


def test_a_faster_host_keeps_all_updates() -> None:
    found = place(blocks(4), replace(MACHINE, host_memory=500e9, host_update=0.05e-9), gpu_bytes=0)
    assert letters(found) == "HHHH"
    assert found.seconds == pytest.approx(0.32)  # the weights, twice


def test_the_first_chunks_that_fit_are_resident() -> None:
    """14 GB each, so two in 30 GB. Of the others one is updated on the GPU: memory 0.64 s, bus 0.40 s.

    With both of them memory would take 0.60 s and the bus 0.64: no faster, and more to do.
    """
    found = place(blocks(4), MACHINE, gpu_bytes=30 * GB)
    assert letters(found)[:2] == "RR"
    assert found.gpu_bytes == 28 * GB
    assert found.rows[0].reason.startswith("takes 14.00 GB of GPU memory")
    assert found.chosen(Place.RESIDENT) == (0, 1)
    assert letters(found)[2:] == "GH"
    assert found.seconds == pytest.approx(0.64)


def test_a_chunk_too_large_to_be_resident_does_not_keep_the_others_out() -> None:
    embedding = replace(CHUNK, name="embedding", master_bytes=40 * GB)
    found = place([embedding, *blocks(3)], MACHINE, gpu_bytes=30 * GB)
    assert found.chosen(Place.RESIDENT) == (1, 2)


def test_buffers_for_updates_on_the_gpu_must_fit() -> None:
    assert letters(place(blocks(4), MACHINE, gpu_bytes=GB, update_bytes=2 * GB)) == "HHHH"
    found = place(blocks(4), MACHINE, gpu_bytes=2 * GB, update_bytes=2 * GB)
    assert letters(found) == "GGGH"
    assert found.gpu_bytes == 2 * GB


def test_more_microbatches_cross_more_often_and_leave_less_room_on_the_bus() -> None:
    """Weights cross 8 times: memory 1.84, 1.80, 1.76, 1.72 s, bus 1.28, 1.52, 1.76, 2.00 s."""
    found = place(blocks(4), MACHINE, gpu_bytes=0, microbatches=4)
    assert letters(found) == "GGHH"
    assert found.load.h2d == pytest.approx((4 * 16 + 2 * 12) / 50)
    assert found.load.host_memory == pytest.approx((4 * 46 - 2 * 4) / 100)
    assert found.load.gpu == pytest.approx(4 * 4 * 0.05 + 2 * 0.01)


def test_frozen_chunks_only_send_their_weights() -> None:
    found = place([FROZEN, FROZEN], MACHINE, gpu_bytes=0)
    assert found.load == Load(gpu=0.1, h2d=8 / 50, host_memory=8 / 100)
    assert found.rows[0].reason == "frozen: only its weights cross; the bus to the device limits the step"
    assert letters(place([FROZEN, FROZEN], MACHINE, gpu_bytes=2 * GB)) == "RH"


def test_masters_that_cross_themselves_have_no_shadow_to_write() -> None:
    own = replace(CHUNK, weight_bytes=4 * GB, gradient_bytes=4 * GB)
    found = place([own], replace(MACHINE, h2d=1e8, d2h=1e8), gpu_bytes=0)
    assert found.load.host_memory == pytest.approx((8 + 4 + 24 + 4) / 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: place([], MACHINE, gpu_bytes=0), "0 chunks"),
        (lambda: place([CHUNK], MACHINE, gpu_bytes=-1), "gpu_bytes=-1"),
        (lambda: place([CHUNK], MACHINE, gpu_bytes=0, microbatches=0), "microbatches=0"),
        (lambda: replace(MACHINE, h2d=0), "h2d=0: it must be positive"),
        (lambda: replace(CHUNK, parameters=-1), "parameters=-1: it must be not negative"),
        (lambda: replace(CHUNK, compute=float("nan")), "compute=nan"),
    ],
)
def test_impossible_numbers_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


# --- always -----------------------------------------------------------------------------------------------------------

amounts = st.integers(0, 50).map(lambda gigabytes: gigabytes * GB // 10)
speeds = st.sampled_from([1e9, 10e9, 50e9, 200e9])
machines = st.builds(
    Machine,
    h2d=speeds,
    d2h=speeds,
    host_memory=speeds,
    host_update=st.sampled_from([0.1e-9, 1e-9]),
    gpu_update=st.just(0.01e-9),
)
any_chunk = st.builds(
    Chunk,
    name=st.just("chunk"),
    compute=st.sampled_from([0.0, 0.01, 0.5]),
    parameters=st.sampled_from([0, GB]),
    weight_bytes=amounts,
    master_bytes=amounts,
    state_bytes=amounts,
    gradient_bytes=amounts,
)
any_chunks = st.lists(any_chunk, min_size=1, max_size=6)
memory = st.integers(0, 60).map(lambda gigabytes: gigabytes * GB)


def load_of(chunks: list[Chunk], machine: Machine, places: Any, microbatches: int) -> float:
    """Seconds of a step, written out from the table in the module."""
    busy = [0.0] * 5
    for c, where in zip(chunks, places, strict=True):
        trained = c.parameters > 0
        shadow = c.weight_bytes if trained and c.weight_bytes != c.master_bytes else 0
        state = c.master_bytes + c.state_bytes if trained else 0
        comes = goes = update = 0.0
        busy[0] += c.compute * microbatches
        if where is not Place.HOST:
            busy[0] += c.parameters * machine.gpu_update
        if where is Place.HOST:
            comes, goes = 2 * microbatches * c.weight_bytes, c.gradient_bytes
            update = 2 * state + shadow + (c.gradient_bytes if trained else 0)
            busy[4] += c.parameters * machine.host_update
        if where is Place.GPU:
            comes, goes = 2 * microbatches * c.weight_bytes + state, state + shadow
        busy[1] += comes / machine.h2d
        busy[2] += goes / machine.d2h
        busy[3] += (comes + goes + update) / machine.host_memory
    return max(busy)


@settings(deadline=None)
@given(any_chunks, machines, memory, memory, st.integers(1, 3))
def test_it_never_exceeds_the_memory_and_says_how_much_it_takes(
    chunks: list[Chunk], machine: Machine, gpu_bytes: int, update_bytes: int, microbatches: int
) -> None:
    found = place(chunks, machine, gpu_bytes=gpu_bytes, update_bytes=update_bytes, microbatches=microbatches)
    taken = sum(chunks[index].resident_bytes for index in found.chosen(Place.RESIDENT))
    taken += update_bytes if found.chosen(Place.GPU) else 0
    assert found.gpu_bytes == taken <= gpu_bytes
    places = [row.place for row in found.rows]
    assert found.seconds == pytest.approx(load_of(chunks, machine, places, microbatches))
    assert all(chunks[index].parameters for index in found.chosen(Place.GPU))


@settings(deadline=None)
@given(any_chunks, machines, memory, memory)
def test_more_memory_never_makes_a_step_longer(chunks: list[Chunk], machine: Machine, one: int, other: int) -> None:
    less, more = (place(chunks, machine, gpu_bytes=gpu_bytes, update_bytes=GB) for gpu_bytes in sorted((one, other)))
    assert more.seconds <= less.seconds * (1 + 1e-8)


@settings(deadline=None)
@given(any_chunks, machines, memory)
def test_residents_are_the_first_of_those_up_to_some_size(
    chunks: list[Chunk], machine: Machine, gpu_bytes: int
) -> None:
    found = place(chunks, machine, gpu_bytes=gpu_bytes)
    resident = found.chosen(Place.RESIDENT)
    largest = max((chunks[index].resident_bytes for index in resident), default=0)
    eligible = [index for index, chunk in enumerate(chunks) if chunk.resident_bytes <= largest]
    assert not resident or list(resident) == eligible[: len(resident)]


@settings(deadline=None, max_examples=50)
@given(any_chunk, st.integers(1, 5), machines, memory)
def test_for_equal_chunks_no_other_choice_is_faster(chunk: Chunk, count: int, machine: Machine, gpu_bytes: int) -> None:
    chunks = [chunk] * count
    allowed = [Place.HOST, Place.RESIDENT, *([Place.GPU] if chunk.parameters else [])]
    fastest = min(
        load_of(chunks, machine, places, 1)
        for places in itertools.combinations_with_replacement(allowed, count)
        if places.count(Place.RESIDENT) * chunk.resident_bytes <= gpu_bytes
    )
    assert place(chunks, machine, gpu_bytes=gpu_bytes).seconds == pytest.approx(fastest)

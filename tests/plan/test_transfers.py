"""Transfers are valid for every itinerary, can overlap a visit, and are then the fewest that are possible."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramtorch_core.errors import PlanError
from ramtorch_core.plan.itinerary import Direction, Visit, parse_itinerary, straight_itinerary
from ramtorch_core.plan.transfers import SlotState, Transfer, check_transfers, plan_transfers

visits = st.builds(Visit, st.sampled_from(Direction), st.integers(0, 6))
itineraries = st.lists(visits, max_size=40).map(tuple)


def least_recently_used(states: list[SlotState]) -> int:
    return min(states, key=lambda state: state.last_use).slot


def fewest(itinerary: tuple[Visit, ...], slots: int) -> int:
    """By trying every eviction but that of what the visit just before used."""
    states, before = {frozenset[int](): 0}, -1
    for visit in itinerary:
        following: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            if visit.chunk in held:
                options = [(held, cost)]
            elif len(held) < slots:
                options = [(held | {visit.chunk}, cost + 1)]
            else:
                options = [(held - {out} | {visit.chunk}, cost + 1) for out in held if out != before or slots == 1]
            for after, price in options:
                following[after] = min(price, following.get(after, price))
        states, before = following, visit.chunk
    return min(states.values())


@given(itineraries, st.integers(1, 5))
def test_a_plan_is_valid(itinerary, slots):
    plan = plan_transfers(itinerary, slots)
    check_transfers(plan)
    assert plan.itinerary == itinerary
    assert [transfer.needed_by for transfer in plan.transfers] == sorted({t.needed_by for t in plan.transfers})


@given(itineraries, st.integers(1, 5))
def test_a_plan_never_has_more_transfers_than_least_recently_used(itinerary, slots):
    least = plan_transfers(itinerary, slots, least_recently_used)
    check_transfers(least)
    assert len(plan_transfers(itinerary, slots).transfers) <= len(least.transfers)


@settings(max_examples=60)
@given(st.lists(visits, max_size=14).map(tuple), st.integers(1, 3))
def test_a_plan_has_the_fewest_transfers_that_can_overlap_a_visit(itinerary, slots):
    plan = plan_transfers(itinerary, slots)
    assert len(plan.transfers) == fewest(itinerary, slots)
    assert slots == 1 or all(t.after < t.needed_by - 1 or t.needed_by == 0 for t in plan.transfers)


@given(itineraries, st.integers(1, 5))
def test_a_plan_with_a_slot_per_chunk_loads_each_chunk_once(itinerary, slots):
    chunks = {visit.chunk for visit in itinerary}
    plan = plan_transfers(itinerary, max(1, len(chunks)) + slots)
    assert sorted(transfer.chunk for transfer in plan.transfers) == sorted(chunks)


@pytest.mark.parametrize(("chunks", "slots", "transfers"), [(8, 2, 14), (8, 1, 15), (8, 3, 13), (3, 3, 3)])
def test_the_turn_of_a_step_reuses_what_the_slots_hold(chunks, slots, transfers):
    assert len(plan_transfers(straight_itinerary(range(chunks)), slots).transfers) == transfers


@pytest.mark.parametrize(("slots", "transfers"), [(2, 36), (3, 28), (4, 20)])
def test_passes_in_one_direction_copy_ahead(slots, transfers):
    plan = plan_transfers([visit for _ in range(6) for visit in straight_itinerary(range(6), backward=False)], slots)
    assert len(plan.transfers) == transfers
    assert all(t.after < t.needed_by - 1 for t in plan.transfers[1:])


def test_with_two_slots_each_copy_may_start_one_visit_ahead():
    plan = plan_transfers(straight_itinerary(range(6), backward=False), 2)
    assert [(t.needed_by, t.after) for t in plan.transfers] == [(0, -1), (1, -1), (2, 0), (3, 1), (4, 2), (5, 3)]


def test_no_slots_and_a_rule_that_names_none_are_refused():
    with pytest.raises(PlanError, match="0 slots"):
        plan_transfers(straight_itinerary([0]), 0)
    with pytest.raises(PlanError, match="slot 7 of 2"):
        plan_transfers(straight_itinerary([0]), 2, lambda states: 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ts: ts[:-1], r"visit \d finds"),
        (lambda ts: [*ts, Transfer(0, 0, 9, 8)], "serves no visit"),
        (lambda ts: [replace(ts[0], slot=5), *ts[1:]], "names a slot that does not exist"),
        (lambda ts: [*ts[:2], replace(ts[2], after=-1), *ts[3:]], r"overwrites a chunk that visit 0 still uses"),
        (lambda ts: [*ts[:2], replace(ts[2], after=2), *ts[3:]], "waits for its own visit"),
        (lambda ts: [replace(ts[0], chunk=3), *ts[1:]], r"\[F0\] F1 F2 F3"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_with_the_bad_visit_marked(change, message):
    plan = plan_transfers(parse_itinerary("F0 F1 F2 F3"), 2)
    with pytest.raises(PlanError, match=message):
        check_transfers(replace(plan, transfers=tuple(change(list(plan.transfers)))))
    with pytest.raises(PlanError, match="slots are given for"):
        check_transfers(replace(plan, slot_of_visit=()))

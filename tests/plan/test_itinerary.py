"""Itineraries print and parse, and the straight one visits every chunk there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramtorch_core.errors import PlanError
from ramtorch_core.plan.itinerary import Direction, Visit, format_itinerary, parse_itinerary, straight_itinerary

visits = st.builds(Visit, st.sampled_from(Direction), st.integers(0, 99))


@given(st.lists(visits).map(tuple))
def test_what_is_printed_parses_to_the_same_visits(itinerary):
    assert parse_itinerary(format_itinerary(itinerary)) == itinerary


def test_a_visit_prints_as_its_direction_and_chunk():
    assert str(Visit(Direction.BACKWARD, 12)) == "B12"


@pytest.mark.parametrize("text", ["X1", "F", "F-1", "1F", "F1B1", "f1"])
def test_what_is_no_visit_is_refused_by_name(text):
    with pytest.raises(PlanError, match=text):
        parse_itinerary(f"F0 {text}")


def test_the_straight_itinerary_goes_there_and_back():
    assert format_itinerary(straight_itinerary([0, 1, 2])) == "F0 F1 F2 B2 B1 B0"
    assert format_itinerary(straight_itinerary([0, 1, 2], backward=False)) == "F0 F1 F2"
    assert straight_itinerary([]) == ()

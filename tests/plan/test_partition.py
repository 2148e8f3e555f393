"""Balanced cuts: exact, contiguous, non-empty, and the refusals."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.plan.partition import imbalance, partition, partition_by, spread

costs = st.lists(st.integers(0, 50), min_size=1, max_size=8)


def slowest(values: list[int], parts: tuple[range, ...], weights: list[float]) -> float:
    return max(sum(values[i] for i in part) / w for part, w in zip(parts, weights, strict=True))


@settings(deadline=None)
@given(costs, st.integers(1, 5), st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=5, max_size=5))
def test_no_other_cut_has_a_faster_slowest_part(values: list[int], parts: int, weights: list[float]) -> None:
    parts, weights = min(parts, len(values)), weights[: min(parts, len(values))]
    found = partition(values, parts, weights)
    best = math.inf
    for cut in itertools.combinations(range(1, len(values)), parts - 1):
        edges = [0, *cut, len(values)]
        candidate = tuple(range(a, b) for a, b in itertools.pairwise(edges))
        best = min(best, slowest(values, candidate, weights))
    assert slowest(values, found, weights) == pytest.approx(best)


@settings(deadline=None)
@given(costs, st.integers(1, 5))
def test_parts_follow_each_other_cover_everything_and_are_not_empty(values: list[int], parts: int) -> None:
    parts = min(parts, len(values))
    found = partition(values, parts)
    assert len(found) == parts
    assert [i for part in found for i in part] == list(range(len(values)))
    assert all(len(part) > 0 for part in found)


def test_equal_maxima_are_told_apart_by_evenness() -> None:
    assert partition([4, 1, 1, 1, 1], 3) == (range(1), range(1, 3), range(3, 5))


def test_twelve_equal_layers_and_a_big_head_are_balanced() -> None:
    """A greedy split over top-level children fails here."""
    assert partition([3, *[1] * 12, 6], 3) == (range(5), range(5, 12), range(12, 14))


def test_a_part_of_twice_the_weight_takes_twice_the_cost() -> None:
    assert partition([1] * 9, 2, [2.0, 1.0]) == (range(6), range(6, 9))


def test_a_cost_may_depend_on_the_part() -> None:
    """Activations of the first stage are held for more microbatches than those of the last."""
    held = [3, 1]
    assert partition_by(lambda part, a, b: held[part] * (b - a), 8, 2) == (range(2), range(2, 8))


@pytest.mark.parametrize(
    ("values", "parts", "weights", "message"),
    [
        ([1, 1], 3, None, "cannot cut 2 items into 3 parts"),
        ([1, 1], 0, None, "cannot cut 2 items into 0 parts"),
        ([1, 1], 2, [1.0], "1 weights for 2 parts"),
        ([1, 1], 2, [1.0, 0.0], "positive and finite"),
        ([1, -1], 2, None, "not negative"),
        ([1, math.nan], 2, None, "not negative"),
    ],
)
def test_bad_input_is_refused_with_both_numbers(
    values: list[float], parts: int, weights: list[float] | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        partition(values, parts, weights)


def test_imbalance_is_one_for_a_perfect_cut_and_grows_with_the_slowest_part() -> None:
    assert imbalance([1, 1, 2], (range(2), range(2, 3))) == 1.0
    assert imbalance([1, 1, 2], (range(1), range(1, 3))) == 1.5
    assert imbalance([2, 1], (range(1), range(1, 2)), [2.0, 1.0]) == 1.0
    assert imbalance([0, 0], (range(1), range(1, 2))) == 1.0


@pytest.mark.parametrize(
    ("count", "items", "expected"),
    [
        (0, 5, []),
        (1, 5, [0]),
        (2, 5, [0, 2]),
        (3, 12, [0, 4, 8]),
        (5, 8, [0, 1, 3, 4, 6]),
        (9, 3, [0, 1, 2]),
        (2, 0, []),
    ],
)
def test_a_count_is_spread_evenly_from_the_first_on(count: int, items: int, expected: list[int]) -> None:
    assert spread(count, items) == frozenset(expected)


def test_so_many_are_chosen_as_asked_and_gaps_differ_by_one_at_most() -> None:
    for items in range(1, 20):
        for count in range(1, items + 1):
            chosen = sorted(spread(count, items))
            gaps = [b - a for a, b in itertools.pairwise([*chosen, items])]
            assert len(chosen) == count
            assert max(gaps) - min(gaps) <= 1

"""The virtual clock: order on a resource, needs, free choice, shared capacities."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramtorch_core.errors import ConfigurationError
from ramtorch_core.simulate.clock import Kind, Work

F, U = Kind.FORWARD, Kind.UPDATE

# Tasks as (resource, seconds, which earlier ones they need, as parts of their own position)
tasks = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", ""]), st.integers(0, 5), st.lists(st.floats(0, 1, exclude_max=True), max_size=3)
    ),
    min_size=1,
    max_size=25,
)


def build(described: list[tuple[str, int, list[float]]], **options: object) -> Work:
    work = Work(**options)  # type: ignore[arg-type]
    for position, (resource, seconds, needs) in enumerate(described):
        after = [int(part * position) for part in needs if position]
        if resource:
            work.add(resource, str(position), F, float(seconds), after, {"shared": 1.0})
        else:
            work.join(after)
    return work


def test_a_resource_takes_its_tasks_in_the_order_in_which_they_were_added() -> None:
    work = Work()
    late = work.add("other", "late", F, 5.0)
    work.add("stream", "first", F, 1.0, [late])
    work.add("stream", "second", F, 1.0)
    times = work.run()
    assert times.start == (0.0, 5.0, 6.0)
    assert times.end == (5.0, 6.0, 7.0)


def test_a_free_resource_takes_the_ready_task_with_the_least_key() -> None:
    work = Work(free={"host": lambda task, arrival, ended: (-task,)})
    gate = work.add("stream", "gate", F, 1.0)
    for _ in range(3):
        work.add("host", "u", U, 1.0, [gate])
    assert work.run().start == (0.0, 3.0, 2.0, 1.0)


def test_a_key_may_depend_on_what_has_ended() -> None:
    work = Work(free={"host": lambda task, arrival, ended: (-task if ended(0) else arrival,)})
    work.add("stream", "backward", F, 1.5)
    for _ in range(4):
        work.add("host", "u", U, 1.0)
    # 1 and 2 begin before the backward ends, in the order of their arrival; afterwards the last goes first.
    assert work.run().start == (0.0, 0.0, 1.0, 3.0, 2.0)


def test_a_task_that_is_not_needed_any_more_waits_and_takes_no_time() -> None:
    work = Work(free={"pool": lambda task, arrival, ended: (arrival,)})
    first = work.add("pool", "first", U, 5.0)
    vain = work.add("pool", "vain", U, 7.0)
    last = work.add("pool", "last", U, 1.0)
    over, until = work.add("other", "over", F, 4.0), work.add("another", "until", F, 9.0)
    follows = work.add("pool", "follows", U, 2.0, [vain])
    work.until[first] = work.until[vain] = (over, until)
    times = work.run()
    assert [(times.start[n], times.end[n]) for n in (first, last, vain, follows)] == [(0, 5), (5, 6), (9, 9), (9, 11)]


def test_tasks_that_want_more_than_a_capacity_slow_down_in_proportion() -> None:
    work = Work({"memory": 10.0})
    work.add("copy", "t", Kind.TRANSFER, 1.0, uses={"memory": 8.0})
    work.add("host", "u", U, 3.0, uses={"memory": 12.0})
    # Together they want 20 of 10, so both run at half speed until the copy ends at 2. Then the update has 2 seconds of
    # work left, and alone it wants 12 of 10.
    assert work.run().end == pytest.approx((2.0, 2.0 + 2.0 * 12 / 10))


def test_what_one_capacity_slows_down_wants_less_of_the_others() -> None:
    work = Work({"memory": 3.0, "bus": 1.0})
    for copy in ("in", "out"):
        work.add(copy, copy, Kind.TRANSFER, 1.0, uses={"memory": 1.0, "bus": 1.0})
    work.add("host", "u", Kind.UPDATE, 1.0, uses={"memory": 2.0})
    assert work.run().end == (2.0, 2.0, 1.0)  # the copies take 1 of the memory, not 2


def test_an_unknown_capacity_limits_nothing() -> None:
    work = Work()
    work.add("copy", "t", Kind.TRANSFER, 1.0, uses={"memory": 8.0})
    assert work.run().end == (1.0,)


def test_a_join_ends_with_the_last_of_what_it_joins_and_takes_no_time() -> None:
    work = Work()
    both = work.join([work.add("a", "", F, 1.0), work.add("b", "", F, 2.0)])
    work.add("c", "", F, 1.0, [both])
    assert work.run().start[2:] == (2.0, 2.0)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_an_impossible_duration_is_refused_with_its_value(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=f"'t3' takes {seconds} seconds"):
        Work().add("copy", "t3", Kind.TRANSFER, seconds)


@settings(deadline=None)
@given(tasks, st.booleans())
def test_no_resource_does_two_things_at_once_and_every_need_is_awaited(described, shared):
    work = build(described, capacities={"shared": 1.5} if shared else None)
    times = work.run()
    for number, task in enumerate(work.tasks):
        assert all(times.end[need] <= times.start[number] for need in task.after)
        assert times.end[number] - times.start[number] >= task.seconds * (1 - 1e-9)
    for resource in "abc":
        mine = [n for n, task in enumerate(work.tasks) if task.resource == resource]
        assert all(times.end[a] <= times.start[b] for a, b in itertools.pairwise(mine))


@settings(deadline=None)
@given(tasks)
def test_without_shared_capacities_every_task_starts_as_early_as_it_can(described):
    work = build(described)
    times = work.run()
    last: dict[str, float] = {}
    for number, task in enumerate(work.tasks):
        ready = max((times.end[need] for need in task.after), default=0.0)
        free = last.get(task.resource, 0.0) if task.resource else 0.0
        assert times.start[number] == max(ready, free)
        assert times.end[number] == times.start[number] + task.seconds
        last[task.resource] = times.end[number]


@settings(deadline=None)
@given(tasks, st.floats(0.5, 3))
def test_a_shared_capacity_is_never_exceeded(described, capacity):
    work = build(described, capacities={"shared": capacity})
    total = sum(task.seconds for task in work.tasks)
    assert max(work.run().end) >= total / capacity * (1 - 1e-9)

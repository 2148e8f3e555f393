"""Schedules as data: the grids they draw, their text form, and properties that hold for every size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramtorch_core.errors import ConfigurationError, PlanError
from ramtorch_core.plan.check import check, dependencies, peak_activations
from ramtorch_core.plan.schedule import (
    SCHEDULES,
    Op,
    Schedule,
    build,
    forward_only,
    gpipe,
    interleaved,
    one_by_one,
    sequential,
    staggered_1b1f,
    uniform_1f1b,
    zb_h1,
    zbv,
)

names = st.sampled_from(sorted(SCHEDULES))
devices = st.integers(1, 6)
microbatches = st.integers(1, 14)


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def makespan(schedule: Schedule) -> float:
    """Time of the schedule when F, I and W each take one unit per device and B two; the least possible is 3 M."""
    end: dict[Op, float] = {}
    clock, at = [0.0] * schedule.devices, [0] * schedule.devices
    unit = schedule.devices / schedule.stages
    while any(at[d] < len(lane) for d, lane in enumerate(schedule.lanes)):
        for d, lane in enumerate(schedule.lanes):
            while at[d] < len(lane) and all(x in end for x in dependencies(lane[at[d]], schedule.stages)):
                op = lane[at[d]]
                start = max([clock[d], *(end[x] for x in dependencies(op, schedule.stages))])
                clock[d] = start + (2 * unit if op.kind == "B" else unit)
                end[Op("I", op.stage, op.microbatch) if op.kind == "B" else op] = clock[d]
                at[d] += 1
    return max(clock)


@pytest.mark.parametrize(
    ("schedule", "grid"),
    [
        (sequential(2, 2), "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1"),
        (gpipe(2, 3), "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"),
        (
            staggered_1b1f(3, 4),
            """0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
               1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
               2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
        ),
        (uniform_1f1b(2, 3), "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1F1 1B0 1F2 1B1 1B2"),
        (
            zb_h1(3, 3),
            """0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
               1F0 1F1 1I0 1F2 1I1 1W0 1I2 1W1 1W2
               2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2""",
        ),
        (
            interleaved(2, 2),
            """0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
               1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1""",
        ),
        (
            zbv(2, 2),
            """0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
               1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 2W1 1W0 1W1""",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_a_schedule_draws_the_grid_of_its_publication(schedule: Schedule, grid: str) -> None:
    assert str(schedule) == lines(grid)


@settings(deadline=None)
@given(names, devices, microbatches)
def test_every_schedule_of_every_size_is_complete_and_free_of_deadlock(name: str, d: int, m: int) -> None:
    schedule = build(name, d, m)
    check(schedule)
    assert schedule.devices == d
    assert schedule.microbatches == m
    assert sum(map(len, schedule.lanes)) == schedule.stages * m * (3 if schedule.split_backward else 2)


@settings(deadline=None)
@given(devices, microbatches, st.integers(1, 4))
def test_interleaving_runs_for_any_number_of_stages_per_device(d: int, m: int, stages: int) -> None:
    schedule = interleaved(d, m, stages)
    check(schedule)
    assert schedule.stages == d * stages


@settings(deadline=None)
@given(names, devices, microbatches)
def test_the_text_of_a_schedule_reads_back_as_the_same_schedule(name: str, d: int, m: int) -> None:
    schedule = build(name, d, m)
    assert Schedule.parse(str(schedule), name) == schedule


@settings(deadline=None)
@given(names, devices, microbatches)
def test_ops_are_the_lanes_told_apart_by_stage(name: str, d: int, m: int) -> None:
    schedule = build(name, d, m)
    for device, lane in enumerate(schedule.lanes):
        owned = [s for s in range(schedule.stages) if schedule.placement[s] == device]
        assert sorted(map(str, lane)) == sorted(str(op) for s in owned for op in schedule.ops[s])
    assert all(op.stage == s for s, ops in enumerate(schedule.ops) for op in ops)


@settings(deadline=None)
@given(devices, microbatches)
def test_1f1b_holds_as_many_microbatches_as_stages_follow_and_gpipe_all(d: int, m: int) -> None:
    expected = tuple(min(m, d - s) for s in range(d))
    assert peak_activations(staggered_1b1f(d, m)) == expected
    assert peak_activations(gpipe(d, m)) == (m,) * d
    assert max(peak_activations(zb_h1(d, m))) == min(m, d)
    assert max(peak_activations(zbv(d, m))) <= 2 * d


@settings(deadline=None)
@given(devices, st.integers(1, 4))
def test_zero_bubble_is_never_slower_than_1f1b_and_1f1b_as_fast_as_gpipe(d: int, rounds: int) -> None:
    m = d * rounds
    plain = makespan(staggered_1b1f(d, m))
    assert plain == makespan(gpipe(d, m)) == 3 * (m + d - 1)
    assert makespan(zb_h1(d, m)) <= plain
    assert makespan(zbv(d, m)) <= makespan(zb_h1(d, m))
    assert makespan(interleaved(d, m)) <= plain


def test_the_uniform_warm_up_overlaps_less_than_1f1b_when_a_link_takes_time() -> None:
    """With a warm-up of S on every stage the last stage waits for forwards it does not need yet."""
    assert str(uniform_1f1b(3, 4)) != str(staggered_1b1f(3, 4))
    assert peak_activations(uniform_1f1b(3, 4)) == (3, 3, 3)


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_one_by_one_runs_on_any_placement_with_the_backward_whole_or_split(placement: tuple[int, ...]) -> None:
    for split in (False, True):
        schedule = one_by_one(placement, 3, split=split)
        check(schedule, max_activations=placement.count(0))
        assert schedule.split_backward == split
        assert schedule.placement == placement


@settings(deadline=None)
@given(names, devices, microbatches)
def test_the_forwards_alone_form_a_schedule(name: str, d: int, m: int) -> None:
    schedule = forward_only(build(name, d, m))
    check(schedule)
    assert {op.kind for lane in schedule.lanes for op in lane} == {"F"}


def test_1f1b_is_another_name_of_staggered_1b1f() -> None:
    assert build("1f1b", 3, 5) == staggered_1b1f(3, 5)


@settings(deadline=None)
@given(st.sampled_from("FBIW"), st.integers(0, 99), st.integers(0, 99))
def test_an_op_reads_back_from_its_text(kind: str, stage: int, m: int) -> None:
    op = Op.parse(f"{stage}{kind}{m}")
    assert (op.kind, op.stage, op.microbatch) == (kind, stage, m)
    assert str(op) == f"{stage}{kind}{m}"


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "-1F0", "0F0B0", "0f0"])
def test_a_malformed_op_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match="2F0"):
        Op.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0\n0F1 0B1", "stage 0 on devices 0 and 1"),
        ("0F0 0B0\n2F0 2B0", "no op of stage 1"),
        ("", "no ops"),
    ],
)
def test_text_that_is_no_placement_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Schedule.parse(text)


def test_a_user_schedule_that_parses_still_has_to_pass_the_checker() -> None:
    schedule = Schedule.parse("0F0 0B0\n1F0")
    with pytest.raises(PlanError, match="stage 1 has 1F0 of microbatch 0"):
        check(schedule)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"2f2b.*1f1b.*gpipe.*zbv"):
        build("2f2b", 2, 2)


@pytest.mark.parametrize(("d", "m"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(d: int, m: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{'microbatches' if d else 'devices'}=0: a whole number"):
        build("gpipe", d, m)

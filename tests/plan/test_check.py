"""The schedule checker: what it refuses, and that the refusal shows where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramtorch_core.errors import PlanError
from ramtorch_core.plan.check import check, dependencies, grid, peak_activations
from ramtorch_core.plan.schedule import SCHEDULES, Op, Schedule, build, gpipe, staggered_1b1f


@pytest.mark.parametrize(
    ("text", "message", "marked"),
    [
        ("0F0 0B0\n1B0 1F0", "1B0 waits for 1F0", ">1B0<"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "0B0 waits for 1I0; 1F1 waits for 0F1", ">1F1<"),
        ("0F0 0F0 0B0\n1F0 1B0", "0F0 occurs 2 times", ">0F0<"),
        ("0F0 0B0\n1F0", "stage 1 has 1F0 of microbatch 0", ">1F0<"),
        ("0F0 0I0\n1F0 1B0", "stage 0 has 0F0, 0I0 of microbatch 0", ">0I0<"),
        ("0F0 0B0 0I0 0W0\n1F0 1B0", "stage 0 has 0F0, 0B0, 0I0, 0W0", ">0W0<"),
        ("0F0 0F1\n1F0 1F1 1B0 1B1", "stage 0 has 0F0 of microbatch 0; it needs F and B", ">0F0<"),
        ("0F1 0F0 0B0 0B1\n1F0 1F1 1B0 1B1", "forward of microbatch 1 before that of 0", ">0F1<"),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0", "gradients must accumulate in microbatch order", ">0B1<"),
        ("0F0 0F1 0I0 0I1 0W1 0W0", "weight gradient of microbatch 1 before that of 0", ">0W1<"),
        ("0F0 0W0 0I0", "0W0 waits for 0I0", ">0W0<"),
        ("0F0 0F2 0B0 0B2", "stage 0 has nothing of microbatch 1", "0F0"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_with_its_grid(text: str, message: str, marked: str) -> None:
    with pytest.raises(PlanError) as refusal:
        check(Schedule.parse(text))
    assert message in str(refusal.value)
    assert marked in str(refusal.value)
    assert "device 0:" in str(refusal.value)


def test_an_op_on_a_device_that_does_not_own_its_stage_is_refused() -> None:
    lanes = ((Op("F", 0, 0), Op("B", 0, 0)),)
    with pytest.raises(PlanError, match="0F0 is on device 0, its stage on device 1"):
        check(Schedule("user", 1, (1,), lanes))


def test_an_op_outside_the_declared_size_is_refused() -> None:
    lanes = ((Op("F", 0, 0), Op("F", 0, 1), Op("B", 0, 0), Op("B", 0, 1)),)
    with pytest.raises(PlanError, match="0F1 is outside 1 stages and 1 microbatches"):
        check(Schedule("user", 1, (0,), lanes))


def test_a_memory_bound_is_checked_and_the_forward_that_breaks_it_marked() -> None:
    check(staggered_1b1f(2, 8), max_activations=2)
    with pytest.raises(PlanError, match="0F2 is forward number 3 held on device 0, where 2 are allowed") as refusal:
        check(gpipe(2, 8), max_activations=2)
    assert ">0F2<" in str(refusal.value)


@settings(deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 8))
def test_peak_activations_is_the_least_bound_that_passes(name: str, devices: int, microbatches: int) -> None:
    schedule = build(name, devices, microbatches)
    peak = max(peak_activations(schedule))
    check(schedule, max_activations=peak)
    with pytest.raises(PlanError):
        check(schedule, max_activations=peak - 1)


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 5))
def test_exchanging_two_ops_is_refused_or_leaves_every_dependency_before_its_op(
    data: st.DataObject, name: str, devices: int, microbatches: int
) -> None:
    schedule = build(name, devices, microbatches)
    lane = data.draw(st.integers(0, devices - 1))
    i = data.draw(st.integers(0, len(schedule.lanes[lane]) - 2))
    ops = list(schedule.lanes[lane])
    ops[i], ops[i + 1] = ops[i + 1], ops[i]
    lanes = (*schedule.lanes[:lane], tuple(ops), *schedule.lanes[lane + 1 :])
    changed = Schedule(name, microbatches, schedule.placement, lanes)
    try:
        check(changed)
    except PlanError:
        return
    run = run_order(changed)
    for at, op in enumerate(run):
        assert all(d in run[:at] for d in dependencies(op, changed.stages))


def run_order(schedule: Schedule) -> list[Op]:
    """One order in which the ops can run, B as I."""
    done: list[Op] = []
    lanes = [[Op("I", op.stage, op.microbatch) if op.kind == "B" else op for op in lane] for lane in schedule.lanes]
    while any(lanes):
        ready = next(lane for lane in lanes if lane and all(d in done for d in dependencies(lane[0], schedule.stages)))
        done.append(ready.pop(0))
    return done


def test_the_grid_marks_only_what_it_is_told_to() -> None:
    assert grid(staggered_1b1f(2, 2), [Op("B", 1, 0)]) == (
        "device 0: 0F0  0F1  0B0  0B1 \ndevice 1: 1F0 >1B0< 1F1  1B1 "
    )

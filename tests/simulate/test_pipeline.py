"""Pipelines, simulated: closed formulas, links, streamed stages, and rules that hold for every schedule."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramtorch_core.errors import ConfigurationError, PlanError
from ramtorch_core.plan.schedule import (
    SCHEDULES,
    Schedule,
    build,
    forward_only,
    gpipe,
    interleaved,
    sequential,
    staggered_1b1f,
    uniform_1f1b,
    zb_h1,
)
from ramtorch_core.simulate import (
    Accumulate,
    ChunkCost,
    Machine,
    PipelinePlan,
    PipelineResult,
    StreamingPlan,
    simulate_pipeline,
    simulate_streaming,
)

devices = st.integers(1, 5)
microbatches = st.integers(1, 8)
RESIDENT = PipelinePlan()


def run(schedule: Schedule, plan: PipelinePlan = RESIDENT, **cost: float) -> PipelineResult:
    """Equal stages; forward takes 1 and backward 2 of a device's time unless `cost` says otherwise."""
    share = schedule.devices / schedule.stages
    chunk = ChunkCost(**{"forward": share, "backward": 2 * share, **cost})
    return simulate_pipeline(schedule, [[chunk]] * schedule.stages, plan)


def test_two_stages_and_two_microbatches_are_as_worked_out_by_hand() -> None:
    result = run(staggered_1b1f(2, 2), PipelinePlan(send=0.5))
    found = {(span.label, span.resource.split()[0]): (span.start, span.end) for span in result.timeline.spans}
    assert found == {
        ("0F0", "GPU"): (0, 1),
        ("0F0", "link"): (1, 1.5),
        ("0F1", "GPU"): (1, 2),
        ("0F1", "link"): (2, 2.5),
        ("1F0", "GPU"): (1.5, 2.5),
        ("1B0", "GPU"): (2.5, 4.5),
        ("1B0", "link"): (4.5, 5),
        ("1F1", "GPU"): (4.5, 5.5),
        ("0B0", "GPU"): (5, 7),
        ("1B1", "GPU"): (5.5, 7.5),
        ("1B1", "link"): (7.5, 8),
        ("0B1", "GPU"): (8, 10),
    }
    assert result.seconds == 10
    assert [device.bubble for device in result.devices] == [3 + 1, 1.5 + 2.5]


@given(devices, microbatches)
def test_the_bubble_of_gpipe_and_1f1b_is_p_minus_1_of_m_plus_p_minus_1(p: int, m: int) -> None:
    for schedule in (gpipe(p, m), staggered_1b1f(p, m)):
        result = run(schedule)
        assert result.seconds == 3 * (m + p - 1)
        assert result.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert result.compute == pytest.approx(m / (m + p - 1))


@given(devices, microbatches, st.sampled_from([0.25, 0.5, 1.0]))
def test_a_link_adds_its_time_once_per_edge_and_direction_to_gpipe(p: int, m: int, send: float) -> None:
    assert run(gpipe(p, m), PipelinePlan(send=send)).seconds == 3 * (m + p - 1) + 2 * (p - 1) * send


def test_a_link_that_is_slower_than_compute_sets_the_pace() -> None:
    result = run(gpipe(2, 8), PipelinePlan(send=5))
    # 8 activations, one after the other, then 8 gradients, the last of which is still computed with.
    assert result.seconds == 1 + 8 * 5 + 1 + 2 + 8 * 5 + 2
    assert result.link == pytest.approx(8 * 5 / result.seconds)


def test_activations_and_gradients_that_go_the_same_way_share_the_wire() -> None:
    schedule = Schedule.parse("0F0 3F0 3B0 0F1 0B0 3F1 3B1 0B1\n1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1")
    result = run(schedule, PipelinePlan(send=3))
    spans = {span.label: span for span in result.timeline.spans if span.resource.startswith("link 0>1")}
    gradient, activation = spans["3B0"], spans["0F1"]
    # The activation follows half a second later; from then on each goes at half speed, until the gradient has arrived.
    assert activation.start == gradient.start + 0.5
    assert gradient.end == gradient.start + 0.5 + 2 * 2.5
    assert activation.end == gradient.end + 0.5


@given(devices, microbatches)
def test_1f1b_holds_at_most_one_microbatch_per_following_stage(p: int, m: int) -> None:
    result = run(staggered_1b1f(p, m), kept_bytes=1)
    assert [device.peak_microbatches for device in result.devices] == [min(m, p - d) for d in range(p)]
    assert [device.peak_bytes for device in result.devices] == [min(m, p - d) for d in range(p)]


@given(st.integers(2, 5), st.integers(2, 10))
def test_zero_bubble_is_shorter_than_1f1b_with_no_more_activations(p: int, m: int) -> None:
    zero, plain = run(zb_h1(p, m)), run(staggered_1b1f(p, m))
    assert zero.seconds < plain.seconds
    assert max(d.peak_microbatches for d in zero.devices) <= max(d.peak_microbatches for d in plain.devices)
    if m >= 2 * p - 1:
        assert zero.seconds == 3 * m + p - 1


@given(st.integers(2, 4), st.integers(2, 4))
def test_more_stages_per_gpu_make_a_smaller_bubble(p: int, groups: int) -> None:
    m = p * groups
    assert run(interleaved(p, m, 2)).seconds == pytest.approx(3 * (m + (p - 1) / 2))


def test_a_uniform_warm_up_runs_serially() -> None:
    uniform, staggered = run(uniform_1f1b(4, 16)), run(staggered_1b1f(4, 16))
    assert uniform.compute < 0.5 < staggered.compute
    last = [span for span in uniform.timeline.spans if span.resource == "GPU 3 compute"]
    others = [span for span in uniform.timeline.spans if span.resource == "GPU 2 compute"]
    # In the steady state, while the last stage runs the backwards, the one before has nothing to do.
    middle = [span for span in last if span.label in ("3B4", "3B5", "3B6")]
    assert not any(a.start < b.end and b.start < a.end for a in middle for b in others)


def test_the_split_of_the_backward_follows_the_weight_share() -> None:
    result = run(zb_h1(2, 2), PipelinePlan(weight_share=0.25))
    kinds = {span.kind.value: span.seconds for span in result.timeline.spans}
    assert kinds == {"F": 1, "I": 1.5, "W": 0.5}
    recomputed = run(zb_h1(2, 2), PipelinePlan(checkpoint=True))
    assert {span.kind.value: span.seconds for span in recomputed.timeline.spans} == {"F": 1, "I": 3}


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 6), st.booleans(), st.booleans())
def test_a_pipeline_of_one_gpu_is_the_streaming_simulation(
    chunks: int, window: int, pin: int, checkpoint: bool, issued: bool
) -> None:
    issue = {"issue_forward": 1, "issue_recompute": 2, "issue_backward": 4} if issued else {}
    cost = ChunkCost(forward=2, backward=3, gradient=2, master_bytes=9, **issue)
    costs = [replace(cost, transfer=i + 1, weight_bytes=i) for i in range(chunks)]
    plan = PipelinePlan(window=window, pin=pin, checkpoint=checkpoint)
    pipeline = simulate_pipeline(sequential(1, 1), [costs], plan)
    streamed = simulate_streaming(costs, StreamingPlan(window=window, pin=pin, checkpoint=checkpoint), steps=1)
    assert pipeline.seconds == streamed.seconds
    assert pipeline.devices[0].stall == streamed.stall
    assert pipeline.devices[0].weight_bytes == streamed.weight_bytes
    assert pipeline.devices[0].peak_chunks == streamed.peak_chunks


def issued(result: PipelineResult) -> dict[str, tuple[float, float]]:
    """When the host issued what."""
    return {span.label: (span.start, span.end) for span in result.timeline.spans if span.resource.endswith("issuing")}


def test_the_host_issues_forwards_one_by_one_and_backwards_side_by_side_and_waits_for_no_compute() -> None:
    result = run(gpipe(2, 2), PipelinePlan(send=0.5), issue_forward=3, issue_backward=2)
    forwards = {"i0F0": (0, 3), "i0F1": (3, 6), "i1F0": (6, 9), "i1F1": (9, 12)}  # in the order of becoming possible
    assert issued(result) == forwards | {"i1B0": (12, 14), "i1B1": (14, 16), "i0B0": (14, 16), "i0B1": (16, 18)}
    spans = {(span.label, span.resource.split()[0]): (span.start, span.end) for span in result.timeline.spans}
    compute = {label: times for (label, resource), times in spans.items() if resource == "GPU"}
    assert compute["0F0"] == (0, 1)  # begins with the first that is issued, and ends no sooner than the last
    assert spans["0F0", "link"] == (3, 3.5)
    assert compute["1F0"] == (6, 7)
    assert compute["1B0"] == (12, 14)
    assert result.seconds == max(end for _, end in compute.values())


@pytest.mark.parametrize("window", [None, 1])
def test_the_host_issues_all_chunks_of_a_forward_before_it_takes_another(window: int | None) -> None:
    chunk = ChunkCost(forward=0.5, backward=0.5, issue_forward=1, issue_backward=2)
    found = issued(simulate_pipeline(gpipe(2, 2), [[chunk] * 2] * 2, PipelinePlan(window=window)))
    forwards = {label: times for label, times in found.items() if "F" in label}
    labels = [f"i{op}.{chunk}" for op in ("0F0", "0F1", "1F0", "1F1") for chunk in (0, 1)]
    assert forwards == {label: (at, at + 1) for at, label in enumerate(labels)}


def test_the_host_issues_the_ops_of_streamed_stages_one_by_one() -> None:
    found = issued(run(gpipe(2, 2), PipelinePlan(window=1), issue_forward=3, issue_backward=2))
    assert [found[label] for label in ("i1B0", "i1B1", "i0B0", "i0B1")] == [(12, 14), (14, 16), (16, 18), (18, 20)]


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
def test_the_host_issues_the_ops_of_gpus_with_several_stages_one_by_one(name: str) -> None:
    schedule = build(name, 2, 4)
    result = run(schedule, issue_forward=1, issue_backward=2)
    times = sorted(issued(result).values())
    assert len(times) == sum(map(len, schedule.lanes))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))


def test_a_host_that_is_faster_than_the_stages_costs_a_pipeline_its_first_launches_only() -> None:
    for schedule in (gpipe(3, 6), staggered_1b1f(3, 6), zb_h1(3, 6)):
        plain, issued = run(schedule), run(schedule, issue_forward=0.05, issue_backward=0.1)
        assert plain.seconds <= issued.seconds <= plain.seconds + 3 * 0.05
        slow = run(schedule, issue_forward=3, issue_backward=6)
        assert slow.seconds >= max(3 * 6 * 3, 6 * (3 + 6))  # all forwards; what one stage issues


def test_a_weight_gradient_is_issued_as_its_share_of_the_backward() -> None:
    result = run(zb_h1(2, 2), PipelinePlan(weight_share=0.25), issue_forward=1, issue_backward=4)
    assert {label[2]: end - start for label, (start, end) in issued(result).items()} == {"F": 1, "I": 3, "W": 1}
    recomputed = run(zb_h1(2, 2), PipelinePlan(checkpoint=True), issue_recompute=2, issue_backward=4)
    assert {label[2]: end - start for label, (start, end) in issued(recomputed).items()} == {"I": 6}


def test_a_streamed_stage_whose_chunks_fit_its_window_copies_each_once() -> None:
    stages = [[ChunkCost(forward=1, backward=2, transfer=1.5)] * 3] * 2
    fits = simulate_pipeline(staggered_1b1f(2, 4), stages, PipelinePlan(window=3))
    copies = [span.label for span in fits.timeline.spans if span.resource == "GPU 0 H2D"]
    assert copies == ["t0", "t1", "t2"]
    narrow = simulate_pipeline(staggered_1b1f(2, 4), stages, PipelinePlan(window=2))
    assert narrow.seconds > fits.seconds
    assert narrow.devices[0].peak_chunks == 2


def test_a_stage_waits_for_its_neighbour_first_and_for_its_own_copy_afterwards() -> None:
    stages = [[ChunkCost(forward=2, backward=2)], [ChunkCost(forward=1, backward=1, transfer=5)]]
    result = simulate_pipeline(gpipe(2, 1), stages, PipelinePlan(window=1))
    gaps = [(gap.cause.value, gap.start, gap.end) for gap in result.timeline.gaps if gap.resource == "GPU 1 compute"]
    assert gaps == [("bubble", 0, 2), ("stall", 2, 5), ("bubble", 7, 9)]


def test_gradients_of_streamed_stages_are_added_up_on_the_host_or_on_the_gpu() -> None:
    stages = [[ChunkCost(forward=1, backward=2, gradient=1)]] * 2
    on_host = simulate_pipeline(gpipe(2, 3), stages, PipelinePlan(window=1))
    on_gpu = simulate_pipeline(gpipe(2, 3), stages, PipelinePlan(window=1, accumulate=Accumulate.GPU))
    moved = [sum(s.seconds for s in r.timeline.spans if s.resource == "GPU 1 D2H") for r in (on_host, on_gpu)]
    assert moved == [1 + 1 + 1, 1]


def test_adding_a_gradient_to_its_sum_on_the_gpu_takes_memory_besides() -> None:
    stages = [[ChunkCost(forward=1, backward=2, gradient_bytes=10, adding_bytes=7)]] * 2
    for microbatches, expected in ((1, 10), (3, 10 + 7)):
        plan = PipelinePlan(window=1, accumulate=Accumulate.GPU)
        assert simulate_pipeline(gpipe(2, microbatches), stages, plan).devices[0].peak_bytes == expected


def test_the_copies_of_all_gpus_share_the_hosts_memory() -> None:
    stages = [[ChunkCost(forward=1, backward=1, transfer=1, weight_bytes=10)] * 4] * 4
    plan = PipelinePlan(window=1)
    free = simulate_pipeline(gpipe(4, 4), stages, plan)
    bound = simulate_pipeline(gpipe(4, 4), stages, plan, Machine(host_memory=12))
    copies = sum(span.kind.value == "t" for span in bound.timeline.spans)
    assert bound.seconds > free.seconds
    assert bound.seconds >= copies * 10 / 12


def test_what_copies_use_of_the_hosts_memory_and_of_each_bus_is_reported() -> None:
    stages = [
        [ChunkCost(forward=1, backward=2, transfer=1, weight_bytes=10, gradient=2, gradient_bytes=10)],
        [ChunkCost(forward=1, backward=2, transfer=2, weight_bytes=40)],
    ]
    machine = Machine(host_memory=100, both_ways=50)
    result = simulate_pipeline(gpipe(2, 1), stages, PipelinePlan(window=1), machine)
    assert result.seconds == 1 + 1 + 1 + 2 + 2 + 2  # the copies in, F, F, B and B; the last gradient leaves afterwards
    assert [device.both_ways for device in result.devices] == pytest.approx([20 / (50 * 9), 40 / (50 * 9)])
    assert result.shared == pytest.approx({"host memory": 60 / (100 * 9), "PCIe both ways": 40 / (50 * 9)})
    assert set(simulate_pipeline(gpipe(2, 1), stages, PipelinePlan(window=1)).shared.values()) == {0.0}


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    devices,
    microbatches,
    st.sampled_from([None, 1, 2]),
    st.sampled_from([0.0, 0.75]),
    st.booleans(),
)
def test_no_resource_does_two_things_at_once_and_waiting_and_work_fill_every_gpu(name, p, m, window, send, checkpoint):
    schedule = build(name, p, m)
    stages = [
        [ChunkCost(forward=1 + s % 2, backward=2, transfer=1, gradient=0.5)] * (1 + s % 3)
        for s in range(schedule.stages)
    ]
    result = simulate_pipeline(schedule, stages, PipelinePlan(window=window, send=send, checkpoint=checkpoint))
    for resource in result.timeline.resources:
        mine = sorted((span.start, span.end) for span in result.timeline.spans if span.resource == resource)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
        work = sum(span.seconds for span in result.timeline.spans if span.resource == resource)
        assert result.seconds >= work * (1 - 1e-9)
    for device in result.devices:
        assert device.bubble + device.stall + device.compute * result.seconds == pytest.approx(result.seconds)


@settings(deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), devices, microbatches)
def test_no_schedule_beats_the_time_of_its_work_nor_loses_to_one_microbatch_after_the_other(name, p, m):
    result = run(build(name, p, m))
    assert 3 * m * (1 - 1e-9) <= result.seconds <= 3 * m * p * (1 + 1e-9)


def test_resident_weights_are_cast_once_and_gradients_for_each_microbatch() -> None:
    stages = [[ChunkCost(forward=1, backward=2, cast=0.5, add=0.25)]]
    resident = simulate_pipeline(gpipe(1, 2), stages, PipelinePlan())
    assert resident.seconds == 2 * (1 + 2) + 0.5 + 2 * 0.5 + 0.25
    assert simulate_pipeline(gpipe(1, 2), stages, PipelinePlan(window=1)).seconds == 2 * (1 + 2)


def test_prediction_needs_no_backward() -> None:
    result = run(forward_only(staggered_1b1f(3, 5)), kept_bytes=7)
    assert result.seconds == 5 + 2


def test_a_table_that_cannot_run_is_refused_with_its_grid() -> None:
    with pytest.raises(PlanError, match="deadlocks"):
        run(Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipelinePlan(weight_share=1.5), "weight_share=1.5"),
        (lambda: PipelinePlan(send=-1), "send=-1: a number of at least 0"),
        (lambda: PipelinePlan(send=float("inf")), "send=inf seconds"),
        (lambda: PipelinePlan(send="1"), "send='1': a number"),
        (lambda: PipelinePlan(weight_share=float("nan")), "weight_share=nan: a number between 0 and 1"),
        (lambda: PipelinePlan(window=0), "window=0"),
        (lambda: PipelinePlan(window=1.5), "window=1.5"),
        (lambda: PipelinePlan(pin="all"), "pin='all'"),
        (lambda: PipelinePlan(checkpoint="keep"), "checkpoint='keep': True or False"),
        (lambda: PipelinePlan(accumulate="gpu"), r"accumulate='gpu': use one of Accumulate\.HOST, Accumulate\.GPU"),
        (lambda: simulate_pipeline(gpipe(2, 2), [[ChunkCost(forward=1, backward=1)]], RESIDENT), "1 of 2 stages"),
    ],
)
def test_what_cannot_be_is_refused_with_the_number(make, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()

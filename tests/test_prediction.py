"""Predictions from a calibration: costs, plans, and pipelines."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from stream_cases import data, stack
from torch import nn

from ramtorch_core import ConfigurationError, attach, pricing
from ramtorch_core.engine.launches import Launches
from ramtorch_core.engine.peaks import Peaks
from ramtorch_core.engine.timed_passes import Issue
from ramtorch_core.plan.schedule import build
from ramtorch_core.prediction import (
    Calibration,
    ChunkMeasure,
    Optimizer,
    Rates,
    StreamingPlan,
    calibrate,
    costs,
    even_stages,
    fitted,
    machine,
    predict,
    predict_pipeline,
    recommend,
    step_cost,
)

RATES = Rates(10.0, 5.0, 12.0, 1000.0, 0.1, 0.01, 1 << 40)
CHUNK = ChunkMeasure("blocks.0", 10, 10, 6, 40, 20, 20, 1.0, 0.75, 2.0, 300, 30, 280)
CALIBRATION = Calibration(RATES, (CHUNK,) * 3, outside=0.5, window=2, peaks=None)


def test_costs_follow_from_measures_and_rates() -> None:
    first, _, last = costs(CALIBRATION)
    assert (first.forward, first.recompute, first.backward) == (1.0, 0.75, 2.0)
    assert last == first
    assert step_cost(CALIBRATION).loss == 0.5
    assert (first.transfer, first.gradient, first.update) == (2.0, 4.0, 1.0)
    assert (first.weight_bytes, first.master_bytes, first.state_bytes) == (20, 40, 80)
    assert first.update_bytes == 10 * (28 - 4 + 2 + 2)


def test_gradients_of_several_microbatches_cross_in_the_masters_dtype() -> None:
    assert costs(CALIBRATION, 4)[0].gradient == 8.0


def test_gradients_that_are_published_cross_in_the_masters_dtype_and_shadows_are_cast_again() -> None:
    taken, published = (costs(CALIBRATION, optimizer=o)[0] for o in (Optimizer.JOINED, Optimizer.PUBLISHED))
    assert (taken.gradient_bytes, published.gradient_bytes) == (20, 40)
    assert published.update_bytes == taken.update_bytes + 20 + 40  # the wider gradient, and the master read once more
    assert published.update == pytest.approx(taken.update * published.update_bytes / taken.update_bytes)
    scaled = costs(CALIBRATION, optimizer=Optimizer.PUBLISHED, clip=True)[0]
    assert scaled.update_bytes == published.update_bytes + 3 * 40
    assert costs(CALIBRATION, optimizer=Optimizer.JOINED, clip=True)[0] == taken
    plans = [StreamingPlan(optimizer=o, staging=None) for o in (Optimizer.PUBLISHED, Optimizer.JOINED)]
    assert predict(CALIBRATION, plans[0]).seconds > predict(CALIBRATION, plans[1]).seconds


def test_the_hosts_time_around_visits_counts_once_per_microbatch_and_between_steps_once() -> None:
    slow = replace(CALIBRATION, issue=Issue(3.0, 1.0, 4.0, begin=5.0, loss=6.0), between=7.0)
    for count in (1, 2):
        plan = StreamingPlan(window=3, checkpoint=False, microbatches=count, optimizer=Optimizer.OVERLAPPED)
        fast = replace(slow, rates=Rates(1e9, 1e9, 1e9, 1e12, 1e-9, 1e-9, 1 << 40))
        assert predict(fast, plan).seconds == pytest.approx(7 + count * (3 * (3 + 4) + 5 + 6))


def test_a_measured_rate_of_adding_gradients_replaces_twice_their_copy() -> None:
    known = replace(CALIBRATION, rates=replace(RATES, accumulated=2.0))
    assert costs(known, 2)[0].accumulate == 40 / 2.0
    assert costs(CALIBRATION, 2)[0].accumulate == costs(CALIBRATION, 2)[0].gradient
    plan = StreamingPlan(microbatches=2)
    assert predict(known, plan).seconds > predict(CALIBRATION, plan).seconds


def test_sums_of_half_precision_masters_come_in_float32_and_leave_rounded_besides() -> None:
    half = replace(CHUNK, master_bytes=20, weight_bytes=20)
    for accumulated, seconds in ((2.0, (40 + 60) / 2 / 2.0), (None, 60 / 5.0)):
        known = replace(CALIBRATION, chunks=(half,) * 3, rates=replace(RATES, accumulated=accumulated))
        found = costs(known, 3)[0]
        assert found.accumulate == seconds
        assert found.added_bytes == (40, 60)
        assert found.gradient_bytes == 20  # the first of them, and what the optimizer reads
    plan = StreamingPlan(microbatches=3, window=3, checkpoint=False)
    line = predict(known, plan).result.timeline
    copies = [(span.label, dict(span.uses)) for span in line.spans if span.resource == "D2H"]
    assert [label for label, _ in copies] == ["g2", "g1", "g0"] * 3
    seconds = [20 / 5.0] * 3 + [12.0] * 6
    crossed = [uses["PCIe both ways"] * each for (_, uses), each in zip(copies, seconds, strict=True)]
    assert crossed == [20] * 3 + [40 + 60] * 6


def test_plans_are_predicted_and_recommended_as_the_engine_carries_them_out() -> None:
    """A quarter of AdamW's updates runs ahead, if nothing else is said; sums in half precision are published."""
    plan = StreamingPlan(optimizer=Optimizer.OVERLAPPED, clip=True)
    slow = replace(CALIBRATION, chunks=(CHUNK,) * 4, rates=replace(RATES, host_update=1.0))
    quarter, none = (predict(slow, replace(plan, ahead=ahead)).seconds for ahead in (1 / 4, 0.0))
    assert predict(slow, plan).seconds == quarter < none
    alone = {"windows": (2,), "resident": (0,), "checkpoint": (True,)}
    assert recommend(slow, base=plan, **alone).seconds == quarter  # type: ignore[arg-type]
    half = replace(CALIBRATION, chunks=(replace(CHUNK, master_bytes=20, weight_bytes=20),) * 3)
    plan = StreamingPlan(microbatches=2, optimizer=Optimizer.OVERLAPPED)
    published = predict(half, replace(plan, optimizer=Optimizer.PUBLISHED)).seconds
    assert predict(half, plan).seconds == published
    assert recommend(half, base=plan, **alone).seconds == published  # type: ignore[arg-type]
    offer = recommend(half, base=replace(plan, microbatches=1), **alone).offers[-1]  # type: ignore[arg-type]
    assert offer.plan.optimizer is Optimizer.PUBLISHED
    assert offer.seconds == published / 2


def test_a_fitted_calibration_takes_as_long_as_the_measured_step() -> None:
    plan = StreamingPlan(optimizer=Optimizer.OVERLAPPED, staging=None)
    plain = predict(CALIBRATION, plan)
    found = fitted(CALIBRATION, plan, plain.seconds + 9.0, update_seconds=2 * 3 * 1.0)
    assert found.update_factor == pytest.approx(2.0)
    assert costs(found)[0].update == pytest.approx(2 * costs(CALIBRATION)[0].update)
    assert predict(found, plan).seconds == pytest.approx(plain.seconds + 9.0, rel=1e-3)
    assert fitted(CALIBRATION, plan, 0.0, update_seconds=0.0) == CALIBRATION


def test_where_the_optimizer_itself_steps_what_is_unexplained_is_its_time() -> None:
    plan = StreamingPlan(optimizer=Optimizer.PUBLISHED)
    plain = predict(CALIBRATION, plan)
    found = fitted(CALIBRATION, plan, plain.seconds + 6.0, update_seconds=0.0)
    assert found.between == 0.0
    assert found.update_factor > 1.0
    assert predict(found, plan).seconds == pytest.approx(plain.seconds + 6.0, rel=0.01)
    assert predict(found, replace(plan, pin=3)).seconds == predict(CALIBRATION, replace(plan, pin=3)).seconds


def test_a_resident_chunk_casts_its_weights_and_adds_up_its_gradients_on_the_device() -> None:
    per_byte = RATES.device_update / 28
    cost = costs(CALIBRATION)[0]
    assert cost.cast == pytest.approx((40 + 20) * per_byte)
    assert cost.add == pytest.approx(3 * 40 * per_byte)
    assert (cost.resident_bytes, cost.cast_bytes, cost.own_gradient_bytes) == (40, 20, 40)
    assert cost.backward_seconds(checkpoint=True, resident=True, adds=True) == pytest.approx(
        2.75 + 2 * cost.cast + cost.add
    )
    full = replace(CHUNK, weight_bytes=40, gradient_bytes=40)
    assert costs(replace(CALIBRATION, chunks=(full,)))[0].cast == 0


def test_what_was_measured_beyond_the_plan_is_added_in_its_phase() -> None:
    plan = StreamingPlan(optimizer=Optimizer.OVERLAPPED)
    slots, held, made, left = 2 * 20, 3 * 30, 280, 20  # of the plan that was measured: two slots, checkpoints
    before = slots + 7
    peaks = Peaks(
        before=before,
        forward=before + held + 400,
        loss=before + held + 500,
        turn=before + held + 600,
        first=before + held + made + left + 70,
        backward=before + held - 30 + made + 2 * left + 80,
    )
    measured = replace(CALIBRATION, peaks=peaks)
    found = step_cost(measured)
    assert (found.base_bytes, found.forward_bytes, found.loss_bytes, found.turn_bytes) == (7, 400, 500, 600)
    assert (found.first_bytes, found.work_bytes) == (70, 80)
    assert predict(measured, plan).peak_bytes == max(dataclasses.astuple(peaks))
    assert predict(measured, replace(plan, checkpoint=False)).peak_bytes == before + 3 * 300 + 600
    untold = step_cost(replace(CALIBRATION, peaks=replace(peaks, turn=0)))
    assert untold.turn_bytes == untold.loss_bytes == 500
    assert step_cost(replace(CALIBRATION, peaks=Peaks(0))).base_bytes == 0


def test_buffers_are_charged_whether_or_not_memory_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "BOUNCE_BYTES", 7)
    for known in (CALIBRATION, replace(CALIBRATION, peaks=Peaks(2 * 20 + 3))):
        assert step_cost(known).bounce_bytes == 7
        published = predict(known, StreamingPlan(optimizer=Optimizer.PUBLISHED)).peak_bytes
        overlapped = predict(known, StreamingPlan(optimizer=Optimizer.OVERLAPPED)).peak_bytes
        assert published - overlapped == 7  # gradients are cast


def test_a_recommendation_fits_the_devices_memory() -> None:
    choice = recommend(CALIBRATION, on=machine(RATES, gpu_bytes=2000))
    assert choice.peak_bytes <= 2000
    small = recommend(CALIBRATION, on=machine(RATES, gpu_bytes=700))
    assert small.peak_bytes <= 700
    assert small.seconds >= choice.seconds


def test_of_a_whole_device_no_plan_takes_what_cuda_and_allocators_need() -> None:
    assert machine(replace(RATES, device_bytes=24_000_000_000)).gpu_bytes == pytest.approx(0.95 * 23.5e9)
    assert machine(replace(RATES, device_bytes=1000)).gpu_bytes == 1
    assert machine(replace(RATES, device_bytes=None)).gpu_bytes is None
    assert machine(RATES, gpu_bytes=1e9).gpu_bytes == 1e9


@pytest.mark.parametrize("clip", [False, True])
def test_what_more_microbatches_would_buy_is_what_a_step_of_them_takes(clip: bool) -> None:
    base = StreamingPlan(optimizer=Optimizer.OVERLAPPED, clip=clip)
    choice = recommend(CALIBRATION, on=machine(RATES, gpu_bytes=200e6), base=base)
    (offer,) = (offer for offer in choice.offers if "microbatches" in offer.change)
    assert offer.plan.microbatches == 2
    assert 2 * offer.seconds == predict(CALIBRATION, offer.plan).seconds


def test_a_pipeline_of_equal_stages_has_the_bubble_of_its_schedule() -> None:
    rates = replace(RATES, device_update=1e-9)  # casts and sums of gradients take no time
    even = replace(CALIBRATION, rates=rates, chunks=(CHUNK,) * 4, outside=0.0)
    found = predict_pipeline(even, build("gpipe", 2, 4), [2])
    assert found.seconds == pytest.approx(5 * 6.0)
    assert found.bubble == pytest.approx(1 / 5)
    assert even_stages(even, 2) == [2]
    assert even_stages(replace(even, chunks=(replace(CHUNK, backward=20.0), *even.chunks)), 2) == [1]
    assert even_stages(replace(even, outside=20.0), 2) == [3], "what is in no chunk is in the last stage"
    assert even_stages(even, 1) == []
    for stages, message in ((0, "stages"), (5, "cannot cut 4 items into 5")):
        with pytest.raises(ConfigurationError, match=message):
            even_stages(even, stages)
    for cuts in ([0], [4], [3, 2]):
        with pytest.raises(ConfigurationError, match="first_chunks"):
            predict_pipeline(even, build("gpipe", len(cuts) + 1, 4), cuts)


def test_the_hosts_time_to_launch_counts_in_a_pipeline_too() -> None:
    rates = replace(RATES, device_update=1e-9)
    even = replace(CALIBRATION, rates=rates, chunks=(CHUNK,) * 4, outside=0.0)
    schedule = build("gpipe", 2, 4)

    def seconds(launches: Launches, issue: Issue) -> float:
        chunks = (replace(CHUNK, launches=launches),) * 4
        return predict_pipeline(replace(even, chunks=chunks, issue=issue), schedule, [2]).seconds

    plain, beside = seconds(Launches(), Issue()), Issue(begin=0.5, loss=0.3)
    first = 0.5 + 2 * 0.1  # of the first stage, at the most; the rest is issued while the devices compute
    assert plain <= seconds(Launches(0.1, 0.2), beside) <= plain + first
    streaming = replace(beside, forward=10.0, recompute=10.0, backward=10.0)  # which no visit here does
    assert seconds(Launches(0.1, 0.2), streaming) == seconds(Launches(0.1, 0.2), beside)
    forwards, backwards = 4 * (4 * 1 + 2), 4 * (2 * 5 + 3)  # of all stages, and of the last one
    assert seconds(Launches(1.0, 5.0), Issue(begin=2.0, loss=3.0)) >= forwards + backwards


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_model_is_calibrated_and_predicted(autocast: torch.dtype | None) -> None:
    found = calibrate(
        stack(4), data(), device="cpu", chunks="blocks.*", resident_below=0, autocast=autocast, steps=1, rates=RATES
    )
    for checkpoint in (False, True):
        prediction = predict(found, StreamingPlan(window=2, checkpoint=checkpoint, optimizer=Optimizer.OVERLAPPED))
        assert prediction.seconds >= sum(chunk.forward + chunk.backward for chunk in found.chunks)


def test_batches_of_several_arguments_and_own_losses_and_steps_work() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.blocks[1](self.blocks[0](a) + b)}

    model, options = Two(), {"device": "cpu", "chunks": "blocks.*", "resident_below": 0, "steps": 1, "rates": RATES}
    pair = (data(), data(1))
    assert len(calibrate(model, pair, **options).chunks) == 2
    assert len(calibrate(model, pair, loss_fn=lambda out: out["out"].sum(), **options).chunks) == 2
    assert len(calibrate(model, None, step=lambda: model(*pair)["out"].sum(), **options).chunks) == 2
    with pytest.raises(ConfigurationError, match="loss_fn"):
        calibrate(nn.Sequential(stack(2), NoGradient()), data(), **(options | {"chunks": "*.blocks.*"}))


class NoGradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def test_no_windows_to_choose_from_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"windows=\(\)"):
        recommend(CALIBRATION, windows=())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0: a whole number of at least 1"),
        ({"steps": 1.5}, r"steps=1\.5"),
        ({"loss_fn": lambda out: out}, r"loss_fn returns a tensor of shape \(.*\): a loss is a tensor of one element"),
        ({"loss_fn": lambda out: 1.0}, r"loss_fn returns 1\.0"),
        ({"loss_fn": lambda out: out.detach().sum()}, "the loss has no gradient"),
        ({"step": lambda: None}, "step returns None"),
    ],
)
def test_steps_that_cannot_be_measured_are_refused(options, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        calibrate(stack(2), data(), **{"device": "cpu", "resident_below": 0, "steps": 1, "rates": RATES} | options)


def test_a_model_that_is_not_trained_or_streamed_already_is_not_calibrated() -> None:
    model = stack(2)
    engine = attach(model, device="cpu", resident_below=0)
    try:
        with pytest.raises(ConfigurationError, match="streamed already"):
            calibrate(model, data(), device="cpu", resident_below=0, rates=RATES)
    finally:
        engine.close()
    with pytest.raises(ConfigurationError, match="no parameter of the module is trained"):
        calibrate(model.requires_grad_(False), data(), device="cpu", resident_below=0, rates=RATES)

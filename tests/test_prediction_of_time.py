"""Predicted step times are those that the engine takes, on a device where every duration is known."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from virtual_world_cases import WIDTH, Times, World

from ramtorch_core import tuning
from ramtorch_core.engine.launches import Launches
from ramtorch_core.engine.rates import Rates
from ramtorch_core.parts import Part, predicted_parts
from ramtorch_core.prediction import Machine, Optimizer, Order, StreamingPlan, predict
from ramtorch_core.simulate.clock import Kind
from ramtorch_core.tuning import TIMED, WARM_UP, Tuner, Wish

CHUNK = 8 * WIDTH * 32
"""Bytes of the weights of a chunk with 32 hidden values, in float32."""
MS = 1e-3


def rates(copy: float, gradient: float, update: float, add: float = 1.0) -> Rates:
    """Of a machine on which a chunk takes so many milliseconds; casts on the device take no time."""
    return Rates(
        h2d=CHUNK / (copy * MS),
        d2h=CHUNK / (gradient * MS),
        both_ways=1e30,
        host_memory=1e30,
        host_update=update * MS / (CHUNK // 4),
        device_update=1e-30,
        device_bytes=1 << 40,
        accumulated=CHUNK / (add * MS),
    )


TIMES = Times(1.0 * MS, 2.5 * MS, 0.2 * MS, 0.3 * MS)
SIZES = (32, 64, 16, 32, 32, 48)
CHUNKS = tuple((hidden, replace(TIMES, forward=hidden / 32 * MS, backward=hidden / 13 * MS)) for hidden in SIZES)
LOSS = Times(0.5 * MS, 0.7 * MS, 0.1 * MS, 0.2 * MS)
WORLDS = {
    "compute": World(rates(0.3, 0.4, 0.5), CHUNKS, LOSS, tail=0.4 * MS, between=0.6 * MS),
    "transfers": World(rates(3.0, 0.4, 0.5), CHUNKS, LOSS, tail=0.4 * MS, between=0.6 * MS),
    "gradients": World(rates(0.3, 6.0, 0.5, 9.0), CHUNKS, LOSS, tail=0.4 * MS, between=0.6 * MS),
    "updates": World(rates(0.3, 0.4, 9.0), CHUNKS, LOSS, tail=0.4 * MS, between=0.6 * MS),
    "host": World(
        rates(0.3, 0.4, 0.5),
        [(hidden, replace(times, issue_forward=4 * MS, issue_backward=9 * MS)) for hidden, times in CHUNKS],
        LOSS,
    ),
}
PLANS: list[dict[str, Any]] = [
    {"window": window, "pin": pin, "checkpoint": checkpoint}
    for window, pin, checkpoint in itertools.product((1, 2, 4), (0, 3), (True, False))
]


@pytest.fixture(scope="module")
def calibrations() -> dict[str, Any]:
    return {name: replace(world.calibrate(), between=world.between) for name, world in WORLDS.items()}


@pytest.mark.parametrize("limit", WORLDS)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("optimizer", [Optimizer.OVERLAPPED, Optimizer.JOINED])
def test_a_step_takes_as_long_as_predicted_whatever_limits_it(
    calibrations: dict[str, Any], limit: str, microbatches: int, optimizer: Optimizer
) -> None:
    for number, knobs in enumerate(PLANS):
        if number % 3 == (microbatches + (optimizer is Optimizer.JOINED)) % 3:  # each plan with a part of the rest
            plan = StreamingPlan(microbatches=microbatches, optimizer=optimizer, **knobs)
            found = predict(calibrations[limit], plan, Machine()).seconds
            tolerance = 0.02 if limit == "host" else 1e-6  # one time to issue stands for that of all chunks
            assert WORLDS[limit].train(plan)[0] == pytest.approx(found, rel=tolerance), plan


def test_microbatches_side_by_side_take_as_long_as_predicted(calibrations: dict[str, Any]) -> None:
    for limit, knobs in itertools.product(("compute", "transfers", "updates"), PLANS[::4]):
        plan = StreamingPlan(microbatches=3, order=Order.CHUNK, optimizer=Optimizer.OVERLAPPED, **knobs)
        found = predict(calibrations[limit], plan, Machine()).seconds
        assert WORLDS[limit].train(plan)[0] == pytest.approx(found), (limit, plan)


def test_published_gradients_take_as_long_as_predicted(calibrations: dict[str, Any]) -> None:
    for limit, knobs in itertools.product(("gradients", "updates"), PLANS[::3]):
        for microbatches in (1, 2):
            plan = StreamingPlan(microbatches=microbatches, optimizer=Optimizer.PUBLISHED, **knobs)
            found = predict(calibrations[limit], plan, Machine()).seconds
            assert WORLDS[limit].train(plan)[0] == pytest.approx(found), (limit, plan)


def test_updates_that_wait_for_the_norm_of_all_gradients_take_as_long_as_predicted(
    calibrations: dict[str, Any],
) -> None:
    for order, microbatches in (Order.CHUNK, 3), (Order.MICROBATCH, 1):
        for limit, optimizer, knobs in itertools.product(
            ("compute", "updates"), (Optimizer.OVERLAPPED, Optimizer.JOINED), PLANS[::5]
        ):
            plan = StreamingPlan(microbatches=microbatches, order=order, optimizer=optimizer, clip=True, **knobs)
            found = predict(calibrations[limit], plan, Machine()).seconds
            assert WORLDS[limit].train(plan)[0] == pytest.approx(found), (limit, plan)


def test_sums_on_the_host_are_published_where_they_are_clipped(calibrations: dict[str, Any]) -> None:
    plan = StreamingPlan(microbatches=2, optimizer=Optimizer.OVERLAPPED, clip=True)
    assert plan.updates is Optimizer.PUBLISHED
    found = predict(calibrations["compute"], plan, Machine()).result.timeline
    scaling = sum(12 / 28 * span.seconds for span in found.spans if span.kind is Kind.UPDATE) / (1 + 12 / 28)
    assert WORLDS["compute"].train(plan)[0] == pytest.approx(found.seconds - scaling)  # which takes no time there


@pytest.mark.parametrize("limit", WORLDS)
def test_forwards_alone_take_as_long_as_predicted(calibrations: dict[str, Any], limit: str) -> None:
    for knobs in PLANS[::2]:
        plan = StreamingPlan(train=False, **knobs)
        found = predict(calibrations[limit], plan, Machine()).seconds
        tolerance = 0.02 if limit == "host" else 0.01  # how long the loss of a forward alone is issued is not known
        assert WORLDS[limit].train(plan)[0] == pytest.approx(found, rel=tolerance), plan


def test_compute_and_the_hosts_time_are_measured_apart_from_waits(calibrations: dict[str, Any]) -> None:
    for limit in ("compute", "transfers", "gradients", "updates"):
        found = calibrations[limit]
        for chunk, (_, times) in zip(found.chunks, CHUNKS, strict=True):
            assert chunk.forward == pytest.approx(times.forward + 0.4 * MS)
            assert chunk.recompute == pytest.approx(times.forward)  # which ends where the last layer begins
            assert chunk.backward == pytest.approx(times.backward)
            assert chunk.launches == Launches(pytest.approx(times.issue_forward), pytest.approx(times.issue_backward))
        assert found.outside == pytest.approx(LOSS.forward + LOSS.backward)
        issue = found.issue  # though the host waits for copies of masters when a forward is over
        assert issue.forward == pytest.approx(TIMES.issue_forward)
        assert issue.recompute + issue.backward == pytest.approx(TIMES.issue_forward + TIMES.issue_backward)
        assert issue.begin == pytest.approx(0.0)
        assert issue.loss == pytest.approx(LOSS.issue_forward + LOSS.issue_backward)


@pytest.mark.parametrize("window", [2, 3, 4])
def test_copies_overlap_compute_from_one_forward_to_the_next_whatever_number_of_chunks_streams(window: int) -> None:
    """The last chunk of a pass is still computed when the first of the next one is copied, to another slot."""
    for count in range(3, 8):
        chunks = [(32, Times(1.0 * MS, 1.0 * MS, 0.0, 0.0))] * count
        world = World(rates(1.0, 1.0, 0.1), chunks, Times(0.0, 0.0, 0.0, 0.0))
        plan = StreamingPlan(train=False, window=window)
        measured = world.train(plan)[0]
        assert measured == pytest.approx(count * MS), count
        assert predict(world.calibrate(), plan, Machine()).seconds == pytest.approx(measured), count


@pytest.mark.parametrize("optimizer", [Optimizer.OVERLAPPED, Optimizer.JOINED])
def test_knobs_are_chosen_with_what_steps_take_here_and_not_with_the_rates_alone(optimizer: Optimizer) -> None:
    world = World(rates(0.3, 0.4, 1.5), CHUNKS, LOSS, tail=0.4 * MS, between=3 * MS, slower=3.0)
    plan = StreamingPlan(optimizer=optimizer)
    tuner, seconds, _ = world.tune(Wish(window="auto", pin=0, activations="auto", gpu_memory=1 << 40), plan)
    assert tuner.choice is not None
    assert seconds == pytest.approx(tuner.choice.seconds, rel=0.02)
    assert tuner.measured > tuner.simulated + 2.9 * MS  # the time between steps at least


@pytest.mark.parametrize("clip", [True, False])
def test_a_plain_loop_that_clips_is_measured_and_chosen_for_as_one(monkeypatch: pytest.MonkeyPatch, clip: bool) -> None:
    monkeypatch.setattr(tuning, "known_rates", lambda device: device.rates)
    plan = StreamingPlan(optimizer=Optimizer.OVERLAPPED, clip=clip)
    tuner, seconds, _ = WORLDS["updates"].tune(Wish(window="auto", gpu_memory=1 << 40), plan, plain=True)
    assert tuner.choice is not None
    assert tuner.choice.plan.clip is clip
    assert seconds == pytest.approx(tuner.choice.seconds, rel=0.02)


@pytest.mark.parametrize("step", range(WARM_UP + 1, WARM_UP + TIMED + 1))
def test_neither_a_validation_nor_a_short_step_at_the_end_of_an_epoch_counts_as_a_step(step: int) -> None:
    plan, wish = StreamingPlan(optimizer=Optimizer.OVERLAPPED, microbatches=3), Wish(window="auto", gpu_memory=1 << 40)

    def tuned(*, validation: float = 0.0, microbatches: int = 3) -> float:
        with WORLDS["compute"].loop(plan) as loop:
            tuner = Tuner(loop.streamer, wish, loop.device.rates, base=lambda: plan)
            for index in range(1, WARM_UP + TIMED + 1):
                loop.device.spend(validation * (index == step))
                loop.plan = replace(plan, microbatches=microbatches if index == step else 3)
                loop.step()
                tuner.between_steps([loop.optimizer])
            assert tuner.choice is not None
            return tuner.measured

    assert tuned(validation=10.0) == pytest.approx(tuned())
    assert tuned(microbatches=1) == pytest.approx(tuned())


HOST = Times(1.2 * MS, 3.5 * MS, 2.4 * MS, 2.4 * MS)
SLOW_HOST = World(rates(1.8, 1.8, 11.0), [(32, HOST)] * 8, LOSS, tail=0.4 * MS, between=3 * MS)
"""The host takes longer for a forward or a recompute than the device, and in a backward it waits for updates."""


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("optimizer", [Optimizer.OVERLAPPED, Optimizer.JOINED])
def test_measured_steps_tell_compute_from_the_host_and_both_from_waits(
    monkeypatch: pytest.MonkeyPatch, plain: bool, optimizer: Optimizer
) -> None:
    monkeypatch.setattr(tuning, "known_rates", lambda device: device.rates)
    plan = StreamingPlan(optimizer=optimizer)
    limit = int(1.06 * SLOW_HOST.train(replace(plan, pin=2))[1])
    wish = Wish(window=2, pin="auto", activations="checkpoint", gpu_memory=limit)
    tuner, seconds, _ = SLOW_HOST.tune(wish, plan, plain=plain)
    assert tuner.choice is not None
    assert tuner.choice.plan.pin not in (0, ())
    assert tuner.choice.seconds == pytest.approx(seconds, rel=0.02)
    parts = predicted_parts(tuner.choice.result.timeline)
    visits = 8 * (2 * HOST.forward + 0.4 * MS + HOST.backward)
    assert parts[Part.COMPUTE] == pytest.approx(visits + LOSS.forward + LOSS.backward)
    issued = 8 * (2 * HOST.issue_forward + HOST.issue_backward) + LOSS.issue_forward + LOSS.issue_backward
    assert parts[Part.ISSUE] == pytest.approx(issued + SLOW_HOST.between, rel=0.02)

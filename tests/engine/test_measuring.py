"""Measuring steps that run anyway: results stay as they are, and numbers are those of a calibration."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_cases import assert_same, data, descend, stack, state_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from virtual_world_cases import Times, World

from ramtorch_core import attach
from ramtorch_core.engine import timed_passes
from ramtorch_core.engine.calibration import calibrate_chunks
from ramtorch_core.engine.laps import read_visits
from ramtorch_core.engine.measuring import AHEAD, PLAIN, ROOM, Measuring
from ramtorch_core.engine.rates import Rates
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import FOR_TRANSFER, Kind
from ramtorch_core.plan.itinerary import Direction, Visit
from ramtorch_core.prediction import Optimizer, StreamingPlan

RATES = Rates(1e9, 1e9, 1.5e9, 4e9, 1e-9, 1e-10, None)


def attached(model: nn.Module, **options: Any) -> Any:
    return attach(model, device="cpu", chunks="blocks.*", **{"resident_below": 0, **options})


@pytest.mark.parametrize("activations", ["checkpoint", "keep"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_activations_of_a_running_step_are_those_of_a_calibration(activations: str, microbatches: int) -> None:
    torch.manual_seed(0)
    model = stack(3)
    expected = _calibrated(copy.deepcopy(model))
    streamer = attached(model, activations=activations)
    measuring = Measuring(streamer, train=True)
    measuring.begin_activations()
    for index in range(microbatches):
        model(data(index)).square().mean().backward()
    measuring.end_activations()
    measuring.begin_times()
    for index in range(microbatches):
        model(data(index)).square().mean().backward()
    measuring.end_lap()
    found = measuring.calibration(RATES)
    measuring.close()
    assert found is not None
    for mine, theirs in zip(found.chunks, expected.chunks, strict=True):
        assert (mine.kept_bytes, mine.boundary_bytes) == (theirs.kept_bytes, theirs.boundary_bytes)
        assert (mine.parameters, mine.weight_bytes, mine.gradient_bytes) == (
            theirs.parameters,
            theirs.weight_bytes,
            theirs.gradient_bytes,
        )
        assert mine.forward > 0
    streamer.close()


def _calibrated(model: nn.Module) -> Any:
    step = lambda: model(data()).square().mean()
    return calibrate_chunks(model, step, Device("cpu"), RATES, chunks="blocks.*", resident_below=0, steps=1)


def test_measured_steps_have_the_results_of_others() -> None:
    def run(measured: bool) -> list[Any]:
        torch.manual_seed(0)
        model = stack(3, dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        streamer = attached(model)
        measuring = Measuring(streamer, train=True)
        if measured:
            measuring.begin_activations()
            measuring.begin_times()
        losses = [descend(model, optimizer, index) for index in range(3)]
        measuring.close()
        streamer.close()
        return [losses, state_of(model), torch.get_rng_state()]

    assert_same(run(True), run(False))


def test_what_a_checkpoint_of_the_users_drops_is_not_kept() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(lambda x: self.linear(x).tanh().exp(), x, use_reentrant=False)

    model = nn.Module()
    model.blocks = nn.ModuleList([Inner()])
    model.forward = lambda x: model.blocks[0](x)
    streamer = attached(model, activations="keep")
    measuring = Measuring(streamer, train=True)
    measuring.begin_activations()
    model(data()).sum().backward()
    assert measuring._watch is not None
    assert measuring._watch.per_pass()[0].kept == data().nbytes  # the input of the checkpoint
    measuring.close()
    streamer.close()


def test_a_chunk_that_was_never_visited_leaves_no_calibration() -> None:
    model = stack(3)
    streamer = attached(model)
    measuring = Measuring(streamer, train=True)
    measuring.begin_times()
    model.blocks[0](data()).sum().backward()
    measuring.end_lap()
    assert measuring.calibration(RATES) is None
    measuring.close()
    streamer.close()


# ------------------------------------------------------------------ a device that computes beside the host

MS = 1e-3
UPDATES = Rates(1e9, 1e9, 1e30, 1e30, 1e-5, 1e-30, 1 << 40, 1e9)
"""Of a machine whose updates take longest."""
WORLD = World(UPDATES, [(32, Times(1 * MS, 2 * MS, 3 * MS, 5 * MS))] * 6, between=4 * MS)


def measured(measuring: Measuring, loop: Any) -> Any:
    """What is found in some steps."""
    loop.step()
    measuring.begin_peaks()
    loop.step()
    measuring.end_peaks()
    measuring.begin_times()
    for _ in range(PLAIN + AHEAD):
        loop.step()
        measuring.end_lap()
    found = measuring.calibration(UPDATES)
    measuring.close()
    return found


def test_a_timed_step_ends_where_the_host_goes_on_and_the_next_begins_when_nothing_is_under_way() -> None:
    with WORLD.loop(StreamingPlan(optimizer=Optimizer.OVERLAPPED)) as loop:
        measuring = Measuring(loop.streamer, train=True)
        measuring.begin_times()
        for _ in range(PLAIN):
            begun = loop.device.now
            loop.step()
            assert loop.device.updater.clock > loop.device.now or loop.device.updater._queue
            gone_on = loop.device.now
            measuring.end_lap()
            assert loop.device.updater.clock <= loop.device.now
            assert not loop.device.updater._queue
            assert measuring.seconds[-1] == pytest.approx(gone_on - begun)
        measuring.close()


def test_compute_is_taken_from_steps_in_which_the_host_is_ahead_and_the_rest_from_others() -> None:
    with WORLD.loop(StreamingPlan(optimizer=Optimizer.OVERLAPPED)) as loop:
        measuring = Measuring(loop.streamer, train=True)
        found = measured(measuring, loop)
    assert len(measuring.seconds) == PLAIN
    for chunk in found.chunks:
        assert (chunk.forward, chunk.recompute) == (pytest.approx(1 * MS), pytest.approx(1 * MS))
        assert chunk.backward == pytest.approx(2 * MS)
    assert found.issue.forward == found.issue.recompute == pytest.approx(3 * MS)
    assert found.issue.backward == pytest.approx(5 * MS)  # though it waits for updates there


def test_without_memory_for_what_puts_the_host_ahead_all_steps_run_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    with WORLD.loop(StreamingPlan(optimizer=Optimizer.OVERLAPPED)) as loop:
        monkeypatch.setattr(loop.device, "usable_bytes", lambda: ROOM)
        measuring = Measuring(loop.streamer, train=True)
        found = measured(measuring, loop)
    assert len(measuring.seconds) == PLAIN + AHEAD
    assert found.chunks[-1].forward == pytest.approx(3 * MS)  # the device waits for the host inside of a visit


def test_memory_in_pieces_too_small_for_what_puts_the_host_ahead_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with WORLD.loop(StreamingPlan(optimizer=Optimizer.OVERLAPPED)) as loop, monkeypatch.context() as patch:
        patch.setattr(timed_passes, "_Ahead", refuse)
        measuring = Measuring(loop.streamer, train=True)
        found = measured(measuring, loop)
        assert not loop.device.ranges._listeners
    assert len(measuring.seconds) == PLAIN + AHEAD
    assert found.issue.forward == pytest.approx(3 * MS)


# ------------------------------------------------------------------ laps

F, B = Direction.FORWARD, Direction.BACKWARD


class _At:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def seconds_since(self, earlier: "_At") -> float:
        return self.seconds - earlier.seconds


def ranges(*entries: tuple[Any, float, float]) -> list[Any]:
    """Visits as (direction, chunk), or stalls as "stall", with begin and end."""
    moments = sorted({moment for _, begin, end in entries for moment in (begin, end)})
    return [
        SimpleNamespace(
            kind=Kind.STALL if what == "stall" else Kind.VISIT,
            what=FOR_TRANSFER if what == "stall" else Visit(*what),
            start=_At(begin),
            end=_At(end),
            begun=moments.index(begin),
            ended=moments.index(end),
            seconds=end - begin,
        )
        for what, begin, end in entries
    ]


def read(*entries: tuple[Any, float, float], train: bool = True) -> Any:
    return read_visits(ranges(*entries), asynchronous=True, train=train)


def test_waits_are_taken_from_visits_and_from_what_is_outside() -> None:
    lap = read(((F, 0), 0, 2), ("stall", 2.5, 3), ((B, 0), 4, 10), ("stall", 5, 6))
    assert lap.visits == {Visit(F, 0): 2, Visit(B, 0): 5}
    assert lap.outside == 10 - 2 - 5 - 0.5 - 1


def test_a_lap_of_several_passes_is_their_mean() -> None:
    lap = read(((F, 0), 0, 1), ((B, 0), 1, 3), ((F, 0), 100, 103), ((B, 0), 104, 106))
    assert lap.visits == {Visit(F, 0): 2, Visit(B, 0): 2}
    assert lap.outside == 0.5


def test_all_microbatches_through_a_chunk_are_one_pass_each() -> None:
    lap = read(((F, 0), 0, 1), ((F, 0), 1, 2), ((B, 0), 2, 4), ((B, 0), 4, 6))
    assert lap.visits == {Visit(F, 0): 1, Visit(B, 0): 2}


def test_forwards_of_an_evaluation_before_a_step_do_not_count() -> None:
    lap = read(
        ((F, 0), 0, 50), ((F, 1), 50, 90), ((F, 0), 91, 92), ((F, 1), 92, 93), ((B, 1), 93, 95), ((B, 0), 95, 97)
    )
    assert lap.visits == {Visit(F, 0): 1, Visit(F, 1): 1, Visit(B, 1): 2, Visit(B, 0): 2}
    assert lap.outside == 0


def test_forwards_alone_count_without_training_and_not_with_it() -> None:
    entries = ((F, 0), 0, 1), ((F, 1), 1, 3)
    assert read(*entries) is None
    assert read(*entries, train=False).visits == {Visit(F, 0): 1, Visit(F, 1): 2}
    assert read(train=False) is None

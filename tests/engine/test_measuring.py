"""Measuring steps that run anyway: results stay as they are, and numbers are those of a calibration."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_cases import assert_same, data, descend, stack, state_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ramtorch_core import attach
from ramtorch_core.engine.calibration import calibrate_chunks
from ramtorch_core.engine.laps import read_visits
from ramtorch_core.engine.measuring import Measuring
from ramtorch_core.engine.rates import Rates
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import FOR_TRANSFER, Kind
from ramtorch_core.plan.itinerary import Direction, Visit

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

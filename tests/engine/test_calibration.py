"""Calibration: times by chunk, activation bytes, and that the model is left as it was."""

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_cases import Block, assert_same, data, stack, state_of
from torch import Tensor, nn

from ramtorch_core import ConfigurationError, HostMemoryError
from ramtorch_core.engine import calibration, rates, timed_passes
from ramtorch_core.engine.calibration import calibrate_chunks
from ramtorch_core.engine.chunks import find_chunks
from ramtorch_core.engine.footprints import Run
from ramtorch_core.engine.rates import Rates, known_rates, measure_rates
from ramtorch_core.engine.stream import Streamer
from ramtorch_core.engine.timed_passes import FIRST, Deliveries, Issue, Part, issuing, least_issue, time_passes
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.host import Arena
from ramtorch_core.memory.ranges import FOR_UPDATE, Kind
from ramtorch_core.plan.itinerary import Direction, Visit

RATES = Rates(1e9, 1e9, 1.5e9, 4e9, 1e-9, 1e-10, None)
CPU = Device("cpu")


def calibrated(model: nn.Module, step: Any = None, **options: Any) -> calibration.Calibration:
    step = step or (lambda: model(data()).square().mean())
    return calibrate_chunks(model, step, CPU, RATES, **{"chunks": "blocks.*", "resident_below": 0, **options})


def test_every_chunk_is_measured_and_the_model_stays_as_it_was() -> None:
    model = stack(3)
    model(data()).mean().backward()
    before, grads = state_of(model), {p: p.grad for p in model.parameters()}
    found = calibrated(model)
    assert_same(state_of(model), before)
    assert all(p.grad is grads[p] for p in model.parameters())
    assert [chunk.name for chunk in found.chunks] == ["blocks.0", "blocks.1", "blocks.2"]
    expected = sum(p.numel() for p in Block().parameters())
    for chunk in found.chunks:
        assert (chunk.parameters, chunk.trained) == (expected, expected)
        assert chunk.master_bytes == chunk.gradient_bytes == 4 * expected <= chunk.weight_bytes
        assert chunk.forward > 0
        assert chunk.backward >= 0
    assert found.outside >= 0
    assert found.peaks is None


class Plain(nn.Module):
    """Saves exactly its input and the product's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def test_activations_are_counted_once_where_they_are_saved_first() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([Plain(), Plain()])
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))
    x = data(0, 5, 8)
    found = calibrated(model, lambda: model(x).sum())
    first, second = found.chunks
    assert first.boundary_bytes == 0  # its input is there before
    assert second.boundary_bytes == x.nbytes
    assert (first.recomputed_bytes, second.recomputed_bytes) == (x.nbytes, x.nbytes)  # their own outputs of tanh
    assert first.kept_bytes == 2 * x.nbytes  # its input, and tanh's output, which is the second one's input
    assert second.kept_bytes == x.nbytes  # tanh's output


def test_waits_inside_of_a_visit_are_no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()

    class Tick:
        """Each look at the clock comes a second after the one before."""

        def __init__(self) -> None:
            self.at = next(ticks)

        def query(self) -> bool:
            return True

        def seconds_since(self, earlier: "Tick") -> float:
            return float(self.at - earlier.at)

    device = Device("cpu")
    monkeypatch.setattr(device.ranges, "_mark", Tick)
    monkeypatch.setattr(device, "mark", Tick)

    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with device.ranges.span(Kind.STALL, FOR_UPDATE):
                return super().forward(x)

    model = nn.Sequential(Waiting(4, 4), Waiting(4, 4))
    x = torch.ones(2, 4)
    found = calibrate_chunks(model, lambda: model(x).mean(), device, RATES, chunks="*", resident_below=0)
    # A visit looks at its begin and its end, and so does the wait inside: three seconds in all, and one does not count.
    assert [chunk.forward for chunk in found.chunks] == [2.0, 2.0]
    assert [chunk.recompute for chunk in found.chunks] == [2.0, 2.0]  # likewise, within the five of a backward visit
    assert [chunk.backward for chunk in found.chunks] == [2.0, 2.0]
    assert found.issue == Issue()  # the host computes


def test_what_is_timed_copies_and_updates_nothing() -> None:
    model = stack(2)
    streamer = Streamer(model, find_chunks(model, "blocks.*", resident_below=0), device=CPU, resident_below=0)
    run = Run(streamer, lambda: model(data()).mean(), None)
    run.train()
    copied, updated = streamer.gradients.copied_bytes, streamer.updates.updater.updated
    found = time_passes(run, 2)
    assert len(found) == 2
    assert (streamer.gradients.copied_bytes, streamer.updates.updater.updated) == (copied, updated)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert streamer.conservative
    run.train()
    assert streamer.updates.updater.updated == updated + 2
    streamer.close()


F, R, B = Part


def test_the_hosts_time_per_visit_is_that_of_the_first_visits() -> None:
    ends = [(F, 12.0), (F, 13.0), (F, 14.0), (B, 20.0), (B, 22.0), (B, 24.0)]
    assert issuing(ends, 10.0) == Issue(1.0, 0.0, 2.0, begin=2.0 - 1.0, loss=6.0 - 2.0)
    late = [(F, float(n)) for n in range(1, FIRST + 2)] + [(F, 1000.0 * n) for n in range(1, 40)]
    assert issuing(late, 0.0).forward == 1.0
    assert issuing([(F, 3.0)], 1.0) == Issue(forward=2.0)
    assert issuing([], 1.0) == Issue()


def test_the_hosts_time_of_a_recompute_is_told_apart() -> None:
    ends = [(F, 1.0), (F, 2.0), (R, 7.0), (B, 10.0), (R, 12.0), (B, 15.0)]
    assert issuing(ends, 0.0) == Issue(1.0, 2.0, 3.0, begin=0.0, loss=5.0 - 2.0)


def test_the_hosts_clock_stops_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    device, deliveries = Device("cpu"), Deliveries()
    monkeypatch.setattr(timed_passes, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(device.ranges, "clock", lambda: now[0])
    device.ranges.listen().waiting = deliveries
    for chunk in (0, 1):
        with device.ranges.span(Kind.VISIT, Visit(Direction.FORWARD, chunk)):
            now[0] += 2.0
            with device.ranges.span(Kind.STALL, FOR_UPDATE):
                now[0] += 5.0
    assert deliveries.ends == [(F, 2.0), (F, 4.0)]


def test_where_the_host_also_waits_the_shorter_laps_count() -> None:
    ends = [(F, 1.0), (F, 9.0), (F, 10.0), (F, 11.0), (F, 12.0), (B, 20.0), (B, 22.0), (B, 90.0)]
    assert least_issue(ends) == Issue(forward=1.0, backward=2.0)
    assert least_issue([]) == Issue()


def test_autocast_halves_what_crosses() -> None:
    full, half = (calibrated(stack(2), autocast=dtype).chunks[0] for dtype in (None, torch.bfloat16))
    assert half.weight_bytes < full.weight_bytes
    assert half.gradient_bytes < full.gradient_bytes
    assert half.master_bytes == full.master_bytes


def test_frozen_parameters_are_not_trained() -> None:
    model = stack(2)
    model.blocks[1].up.requires_grad_(False)
    first, second = calibrated(model).chunks
    assert second.parameters == first.parameters
    assert second.trained == first.trained - sum(p.numel() for p in model.blocks[1].up.parameters())


def test_a_loss_without_gradient_and_a_model_that_does_not_stream_are_refused() -> None:
    model = stack(2)
    with pytest.raises(ConfigurationError, match="no gradient"):
        calibrated(model, lambda: model(data()).detach().mean())
    with pytest.raises(ConfigurationError, match="nothing streams"):
        calibrated(model, resident_below=1 << 30)
    descended = copy.deepcopy(model)
    assert torch.equal(descended(data()), model(data()))


# ------------------------------------------------------------------ rates


def test_rates_of_the_host_are_positive() -> None:
    found = measure_rates(CPU, copy_bytes=1 << 20, parameters=1 << 14)
    for value in (found.h2d, found.d2h, found.both_ways, found.host_memory, found.host_update, found.device_update):
        assert value > 0
    assert found.device_bytes is None
    assert found.accumulated is not None
    assert found.accumulated > 0


def test_updates_are_measured_on_weights_that_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "last_cache_bytes", lambda: 100)
    monkeypatch.setattr(rates, "available_bytes", lambda: None)
    assert [rates._weights_with_room(nbytes) for nbytes in (1, 400, 500, 1200, 5000)] == [16, 3, 3, 1, 1]
    monkeypatch.setattr(rates, "available_bytes", lambda: 8 * 1000)
    assert [rates._weights_with_room(nbytes) for nbytes in (1, 400, 500, 1200, 5000)] == [16, 2, 2, 1, 1]
    probe = rates._Probe(CPU, 1 << 10)
    first = [group.weights[0].parameter[0].item() for group in probe._groups]
    assert len(first) == 1
    monkeypatch.setattr(rates, "last_cache_bytes", lambda: 4096)
    monkeypatch.setattr(rates, "available_bytes", lambda: None)
    probe = rates._Probe(CPU, 1 << 10)
    updated = [group.weights[0].parameter[0].item() for group in probe._groups]
    assert updated == first * 3, "each once"
    assert probe.beyond_caches
    probe.update()
    again = [group.weights[0].parameter[0].item() for group in probe._groups]
    assert again[0] < updated[0]
    assert again[1:] == updated[1:]
    probe.update()
    assert probe._groups[1].weights[0].parameter[0].item() == again[0], "in turn"


@pytest.mark.parametrize("error", [HostMemoryError("full"), RuntimeError("can't allocate memory")])
def test_updates_are_measured_on_one_weight_where_the_host_has_no_memory_for_more(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "last_cache_bytes", lambda: 1 << 13)
    monkeypatch.setattr(rates, "available_bytes", lambda: None)
    left = 3

    def arena(nbytes: int, device: Device) -> Arena:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return Arena(nbytes, device)

    monkeypatch.setattr(rates, "Arena", arena)
    probe = rates._Probe(CPU, 1 << 10)
    assert len(probe._groups) == 1
    assert not probe.beyond_caches
    probe.update()
    with pytest.raises(type(error), match=str(error)):
        rates._Probe(CPU, 1 << 10)


def test_rates_that_an_earlier_version_measured_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "measure_rates", lambda device: RATES)
    file = tmp_path / "machines.json"
    known_rates(CPU, file=file)
    monkeypatch.setattr(rates, "VERSION", rates.VERSION + 1)
    anew = replace(RATES, h2d=7.0)
    monkeypatch.setattr(rates, "measure_rates", lambda device: anew)
    assert known_rates(CPU, file=file) == anew


def test_rates_are_measured_once_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(device: Device) -> Rates:
        measured.append(device)
        return RATES

    monkeypatch.setattr(rates, "measure_rates", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert known_rates(CPU) == known_rates(CPU) == RATES
    assert len(measured) == 1
    monkeypatch.setattr(rates.platform, "node", lambda: "another machine")
    known_rates(CPU)
    assert len(measured) == 2
    monkeypatch.undo()


def test_rates_of_a_busy_machine_are_replaced_by_better_ones_of_another_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, hour = tmp_path / "machines.json", 3600.0
    busy = replace(RATES, h2d=RATES.h2d / 3, host_update=3 * RATES.host_update)
    other = replace(RATES, d2h=RATES.d2h / 2, device_update=2 * RATES.device_update)
    for at, measured, found in (
        (0.0, busy, busy),
        (0.5 * hour, RATES, busy),  # too soon
        (1.0 * hour, other, RATES),
        (9.0 * hour, busy, RATES),
        (99.0 * hour, replace(RATES, h2d=1e99), RATES),  # often enough
    ):
        monkeypatch.setattr(rates, "measure_rates", lambda device, measured=measured: measured)
        assert known_rates(CPU, file=file, clock=lambda at=at: at) == found


@pytest.mark.parametrize("short_first", [True, False])
def test_updates_that_the_cache_may_have_sped_up_give_way_to_others(
    tmp_path: Path, short_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(RATES, host_update=RATES.host_update / 2, host_memory=2 * RATES.host_memory, beyond_caches=False)
    better = replace(RATES, host_update=0.9 * RATES.host_update)
    found = []
    for hour, measured in enumerate([short, RATES, better] if short_first else [RATES, short, better]):
        monkeypatch.setattr(rates, "measure_rates", lambda device, measured=measured: measured)
        found.append(known_rates(CPU, file=tmp_path / "machines.json", clock=lambda hour=hour: 3600.0 * hour))
    assert found == [short if short_first else RATES, RATES, better]


def test_rates_that_are_known_stay_where_there_is_no_room_to_measure_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(device: Device) -> Rates:
        raise torch.OutOfMemoryError

    file = tmp_path / "machines.json"
    monkeypatch.setattr(rates, "measure_rates", full)
    with pytest.raises(torch.OutOfMemoryError):
        known_rates(CPU, file=file)
    monkeypatch.setattr(rates, "measure_rates", lambda device: RATES)
    known_rates(CPU, file=file, clock=lambda: 0.0)
    monkeypatch.setattr(rates, "measure_rates", full)
    assert known_rates(CPU, file=file, clock=lambda: 1e6) == RATES


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"x": 1}'])
def test_a_spoilt_file_only_costs_measuring_again(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "machines.json"
    file.write_text(content)
    monkeypatch.setattr(rates, "measure_rates", lambda device: RATES)
    assert known_rates(CPU, file=file) == RATES
    monkeypatch.setattr(rates, "measure_rates", lambda device: pytest.fail("it is known"))
    assert known_rates(CPU, file=file) == RATES
    assert known_rates(CPU, file=file) == RATES
    (key,) = (key for key in json.loads(file.read_text()) if key != "x")
    for spoilt in ({"h2d": 1.0}, {"rates": {"h2d": 1.0}, "measured": [0.0]}, [], None):
        file.write_text(json.dumps({key: spoilt}))
        monkeypatch.setattr(rates, "measure_rates", lambda device: RATES)
        assert known_rates(CPU, file=file) == RATES


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(rates, "measure_rates", lambda device: RATES)
    assert known_rates(CPU, file=tmp_path / "file" / "machines.json") == RATES

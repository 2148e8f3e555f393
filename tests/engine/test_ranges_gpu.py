"""Ranges on a GPU: waits are found where they are, nobody waits to find them, and traces show device work."""

import json
from pathlib import Path

import pytest
import torch

from ramtorch_core import attach
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.ranges import FOR_TRANSFER, Kind
from ramtorch_core.prediction import Optimizer, StreamingPlan, calibrate, predict
from ramtorch_core.traces import trace

pytestmark = pytest.mark.gpu

CYCLES = 200_000_000
"""A tenth of a second, roughly."""


def test_a_wait_for_a_slow_copy_is_timed_on_the_device_and_collected_without_waiting() -> None:
    device = Device("cuda")
    listener, stream = device.ranges.listen(), device.stream()
    with device.on(stream):
        torch.cuda._sleep(CYCLES)
        copied = device.record(stream)
    with device.ranges.span(Kind.STALL, FOR_TRANSFER, shown=False):
        device.wait(copied)
    assert listener.collect() == []  # the copy is under way, and nobody waited for it
    device.synchronize()
    (stall,) = listener.collect()
    assert stall.seconds > 0.01


def test_a_wait_of_the_host_counts_only_while_the_device_has_nothing_to_do() -> None:
    device = Device("cuda")
    listener = device.ranges.listen()
    torch.cuda._sleep(CYCLES)
    with device.ranges.span(Kind.STALL, FOR_TRANSFER):
        pass  # the device is busy before and after
    torch.cuda._sleep(CYCLES)
    device.synchronize()
    (stall,) = listener.collect()
    assert stall.seconds < 0.001


def test_a_model_is_calibrated_on_the_gpu_and_its_weights_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
    before = [parameter.clone() for parameter in model.parameters()]
    found = calibrate(model, torch.randn(4096, 2048), chunks="*", autocast=torch.bfloat16)
    assert all(map(torch.equal, model.parameters(), before))
    assert found.rates.h2d > 1e9
    assert found.peaks is not None
    for chunk in found.chunks:
        assert 0 < chunk.forward < 0.1
        assert chunk.weight_bytes == pytest.approx(2 * 2048**2, rel=0.01)
        assert chunk.kept_bytes >= 2 * 4096 * 2048  # the input, in bfloat16
    prediction = predict(found, StreamingPlan(window=2, optimizer=Optimizer.OVERLAPPED))
    assert prediction.seconds >= sum(chunk.forward + chunk.backward for chunk in found.chunks)
    assert prediction.peak_bytes >= max(found.peaks.forward, found.peaks.backward)


def test_a_trace_shows_visits_and_transfers_on_the_device_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3)))
    x = torch.randn(64, 1024, device="cuda")
    streamer = attach(model, device="cuda", chunks="*", resident_below=0)
    try:
        for _ in range(3):
            model(x).sum().backward()
        with trace(path):
            model(x).sum().backward()
    finally:
        streamer.close()
    events = json.loads(path.read_text())["traceEvents"]
    on_device = {event["name"] for event in events if event.get("cat") == "gpu_user_annotation"}
    assert {"F0", "F1", "F2", "t0", "t1", "t2"} <= on_device

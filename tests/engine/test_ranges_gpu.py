"""Ranges on a GPU: waits are found where they are, nobody waits to find them, and traces show device work."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ramtorch_core import Pipeline, attach
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
    with device.ranges.waiting(FOR_TRANSFER):
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


def trace_step(path: Path, width: int, **options: Any) -> None:
    """A step of three streamed layers, after some in which the engine has learned."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))
    x = torch.randn(64, width, device="cuda")
    streamer = attach(model, device="cuda", chunks="*", resident_below=0, **options)
    try:
        for _ in range(3):
            model(x).sum().backward()
        with trace(path):
            model(x).sum().backward()
    finally:
        streamer.close()


def test_a_trace_shows_visits_and_transfers_on_the_device_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace_step(path, 1024)
    events = json.loads(path.read_text())["traceEvents"]
    on_device = {event["name"] for event in events if event.get("cat") == "gpu_user_annotation"}
    assert {"F0", "F1", "F2", "t0", "t1", "t2"} <= on_device


def on_device(path: Path, cat: str, name: str = "") -> list[dict[str, Any]]:
    """What a trace shows on devices, with these letters in its name, in the order of its beginning."""
    events = json.loads(path.read_text())["traceEvents"]
    found = [event | {"end": event["ts"] + event["dur"]} for event in events if event.get("cat") == cat]
    return sorted((event for event in found if name in event["name"]), key=lambda event: event["ts"])


def test_a_wait_of_the_device_is_shown_until_what_it_waits_for_is_there(tmp_path: Path) -> None:
    path, device = tmp_path / "trace.json", Device("cuda")
    stream, work = device.stream(), torch.ones(1 << 20, device="cuda")
    work.add_(1).mul_(2)  # the first launch of a kernel loads it, and waits for those that run
    device.touch()
    device.synchronize()
    with trace(path):
        with device.on(stream):
            torch.cuda._sleep(CYCLES)
            copied = device.record(stream)
        work += 1
        with device.ranges.waiting(FOR_TRANSFER):
            device.wait(copied)
        work *= 2
    (stall,) = on_device(path, "gpu_user_annotation", "stall for a transfer")
    slow = max(on_device(path, "kernel", "spin"), key=lambda event: event["dur"])
    before, after = on_device(path, "kernel", "elementwise")
    assert before["tid"] == after["tid"] == stall["tid"] != slow["tid"]
    assert before["end"] <= stall["ts"] < slow["end"] <= stall["end"] <= after["ts"]


def beside(path: Path, stall: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Those waits, and by name what else is shown on the streams that wait."""
    stalls, shown = on_device(path, "gpu_user_annotation", stall), on_device(path, "gpu_user_annotation")
    streams = {(each["pid"], each["tid"]) for each in stalls}
    return stalls, {each["name"]: each for each in shown if (each["pid"], each["tid"]) in streams}


def test_a_trace_shows_the_wait_between_two_visits(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace_step(path, 2048, window=1)
    stalls, shown = beside(path, "stall for a transfer")
    for earlier, later in itertools.pairwise(shown[name] for name in ("F0", "F1", "F2")):
        assert len([each for each in stalls if earlier["end"] <= each["ts"] and each["end"] <= later["ts"]]) == 1


@pytest.mark.gpu(2)
def test_a_trace_of_a_pipeline_shows_the_bubbles_of_both_devices(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    stages = [torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU()) for _ in range(2)]
    pipeline = Pipeline(stage_modules=stages, devices=[0, 1])
    step: Any = {"loss_fn": torch.nn.functional.mse_loss, "schedule": "gpipe", "n_microbatches": 2}
    x, y = torch.randn(512, 2048), torch.randn(512, 2048)
    try:
        for _ in range(2):
            pipeline.step(x, y, **step)
        pipeline.step(x, y, **step, profile_path=str(path))
    finally:
        pipeline.close()
    bubbles, shown = beside(path, "stall for another stage")
    first, second = ([each for each in bubbles if each["pid"] == shown[op]["pid"]] for op in ("0F0", "1F0"))
    inputs = [each for each in second if each["end"] <= shown["1F0"]["ts"]]
    assert inputs, "the second device waits for the first microbatch"
    assert inputs[-1]["end"] >= shown["0F0"]["end"]
    assert [each for each in first if each["ts"] >= shown["0F1"]["end"]], "the first one waits for gradients"

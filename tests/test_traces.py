"""Trace files: what was executed is what was planned."""

from pathlib import Path
from typing import Any

import pytest
import torch
from stream_cases import Block, data, stack, streaming
from torch import nn
from torch.profiler import profile
from trace_cases import ops_in, ranges_in

from ramtorch_core import ConfigurationError, OffloadModel, Pipeline
from ramtorch_core.engine.pipeline.crew import Crew
from ramtorch_core.optim.updater import Updater
from ramtorch_core.plan.itinerary import format_itinerary, straight_itinerary
from ramtorch_core.plan.schedule import build
from ramtorch_core.plan.transfers import plan_transfers
from ramtorch_core.traces import trace


@pytest.mark.parametrize("window", [1, 2, 3])
def test_visits_and_transfers_of_a_traced_step_are_those_of_the_plan(window: int, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "step.json"
    loss = lambda output: output.square().mean()
    with OffloadModel([Block() for _ in range(4)], device="cpu", window=window) as model:
        model.step(data(), loss_fn=loss)  # learns the itinerary
        model.step(data(), loss_fn=loss, profile_path=str(path))
        plan = plan_transfers(straight_itinerary(range(4)), window)
        assert ranges_in(path, "FB") == format_itinerary(plan.itinerary).split()
        assert ranges_in(path, "t") == [f"t{transfer.chunk}" for transfer in plan.transfers]
        assert model.engine.follower.last == (plan.itinerary, plan.transfers)
        assert ranges_in(path, "g") == ["g3", "g2", "g1", "g0"]


def test_updates_are_shown_in_the_thread_that_makes_them(tmp_path: Path) -> None:
    path, model = tmp_path / "step.json.gz", stack(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with streaming(model, kernel="torch") as streamer, trace(path):
        with streamer.updates.overlap(optimizer):
            model(data()).square().mean().backward()
        optimizer.step()
        streamer.updates.wait()
    assert sorted(ranges_in(path, "u")) == ["u0", "u1", "u2"]


def test_threads_have_names_for_their_tracks(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    crew = Crew("pipeline-7")
    crew.run([lambda: names.append(torch._C._get_thread_name())], lambda error: None)
    crew.close()
    take_on = Updater._take_on

    def noting(updater: Updater, *args: Any) -> None:
        names.append(torch._C._get_thread_name())
        take_on(updater, *args)

    monkeypatch.setattr(Updater, "_take_on", noting)
    model = stack(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with streaming(model, kernel="torch") as streamer, streamer.updates.overlap(optimizer):
        model(data()).square().mean().backward()
    assert names == ["pipeline-7-0", "updater"]


def test_a_step_that_fails_writes_no_trace_and_the_next_one_can(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with OffloadModel([Block(), Block()], device="cpu") as model:
        with pytest.raises(ZeroDivisionError):
            model.step(data(), loss_fn=lambda output: 1 / 0, profile_path=str(path))
        assert not path.exists()
        model.step(data(), loss_fn=lambda output: output.mean(), profile_path=str(path))
    assert ranges_in(path, "FB") == ["F0", "F1", "B1", "B0"]


@pytest.mark.parametrize("name", ["gpipe", "staggered_1b1f", "zb_h1"])
def test_ops_of_a_traced_pipeline_step_are_the_schedule(name: str, tmp_path: Path) -> None:
    path, schedule = tmp_path / "step.json", build(name, 2, 3)
    pipeline = Pipeline(stage_modules=[Block(), nn.Sequential(Block(), nn.Linear(8, 1))], devices=["cpu", "cpu"])
    try:
        pipeline.step(
            torch.randn(6, 8),
            torch.randn(6, 1),
            loss_fn=nn.functional.mse_loss,
            schedule=name,
            n_microbatches=3,
            profile_path=str(path),
        )
    finally:
        pipeline.close()
    found = ops_in(path)
    for device, lane in enumerate(schedule.lanes):
        assert [op for op in found if op.startswith(str(device))] == [str(op) for op in lane]


def test_a_second_profiler_is_refused_and_the_first_goes_on() -> None:
    """Torch would end it without a word, and might crash later."""
    with profile() as profiler:
        torch.ones(1)
        with pytest.raises(RuntimeError, match=r"another profiler runs.* before trace.json"), trace("trace.json"):
            raise AssertionError("entered")
        torch.zeros(1)
    names = {event.name for event in profiler.events()}
    assert {"aten::ones", "aten::zeros"} <= names


@pytest.mark.parametrize("path", ["", 5])
def test_what_is_no_path_of_a_file_is_refused_before_the_step(path: Any) -> None:
    with OffloadModel([Block(), Block()], device="cpu") as model:
        with pytest.raises(ConfigurationError, match="path="):
            model.step(data(), loss_fn=lambda output: output.mean(), profile_path=path)
        model.flush_grads()
        assert all(parameter.grad is None for parameter in model.parameters())

"""Stages of equal time: the modules of one step are timed, on a clock that only they move, and stages are cut anew."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, At, accumulate, assert_same_gradients, batches
from torch import Tensor, nn

from ramtorch_core.engine.pipeline.runner import TIMED_STEP, PipelineRunner
from ramtorch_core.engine.pipeline.step import current_step
from ramtorch_core.engine.pipeline.streamed import StreamOptions
from ramtorch_core.memory.device import Device
from ramtorch_core.schedules import ScheduledRunner
from ramtorch_core.tuning import WARM_UP


class Clock:
    """Seconds pass only in `work`, and faster on devices of less `speed`."""

    def __init__(self) -> None:
        self.now, self.speeds = 0.0, [1.0] * 8

    def work(self, seconds: float, stage: int | None = None) -> None:
        current = current_step()
        if stage is None and current is not None:
            stage = current[1].stage
        if stage is not None:
            self.now += seconds / self.speeds[stage]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Device, "mark", lambda _: At(clock.now))
    return clock


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[float], None], seconds: float) -> Tensor:
        work(seconds)
        ctx.work = lambda: work(2 * seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.work()
        return gradient, None, None


class Costly(nn.Module):
    """Layers of one size, behind which something takes different times, and glue before the loss that takes some."""

    def __init__(self, clock: Clock, costs: list[float], glue: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in costs)
        self.head = nn.Linear(WIDTH, 3)
        self.costs, self.glue, self.work = costs, glue, clock.work

    def __deepcopy__(self, memo: Any) -> "Costly":
        other = Costly(Clock(), self.costs, self.glue)
        other.load_state_dict(self.state_dict())
        return other

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        for block, cost in zip(self.blocks, self.costs, strict=True):
            x = block(x)
            x = _Work.apply(x, self.work, cost)
        return F.cross_entropy(_Work.apply(self.head(x), self.work, self.glue), y)


Make = Callable[..., PipelineRunner]


@pytest.fixture
def pipeline() -> Iterator[Make]:
    made: list[PipelineRunner] = []

    def make(model: nn.Module, devices: int = 2, **options: Any) -> PipelineRunner:
        made.append(PipelineRunner(model, ["cpu"] * devices, balance="time", **options))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def train(runner: Any, model: Costly, step: int, microbatches: int = 4) -> Any:
    return runner.train(
        model.training_step,
        batches(microbatches, seed=step),
        lambda loss, _: (loss / microbatches, None),
        step=step,
    )


def begins(runner: PipelineRunner) -> list[str]:
    return [row.first_module for row in runner.stage_table()[1:]]


@pytest.mark.parametrize("schedule", ["gpipe", "staggered_1b1f", "zb_h1"])
@pytest.mark.parametrize("stream", [None, StreamOptions(resident_below=0, chunks="blocks.*")])
def test_stages_become_equal_in_time_after_the_timed_step_and_stay_exact(
    clock: Clock, pipeline: Make, schedule: str, stream: StreamOptions | None
) -> None:
    said: list[str] = []
    model = Costly(clock, [1, 1, 1, 1, 1, 1, 3, 3])
    reference = copy.deepcopy(model)
    runner = pipeline(model, schedule=schedule, stream=stream, say=said.append)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
    for step in range(TIMED_STEP + 3):
        assert begins(runner) == (["blocks.4"] if step <= TIMED_STEP else ["blocks.6"])
        assert runner.settled == (step > TIMED_STEP)
        result = train(runner, model, step)
        accumulate(reference, reference.training_step, batches(4, seed=step))
        assert_same_gradients(model, reference, result)
        for parameter, gradient in result.gradients.items():
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    (message,) = said
    assert message.startswith(
        "the slowest stage computes 96 s per step; cut by time it would be 72 s, and 72 s with equal"
    )
    assert "blocks.6" in message


def test_devices_of_other_speed_are_timed_as_they_are_and_get_their_share(clock: Clock, pipeline: Make) -> None:
    """Each layer was timed on another device, at first the first four on the fast one."""
    clock.speeds = [3.0, 1.0]
    model = Costly(clock, [1.0] * 8)
    runner = pipeline(model, device_weights=[3.0, 1.0])
    for step in range(TIMED_STEP + 1):
        train(runner, model, step)
    assert begins(runner) == ["blocks.6"]


def test_what_follows_the_last_module_counts_there(clock: Clock, pipeline: Make) -> None:
    model = Costly(clock, [1.0] * 8, glue=6.0)
    runner = pipeline(model)
    for step in range(TIMED_STEP + 1):
        train(runner, model, step)
    assert begins(runner) == ["blocks.7"]


def test_stages_that_are_equal_already_stay(clock: Clock, pipeline: Make) -> None:
    model = Costly(clock, [1.0] * 8)
    runner = pipeline(model, 4)
    for step in range(TIMED_STEP + 1):
        stages = runner.stages
        train(runner, model, step)
    assert runner.stages is stages
    assert runner.settled


def test_a_timed_step_that_fails_leaves_no_hook_and_the_next_one_is_timed(clock: Clock, pipeline: Make) -> None:
    model = Costly(clock, [1, 1, 1, 1, 1, 1, 3, 3])
    runner = pipeline(model)
    for step in range(TIMED_STEP):
        train(runner, model, step)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]

    def fail(item: Any) -> Tensor:
        raise ValueError(item)

    with pytest.raises(ValueError, match="1"):
        runner.train(fail, [1], lambda loss, _: (loss, None))
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert not any(device.ranges._listeners for device in runner.devices)
    assert not runner.settled
    train(runner, model, TIMED_STEP)
    assert begins(runner) == ["blocks.6"]


def test_other_modules_in_the_tree_are_timed_anew(clock: Clock, pipeline: Make) -> None:
    model = Costly(clock, [1, 1, 1, 1, 1, 1, 3, 3])
    runner = pipeline(model)
    for step in range(TIMED_STEP + 1):
        train(runner, model, step)
    model.blocks[0] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    train(runner, model, 3)
    assert not runner.settled
    assert begins(runner) == ["blocks.4"]
    for step in range(TIMED_STEP):
        train(runner, model, step)
    assert begins(runner) == ["blocks.6"]


def test_the_automatic_schedule_waits_until_stages_are_settled(clock: Clock, pipeline: Make) -> None:
    model = Costly(clock, [1, 1, 1, 1, 1, 1, 3, 3])
    runner = pipeline(model)
    scheduled = ScheduledRunner(runner, None, lambda message: None)
    for step in range(TIMED_STEP + 1 + WARM_UP + 2):
        assert not scheduled.auto.done
        train(scheduled, model, step)
    assert scheduled.auto.done
    assert begins(runner) == ["blocks.6"]


def test_compiled_modules_are_not_timed_and_that_is_told(pipeline: Make, caplog: pytest.LogCaptureFixture) -> None:
    model = Costly(Clock(), [1.0] * 4)
    model.blocks[1].compile(backend="eager")
    assert pipeline(model).settled
    assert "parts of the model are compiled and cannot be timed" in caplog.text

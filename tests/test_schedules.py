"""`schedule="auto"`: timed, simulated, chosen once, and without a change of any bit."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ramtorch_core import ConfigurationError, Pipeline, PipelineModel, schedules
from ramtorch_core.plan.schedule import build
from ramtorch_core.schedules import CANDIDATES, FIRST, SPLIT, AutoSchedule
from ramtorch_core.tuning import WARM_UP

WIDTH = 8


def stages(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)]


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def train(pipeline: Any, parameters: list[nn.Parameter], schedule: Any, steps: int) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for index in range(steps):
        x, y = batch(index)
        result = pipeline.step(x, y, schedule=schedule, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        result.flush_grads()
        optimizer.step()
        optimizer.zero_grad()
        yield result.loss


def test_the_choice_comes_after_the_timed_steps_is_told_once_and_changes_no_bit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ramtorch_core")
    modules = stages()
    plain = copy.deepcopy(modules)
    names = []
    pipeline = Pipeline(stage_modules=modules, devices=["cpu", "cpu"])
    losses = []
    for loss in train(pipeline, list(pipeline.parameters()), "auto", 6):
        losses.append(loss)
        names.append((pipeline._auto.name, pipeline._auto.done))
    pipeline.close()
    other = Pipeline(stage_modules=plain, devices=["cpu", "cpu"])
    expected = list(train(other, list(other.parameters()), "gpipe", 6))
    other.close()
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    for a, b in zip(modules, plain, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert names[: WARM_UP + 1] == [(FIRST, False)] * WARM_UP + [(SPLIT, False)]
    assert names[WARM_UP + 1][0] in CANDIDATES
    assert len(set(names[WARM_UP + 1 :])) == 1
    assert names[-1][1]
    (message,) = [text for text in caplog.messages if text.startswith("schedule=")]
    for part in ("s per step of 4 microbatches", "limited by: the compute of device", "n_microbatches=8", "gpipe"):
        assert part in message


class _Measured(AutoSchedule):
    """Has costs without timing them."""

    def __init__(
        self,
        runner: Any,
        seconds: dict[tuple[int, str], float],
        split: dict[tuple[int, str], float],
        makespan: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(runner, **options)
        self._costs, self._span = {FIRST: seconds, SPLIT: split}, makespan
        self.base: list[int | None] = [None, None]
        self.peak: list[int | None] = [None, None]

    def _read(self, listeners: Any, begun: Any) -> Any:
        return schedules._Timed(self._costs[self.name], self._span, self.base, self.peak)


FORWARD_BACKWARD = {(s, kind): float(t) for s in (0, 1) for kind, t in (("F", 1), ("B", 2))}
DIVIDED = {(s, kind): 1.0 for s in (0, 1) for kind in "FIW"}
NOTHING_DIVIDED = {(s, kind): float(t) for s in (0, 1) for kind, t in (("F", 1), ("I", 2.2), ("W", 0))}


@contextmanager
def chosen(auto: type[_Measured] = _Measured, **options: Any) -> Iterator[tuple[_Measured, list[str]]]:
    said: list[str] = []
    pipeline = Pipeline(stage_modules=stages(), devices=["cpu", "cpu"])
    try:
        found = pipeline._auto = auto(pipeline._steps.runner, say=said.append, **options)
        if (memory := getattr(found, "memory", None)) is not None:
            found.base, found.peak = memory
        for _ in train(pipeline, list(pipeline.parameters()), "auto", WARM_UP + 2):
            pass
        yield found, said
    finally:
        pipeline.close()


def test_where_the_backward_divides_the_split_schedule_wins() -> None:
    with chosen(seconds=FORWARD_BACKWARD, split=DIVIDED, makespan=15.0) as (auto, said):
        assert auto.name == SPLIT
        assert said[0].startswith("schedule='zb_h1': 13 s per step of 4 microbatches")
        assert "staggered_1b1f 15 s, eager_1f1b 15 s, gpipe 15 s" in said[0]


def test_where_nothing_divides_and_all_are_equal_the_one_that_holds_least_wins() -> None:
    with chosen(seconds=FORWARD_BACKWARD, split=NOTHING_DIVIDED, makespan=15.0) as (auto, said):
        assert auto.name == FIRST
        assert "n_microbatches=8 of half the size would buy 10 % less time" in said[0]


def test_slow_links_are_seen_in_the_measured_step_and_let_a_stage_run_ahead() -> None:
    with chosen(seconds=FORWARD_BACKWARD, split=NOTHING_DIVIDED, makespan=22.0) as (auto, _):
        assert auto.name in ("eager_1f1b", "gpipe")


def test_memory_that_a_schedule_would_not_find_excludes_it_and_the_gain_is_told() -> None:
    class Small(_Measured):
        memory = ([100, 100], [300, 300])

    options = {"seconds": FORWARD_BACKWARD, "split": NOTHING_DIVIDED, "makespan": 22.0}
    with chosen(Small, gpu_memory=320, **options) as (auto, said):
        assert auto.name == FIRST
        assert "more GPU memory would buy" in said[0]
        assert "with schedule='eager_1f1b'" in said[0] or "with schedule='gpipe'" in said[0]
    with chosen(Small, gpu_memory=250, **options) as (auto, _):
        assert auto.name == FIRST  # not even that is thought to fit, but it did


def test_batches_of_one_microbatch_tell_nothing() -> None:
    with Closing(PipelineModel(nn.Sequential(*stages()), devices=["cpu", "cpu"])) as model:
        for index in range(WARM_UP + 3):
            x, y = batch(index)
            model.step(x, y, schedule="auto", n_microbatches=1, loss_fn=nn.functional.mse_loss)
        assert not model._auto.done
        assert model._auto.name == FIRST


def test_an_error_in_a_timed_step_leaves_no_listener_and_the_next_step_is_timed() -> None:
    with Closing(PipelineModel(nn.Sequential(*stages()), devices=["cpu", "cpu"])) as model:
        x, y = batch(0)

        def fails(*_: Any) -> Tensor:
            raise KeyError("mine")

        for _ in range(WARM_UP):
            model.step(x, y, schedule="auto", loss_fn=nn.functional.mse_loss)
        with pytest.raises(KeyError, match="mine"):
            model.step(x, y, schedule="auto", loss_fn=fails)
        assert all(not device.ranges._listeners for device in model._steps.runner.devices)
        for _ in range(2):
            model.step(x, y, schedule="auto", loss_fn=nn.functional.mse_loss)
        assert model._auto.done


class Closing:
    def __init__(self, model: PipelineModel) -> None:
        self.model = model

    def __enter__(self) -> PipelineModel:
        return self.model

    def __exit__(self, *_: object) -> None:
        self.model.close()


def test_candidates_keep_every_stage_on_its_device() -> None:
    assert {build(name, 3, 4).placement for name in CANDIDATES} == {(0, 1, 2)}


# ------------------------------------------------------------------ out of memory


def test_a_device_out_of_memory_names_schedule_microbatches_and_stages() -> None:
    with Closing(PipelineModel(nn.Sequential(*stages()), devices=["cpu", "cpu"])) as model:
        x, y = batch(0)

        def fails(*_: Any) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity")

        with pytest.raises(torch.OutOfMemoryError) as caught:
            model.step(x, y, schedule="gpipe", n_microbatches=4, loss_fn=fails)
        text = str(caught.value)
        assert text.startswith(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity\n(ramtorch: stage "
        )
        assert "n_microbatches=8 instead of 4 halves" in text
        assert "by at least 2.15 GB" in text
        assert "stages=" in text
        assert "window=2 streams" in text


def test_an_unknown_schedule_is_still_refused() -> None:
    with Closing(PipelineModel(nn.Sequential(*stages()), devices=["cpu", "cpu"])) as model:
        x, y = batch(0)
        with pytest.raises(ConfigurationError, match="automatic"):
            model.step(x, y, schedule="automatic", loss_fn=nn.functional.mse_loss)

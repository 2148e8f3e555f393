"""What user code keeps in modules from one stage to the next belongs to its microbatch."""

import functools
import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Block, Chain, accumulate, assert_same_gradients, batches
from torch import Tensor, nn

from ramtorch_core.engine.pipeline import executor as executors
from ramtorch_core.engine.pipeline.kept import first_alone
from ramtorch_core.engine.pipeline.runner import PipelineRunner
from ramtorch_core.engine.pipeline.streamed import StreamOptions
from ramtorch_core.engine.pipeline.turnstile import Turnstile
from ramtorch_core.plan.schedule import Schedule, build

SCHEDULES = ["sequential", "gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1", "interleaved", "zbv"]


class Auxiliary(Chain):
    """Each block keeps a loss, which counts at the end: a mixture of experts does this."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, _, output: setattr(module, "aux", output.pow(2).mean()))

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) + sum(block.aux for block in self.blocks)


class Features(Chain):
    """Hooks collect what the blocks gave in a dictionary, under their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(functools.partial(self.keep, index))

    def keep(self, index: int, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.features[index] = output

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) + sum(feature.pow(2).mean() for feature in self.features.values())


class Collected(Chain):
    """Blocks append to lists: two are emptied, at the begin or the end, one is always new, and one collects all."""

    def __init__(self) -> None:
        super().__init__()
        self.emptied: list[Tensor] = []
        self.taken: list[Tensor] = []
        self.all: list[float] = []
        self.made: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(functools.partial(self.collect, index))

    def collect(self, index: int, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.emptied.append(output.pow(2).mean())
        self.taken.append(output.abs().mean())
        self.new.append(output.mean())
        self.made[index] = output.std()
        self.all.append(output.sum().item())

    def training_step(self, batch: Any) -> Tensor:
        self.emptied.clear()
        self.new, self.made = [], {}
        loss = super().training_step(batch) + sum(self.emptied) + sum(self.new) + sum(self.made.values())
        while self.taken:
            loss = loss + self.taken.pop()
        return loss

    def state(self) -> list[Any]:
        return [sorted(self.all), [x.item() for x in self.emptied], self.taken, len(self.new), sorted(self.made)]


class Masked(Chain):
    """Blocks look up a mask of the batch; one carries a state on; the whole counts and adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.total = 0, torch.zeros(())
        self.register_buffer("carried", torch.zeros(WIDTH))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        self.mask, self.fresh = (x.mean(0) > 0).float(), {"scale": 1 + x.mean()}
        for index, block in enumerate(self.blocks):
            x = block(x, mask=self.mask) * self.fresh["scale"]
            self.count += 1
            self.total = self.total + 1.0
            if index == 1:
                x = x + self.carried
                self.carried = 0.5 * self.carried + x.detach().mean(0)
        self.mask = None
        loss = F.cross_entropy(self.head(x), y)
        self.losses.append(loss.detach())
        return loss

    def state(self) -> list[Any]:
        return [self.count, float(self.total), self.carried.tolist(), [float(loss) for loss in self.losses], self.mask]


@pytest.fixture(params=[True, False], ids=["as on the CPU", "as on GPUs"])
def turns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs no thread goes on with its next op if another one waits."""

    def make(order: Any, _sticky: bool, *more: Any) -> Turnstile:
        return Turnstile(order, request.param, *more)

    monkeypatch.setattr(executors, "Turnstile", make)


Make = Callable[..., PipelineRunner]


@pytest.fixture
def pipeline() -> Iterator[Make]:
    made: list[PipelineRunner] = []

    def make(model: nn.Module, schedule: str = "staggered_1b1f", devices: int = 4, **options: Any) -> PipelineRunner:
        count = devices // (2 if schedule in ("interleaved", "zbv") else 1)
        made.append(PipelineRunner(model, ["cpu"] * count, schedule=schedule, **options))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def train(runner: PipelineRunner, model: Any, step: int, count: int = 4) -> Any:
    return runner.train(model.training_step, batches(count, seed=step), lambda loss, _: (loss / count, None), step=step)


def assert_exact(runner: PipelineRunner, model: Any, reference: Any, steps: int = 3) -> None:
    """Training and evaluation in turns."""
    for step in range(steps):
        result = train(runner, model, step)
        reference.zero_grad()
        expected = accumulate(reference, reference.training_step, batches(4, seed=step))
        assert [loss.item() for loss in result.outputs] == [loss.item() for loss in expected]
        assert_same_gradients(model, reference, result)
        with torch.no_grad():
            found = runner.evaluate(model.training_step, batches(4, seed=10 + step))
            assert found == [reference.training_step(item) for item in batches(4, seed=10 + step)]


@pytest.mark.parametrize("kind", [Auxiliary, Features, Collected, Masked])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_microbatch_finds_what_it_kept(turns: None, pipeline: Make, kind: Any, schedule: str) -> None:
    """It found what another one had kept meanwhile: a wrong loss, or an error in backward, depending on time."""
    torch.manual_seed(0)
    model, reference = kind(), kind()
    reference.load_state_dict(model.state_dict())
    assert_exact(pipeline(model, schedule), model, reference)
    if kind in (Collected, Masked):
        assert model.state() == reference.state()


@pytest.mark.parametrize("kind", [Auxiliary, Masked])
def test_an_evaluation_that_comes_first_and_streamed_stages(turns: None, pipeline: Make, kind: Any) -> None:
    torch.manual_seed(0)
    model, reference = kind(), kind()
    reference.load_state_dict(model.state_dict())
    runner = pipeline(model, devices=2, stream=StreamOptions(resident_below=0, chunks="blocks.*", poison=True))
    with torch.no_grad():
        found = runner.evaluate(model.training_step, batches(4))
        assert found == [reference.training_step(item) for item in batches(4)]
    assert_exact(runner, model, reference)


def test_other_modules_in_the_tree_are_watched_anew(turns: None, pipeline: Make) -> None:
    model, reference = Masked(), Masked()
    runner = pipeline(model)
    for each in (model, reference):
        torch.manual_seed(1)
        each.blocks[2] = Block()
        each.blocks[2].register_forward_hook(lambda module, _, output: setattr(module, "aux", output.mean()))
    reference.load_state_dict(model.state_dict())
    assert_exact(runner, model, reference)


def test_modules_that_are_left_out_keep_one_state_for_all(turns: None, pipeline: Make) -> None:
    """Metrics count in whatever stages they are updated."""

    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = torch.zeros(2)

    class Measured(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.metric = Metric()

        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            for block in self.blocks:
                x = block(x)
                self.metric.values = self.metric.values + 1
            return F.cross_entropy(self.head(x), y)

    model = Measured()
    runner = pipeline(model, aside=lambda module: isinstance(module, Metric))
    for step in range(3):
        train(runner, model, step)
    assert model.metric.values.tolist() == [3 * 4 * 4] * 2


def test_nothing_of_a_step_is_held_after_it_but_by_the_model(pipeline: Make) -> None:
    model = Collected()
    runner = pipeline(model)
    gc.collect()
    gc.disable()
    for step in range(3):
        train(runner, model, step)
        held = [weakref.ref(tensor) for tensor in (*model.emptied, *model.new, *model.made.values())]
        assert len(held) == 3 * 4
        model.emptied.clear()
        model.new, model.made = [], {}
        assert not any(reference() is not None for reference in held)
    gc.enable()


def test_nothing_is_kept_where_stages_pass_everything_on(pipeline: Make) -> None:
    """Then steps cost no more than without all this."""
    model = Chain()
    runner = pipeline(model)
    train(runner, model, 0)
    plan = runner.plan(len(batches(4)))
    with runner._kept.step(plan, training=True) as (chosen, keeping):
        assert chosen is plan
        assert keeping is None
    with runner._kept.step(plan, training=False) as (_, keeping):
        assert keeping is not None  # an evaluation has not been seen


@pytest.mark.timeout(20)
@pytest.mark.parametrize("microbatch", [0, 1])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_while_others_wait_to_begin_ends_the_step(pipeline: Make, microbatch: int, stage: int) -> None:
    model, items = Masked(), batches(4)
    runner = pipeline(model)

    def fail(_module: nn.Module, args: Any) -> None:
        time.sleep(0.01 * random.random())
        if model.failing is items[microbatch][0]:
            raise ArithmeticError("here")

    def step(item: Any) -> Tensor:
        model.failing = item[0]
        return model.training_step(item)

    hook = model.blocks[stage].register_forward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="here"):
            runner.train(step, items, lambda loss, _: (loss, None))
    hook.remove()
    reference = Masked()
    reference.load_state_dict(model.state_dict())
    assert_exact(runner, model, reference)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_first_microbatch_may_run_ahead_where_each_stage_has_its_device(name: str) -> None:
    assert first_alone(build(name, 3, 4)) == (name not in ("interleaved", "zbv"))


def test_a_schedule_of_the_users_in_which_another_microbatch_comes_between() -> None:
    assert not first_alone(Schedule.parse("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"))
    assert first_alone(Schedule.parse("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1"))

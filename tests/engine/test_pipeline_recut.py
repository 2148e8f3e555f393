"""Stages that are cut anew begin where modules run themselves, for every microbatch and for evaluation too."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Block, Chain, Shared, accumulate, assert_same_gradients, batches
from torch import Tensor, nn

from ramtorch_core.engine.pipeline.balance import balanced_entries
from ramtorch_core.engine.pipeline.executor import Executor
from ramtorch_core.engine.pipeline.runner import PipelineRunner
from ramtorch_core.engine.pipeline.running_order import RunningOrder
from ramtorch_core.engine.pipeline.streamed import StreamOptions
from ramtorch_core.errors import StageOrderError
from ramtorch_core.pipeline import PipelineModel

Make = Callable[..., PipelineRunner]
SCHEDULES = ["sequential", "gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1", "interleaved", "zbv"]


@pytest.fixture
def pipeline() -> Iterator[Make]:
    """Makes pipelines over so many devices, and closes them."""
    made: list[PipelineRunner] = []

    def make(model: nn.Module, devices: int = 2, **options: Any) -> PipelineRunner:
        made.append(PipelineRunner(model, ["cpu"] * devices, **options))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def train(runner: PipelineRunner, model: Any, reference: Any, step: int, microbatches: int = 2) -> None:
    """One step whose gradients equal those of accumulation, bit for bit. A microbatch knows its number."""
    items = list(enumerate(batches(microbatches, seed=step)))
    reference.zero_grad()
    accumulate(reference, reference.training_step, items)
    result = runner.train(model.training_step, items, lambda loss, m: (loss / microbatches, None), step=step)
    assert_same_gradients(model, reference, result)


def begins(runner: PipelineRunner) -> list[str]:
    return [row.first_module for row in runner.stage_table()]


class Parts(nn.Module):
    """Blocks of which one has a part, `depth` levels down, that is called on its own around the blocks `at` too."""

    def __init__(self, home: int, at: Sequence[int], depth: int, by_its_block: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, 3)
        self.part = f"blocks.{home}" + ".inner" * depth
        inside: nn.Module = self.blocks[home]
        for _ in range(depth):
            inside.inner = Block()
            inside = inside.inner
        self.home, self.at, self.by_its_block = home, at, by_its_block

    def training_step(self, item: Any) -> Tensor:
        _, (x, y) = item
        part = self.get_submodule(self.part)
        for index, block in enumerate(self.blocks):
            if index in self.at:
                x = part(x)
            x = block(x)
            if index == self.home and self.by_its_block:
                x = part(x)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize("at", [(0,), (1, 2), (7,), (0, 6)], ids=["before", "twice before", "after", "both"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("by_its_block", [True, False])
@pytest.mark.parametrize(("devices", "schedule"), [(2, name) for name in SCHEDULES] + [(3, "zb_h1"), (4, "gpipe")])
def test_a_part_that_is_called_on_its_own_does_not_move_its_block(
    pipeline: Make, at: tuple[int, ...], depth: int, by_its_block: bool, devices: int, schedule: str
) -> None:
    """Blocks used to be sorted by the first call of any of their parts, and every step after the first failed."""
    torch.manual_seed(0)
    model = Parts(5, at, depth, by_its_block)
    reference = copy.deepcopy(model)
    runner = pipeline(model, devices, schedule=schedule)
    train(runner, model, reference, 0)
    stages = runner.stages
    for step in (1, 2):
        train(runner, model, reference, step)
    assert runner.stages is stages


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("users", [{0: 1, 3: 1}, {0: 2, 1: 3, 2: 1, 3: 3}])
@pytest.mark.parametrize("home", [0, 1, 2, 3])
def test_a_weight_that_is_used_before_its_home_may_be_cut_off(
    pipeline: Make, home: int, users: dict[int, int], schedule: str
) -> None:
    class Numbered(Shared):
        def training_step(self, item: Any) -> Tensor:
            return super().training_step(item[1])

    torch.manual_seed(0)
    model = Numbered(home, users)
    reference = copy.deepcopy(model)
    runner = pipeline(model, schedule=schedule)
    for step in range(3):
        train(runner, model, reference, step)
    assert begins(runner) in (["(start)", "blocks.2"], ["(start)", "blocks.1", "blocks.2", "blocks.3"])


class Ordered(Chain):
    """Calls its blocks as it is told, by microbatch, and others where nothing is trained."""

    def __init__(self, orders: Sequence[Sequence[int]], evaluation: Sequence[int] = (), depth: int = 8) -> None:
        super().__init__(depth)
        self.orders, self.evaluation = orders, evaluation

    def through(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)

    def training_step(self, item: Any) -> Tensor:
        number, (x, y) = item
        return F.cross_entropy(self.through(x, self.orders[number % len(self.orders)]), y)

    def evaluation_step(self, item: Any) -> Tensor:
        return self.through(item[1][0], self.evaluation)


TURNED, SWAPPED = (4, 5, 6, 7, 0, 1, 2, 3), (0, 1, 5, 4, 3, 2, 6, 7)


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("order", [TURNED, (7, 6, 5, 4, 3, 2, 1, 0)])
def test_a_first_step_that_enters_stages_out_of_turn_works_and_shows_where_they_begin(
    pipeline: Make, order: Sequence[int], devices: int
) -> None:
    """Models whose order of registration is another one could not be trained on more than two devices."""
    torch.manual_seed(0)
    model = Ordered([order])
    reference = copy.deepcopy(model)
    runner = pipeline(model, devices)
    for step in range(3):
        train(runner, model, reference, step)
    found = [order.index(int(name.split(".")[1])) for name in begins(runner)[1:]]
    assert found == sorted(found)
    assert max(row.share for row in runner.stage_table()) < 1.3 / devices


def test_a_model_that_no_cut_suits_is_refused(pipeline: Make) -> None:
    model = Ordered([(0, 1, 0, 1)], depth=2)
    model.head.requires_grad_(False)
    runner = pipeline(model, 3)
    for step in range(2):
        with pytest.raises(StageOrderError, match="each stage must be entered once per forward, in order"):
            train(runner, model, copy.deepcopy(model), step)


def test_cuts_of_the_user_are_not_passed_over(pipeline: Make) -> None:
    model = Ordered([TURNED])
    runner = pipeline(model, 3, stages=["blocks.2", "blocks.5"])
    with pytest.raises(StageOrderError, match=r"'blocks\.2', which begins stage 1, was entered while stage 2 ran"):
        train(runner, model, copy.deepcopy(model), 0)


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1, 2, 3, 5, 6, 7), (0, 1, 2, 3, 4, 5, 7), (1, 2, 3, 4, 5, 6)],
        [TURNED, (5, 4, 6, 7, 1, 0, 2, 3)],
        [TURNED, (4, 5, 6, 0, 7, 1, 1, 2, 3), (4, 5, 6, 0, 1, 2, 3)],
    ],
    ids=["some are skipped", "some change places", "some do and others are repeated"],
)
def test_stages_begin_where_all_microbatches_agree(
    pipeline: Make, orders: Sequence[Sequence[int]], devices: int
) -> None:
    """What the first microbatch does was all that counted, and the others failed."""
    torch.manual_seed(0)
    model = Ordered(orders)
    reference = copy.deepcopy(model)
    runner = pipeline(model, devices)
    for step in range(3):
        train(runner, model, reference, step, microbatches=4)


def test_an_entry_that_is_never_called_begins_no_stage(pipeline: Make) -> None:
    """Every weight used to be put into its stage, whose device none of them runs on."""
    model = Ordered([(0, 1, 2, 3, 5, 6, 7)])
    runner = pipeline(model, stages=["blocks.4"])
    train(runner, model, copy.deepcopy(model), 0)
    assert [row.share for row in runner.stage_table()] == [1.0, 0.0]


def assert_evaluates(runner: PipelineRunner, model: Ordered, reference: Ordered) -> None:
    items = list(enumerate(batches(3)))
    with torch.inference_mode():
        found = runner.evaluate(model.evaluation_step, items)
        assert all(torch.equal(out, reference.evaluation_step(item)) for out, item in zip(found, items, strict=True))
    assert not any(p.is_inference() for p in model.parameters())


@pytest.mark.parametrize(
    ("devices", "evaluation"),
    [(2, TURNED), (3, TURNED), *((devices, order) for devices in (2, 3, 4) for order in (range(8), SWAPPED))],
)
@pytest.mark.parametrize("when", ["before the first step", "after it", "alone"])
def test_an_evaluation_in_another_order_works_before_and_after_the_new_cut(
    pipeline: Make, evaluation: Sequence[int], when: str, devices: int
) -> None:
    """Before training, as in a sanity check, and when the stages begin elsewhere."""
    torch.manual_seed(0)
    model = Ordered([(0, 1, 2, 4, 3, 5, 6, 7)], evaluation)
    reference = copy.deepcopy(model)
    runner = pipeline(model, devices)
    for step in range(3):
        if when == "before the first step" or step > 0 or when == "alone":
            assert_evaluates(runner, model, reference)
        if when != "alone":
            train(runner, model, reference, step)
            stages = runner.stages
    if when != "alone":
        assert runner.stages is stages


def test_training_stays_even_where_an_evaluation_would_put_most_weights_on_one_device(
    pipeline: Make, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Ordered([SWAPPED], TURNED)
    reference = copy.deepcopy(model)
    runner = pipeline(model, 4)
    assert_evaluates(runner, model, reference)
    for step in range(2):
        train(runner, model, reference, step)
    assert runner.stages.largest() < 0.3
    assert "training is cut evenly, and evaluation cannot be: module 'blocks." in caplog.text
    with pytest.raises(StageOrderError, match="once per forward"):
        assert_evaluates(runner, model, reference)


@pytest.mark.parametrize("trained", [True, False])
def test_an_evaluation_that_calls_the_model_again_and_again_is_refused_at_once(pipeline: Make, trained: bool) -> None:
    """As text is generated: it must not work in a sanity check alone, at the price of copying all weights."""
    model = Ordered([range(8)], (*range(8), *range(8)))
    runner = pipeline(model)
    if trained:
        train(runner, model, copy.deepcopy(model), 0)
    with torch.inference_mode(), pytest.raises(StageOrderError, match="once per forward"):
        runner.evaluate(model.evaluation_step, list(enumerate(batches(3))))


def test_what_runs_between_two_entries_is_what_a_stage_costs() -> None:
    """A large weight that is used early counts where it runs, not with the block that it is registered in."""
    model = Chain(4)
    model.blocks[3].table = nn.Linear(4 * WIDTH, 4 * WIDTH)  # as many parameters as three and a half blocks
    calls = [model, model.blocks[3].table, *(m for block in model.blocks for m in (block, block.norm)), model.head]
    order = RunningOrder([[id(module) for module in calls]])
    assert [name for name, _ in balanced_entries(model, 2, order=order).entries] == ["blocks.0"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_chunk_that_the_new_cut_parts_streams_no_more(pipeline: Make, schedule: str) -> None:
    """It is called twice: in one stage as the model was cut first, in two as it is cut then."""
    torch.manual_seed(0)
    model = Ordered([(4, 5, 6, 2, 0, 1, 2, 3, 7)])
    reference = copy.deepcopy(model)
    stream = StreamOptions(1, chunks="blocks.*", resident_below=0, poison=True)
    runner = pipeline(model, schedule=schedule, stream=stream)
    runner.train(model.training_step, list(enumerate(batches(2))), lambda loss, m: (loss / 2, None))
    assert runner.streamed is not None
    assert {f"blocks.{index}" for index in range(8)} - {name for name, _ in runner.streamed.chunks} == {"blocks.2"}
    for step in range(1, 3):
        train(runner, model, reference, step)


@pytest.mark.parametrize("pin", [["blocks.*"], ["blocks.1", "blocks.4"]])
def test_pinned_chunks_are_named_by_globs_and_need_not_stream(pipeline: Make, pin: list[str]) -> None:
    """Globs used to pin nothing; and where a new stage begins inside a chunk, it stays on its device anyway."""
    torch.manual_seed(0)
    model = Chain(6)
    stream = StreamOptions(1, pin=pin, chunks="blocks.*", resident_below=0)
    runner = pipeline(model, stages=["blocks.4.up"], stream=stream)
    assert runner.streamed is not None
    rows = [row for streamer in runner.streamed.streamers for row in streamer.chunk_table()]
    pinned = {row.name for row in rows if row.placement == "resident"}
    assert pinned == ({f"blocks.{i}" for i in (0, 1, 2, 3, 5)} if pin == ["blocks.*"] else {"blocks.1"})


def test_streamed_stages_are_evaluated_one_op_at_a_time(pipeline: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A microbatch that skips an entry runs chunks of a device in the stage of another, also in evaluation."""
    seen: list[bool] = []
    run = Executor.run

    def noted(self: Executor, *args: Any, **options: Any) -> Any:
        seen.append(options["exclusive"])
        return run(self, *args, **options)

    monkeypatch.setattr(Executor, "run", noted)
    model = Ordered([range(8)], range(8))
    for stream in (None, StreamOptions(chunks="blocks.*", resident_below=0)):
        runner = pipeline(model, stream=stream)
        assert_evaluates(runner, model, model)
        runner.close()
    assert seen == [False, True]


@pytest.mark.parametrize(
    "devices", [["cpu", "cpu"], pytest.param([0, 1], marks=pytest.mark.gpu(2))], ids=["cpu", "gpu"]
)
def test_gradients_that_wait_and_those_of_the_user_go_where_their_parameters_go(devices: list[Any]) -> None:
    """A step, and an inference, may cut the stages anew while both are there."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)) if torch.is_grad_enabled() else self.first(self.last(x))

    torch.manual_seed(0)
    model = Turned()
    reference = copy.deepcopy(model)
    pipe = PipelineModel(model, devices=devices)
    try:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        inputs = [batches(1, 4, seed=step)[0] for step in range(2)]
        for x, y in inputs:
            pipe.step(x, y, loss_fn=F.cross_entropy, n_microbatches=1)
            pipe.forward(x, 1)
            F.cross_entropy(reference(x), y).backward()
        pipe.flush_grads()
    finally:
        pipe.close()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad.device == p.device
        torch.testing.assert_close(p.grad.cpu(), q.grad + 1, rtol=1e-4, atol=1e-4)

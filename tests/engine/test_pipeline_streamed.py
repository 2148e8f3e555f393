"""Stages that stream their chunks: against sequential accumulation of the plain model, bit for bit."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Chain, accumulate, batches, loss_of
from pipeline_programs import Sharing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ramtorch_core.engine.lend import is_lent
from ramtorch_core.engine.pipeline import runner as runner_module
from ramtorch_core.engine.pipeline.crossing import Cut
from ramtorch_core.engine.pipeline.runner import PipelineRunner
from ramtorch_core.engine.pipeline.streamed import StreamOptions
from ramtorch_core.plan.itinerary import format_itinerary

Make = Callable[..., PipelineRunner]
SCHEDULES = ["sequential", "gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1", "interleaved", "zbv"]


@pytest.fixture
def streamed() -> Iterator[Callable[..., PipelineRunner]]:
    """Makes pipelines over two devices, and closes them."""
    made: list[PipelineRunner] = []

    def make(model: nn.Module, schedule: str = "staggered_1b1f", **options: Any) -> PipelineRunner:
        stream = StreamOptions(**{"resident_below": 0, "poison": True, "chunks": "blocks.*", **options})
        made.append(PipelineRunner(model, ["cpu", "cpu"], schedule=schedule, stream=stream))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def train(runner: PipelineRunner, model: Any, inputs: Any, step: int, dtype: torch.dtype | None) -> list[Tensor]:
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        result = runner.train(
            model.training_step, inputs, lambda output, _m: (loss_of(output) / len(inputs), None), step=step
        )
    for parameter, gradient in result.gradients.items():
        parameter.grad = gradient
    return [loss_of(output) for output in result.outputs]


def assert_exact(
    model: Any, runner: PipelineRunner, *, steps: int = 3, microbatches: int = 3, dtype: torch.dtype | None = None
) -> None:
    """Losses, gradients and weights of some steps of AdamW equal those of plain accumulation."""
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(steps):
        inputs = batches(microbatches, seed=step)
        found = train(runner, model, inputs, step, dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            expected = accumulate(reference, reference.training_step, inputs)
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, loss_of(other))
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, other.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert runner.streamed is not None
        runner.streamed.refresh()
    for (name, mine), other in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(mine, other[1]), name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("resident_below", "accumulate"), [(0, "host"), (100, "gpu"), (0, "gpu")])
def test_every_schedule_trains_the_same(
    streamed: Make, schedule: str, checkpoint: bool, dtype: torch.dtype | None, resident_below: int, accumulate: str
) -> None:
    model = Chain(8)
    runner = streamed(model, schedule, checkpoint=checkpoint, resident_below=resident_below, accumulate=accumulate)
    assert_exact(model, runner, dtype=dtype)
    assert sum(streamer.window.copied_bytes for streamer in runner.streamed.streamers) > 0


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("pin", [0, 1, ["blocks.1"]])
def test_every_window_and_resident_chunks_train_the_same(streamed: Make, window: int, pin: Any) -> None:
    model = Chain(6)
    runner = streamed(model, window=window, pin=pin)
    assert_exact(model, runner)


def test_each_stage_visits_its_chunks_in_the_order_of_the_schedule(streamed: Make) -> None:
    model = Chain(4)
    runner = streamed(model, "staggered_1b1f")
    train(runner, model, batches(3), 0, None)
    first, second = (format_itinerary(streamer.last_itinerary) for streamer in runner.streamed.streamers)
    assert first == "F0 F1 F0 F1 B1 B0 F0 F1 B1 B0 B1 B0"
    assert second == "F0 F1 B1 B0 F0 F1 B1 B0 F0 F1 B1 B0"


@pytest.mark.parametrize("schedule", ["gpipe", "staggered_1b1f", "zb_h1", "zbv"])
def test_sums_that_stay_on_the_gpu_leave_it_once(streamed: Make, schedule: str) -> None:
    left = {}
    for place in ("host", "gpu"):
        model = Chain(8)
        runner = streamed(model, schedule, accumulate=place)
        train(runner, model, batches(4), 0, None)
        left[place] = sum(streamer.gradients.copied_bytes for streamer in runner.streamed.streamers)
    assert left["gpu"] == sum(p.nbytes for block in Chain(8).blocks for p in block.parameters())
    assert left["host"] == 4 * left["gpu"]


def test_evaluation_computes_the_same_and_takes_no_gradients(streamed: Make) -> None:
    model = Chain(4)
    inputs = [x for x, _ in batches(3)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    runner = streamed(model)
    with torch.no_grad():
        found = runner.evaluate(model, inputs)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
    assert all(streamer.gradients.host_bytes() == 0 for streamer in runner.streamed.streamers)


class InOrder(Chain):
    """Calls its blocks in an order that is given."""

    order: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


class Dropped(Chain):
    """Some microbatches skip two of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index in (1, 2) and float(x.detach()[0, 0]) > 0 else block(x)
        return self.head(x)


@pytest.mark.parametrize("schedule", ["gpipe", "staggered_1b1f", "zb_h1"])
@pytest.mark.parametrize("order", [(0, 0, 1, 2, 3), (0, 1, 0, 2, 3, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_chunks_that_run_twice_in_their_stage_or_in_another_order_train_the_same(
    streamed: Make, schedule: str, order: tuple[int, ...], checkpoint: bool
) -> None:
    model = InOrder()
    model.order = order
    assert_exact(model, streamed(model, schedule, checkpoint=checkpoint, window=1))


@pytest.mark.parametrize("accumulate", ["host", "gpu"])
@pytest.mark.parametrize("resident_below", [0, 100])
def test_chunks_that_some_microbatches_skip_train_the_same(
    streamed: Make, resident_below: int, accumulate: str
) -> None:
    model = Dropped()
    assert_exact(model, streamed(model, resident_below=resident_below, accumulate=accumulate))


class Reentrant(Chain):
    """Each visit of a block has a backward of its own, so there are two for each microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for block in self.blocks:
            for _ in range(2):
                x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("accumulate", ["host", "gpu"])
def test_chunks_with_more_backwards_than_microbatches_train_the_same(
    streamed: Make, accumulate: str, dtype: torch.dtype | None
) -> None:
    """Sums are formed in the order of plain accumulation, although they have left the device halfway."""
    model = Reentrant()
    assert_exact(model, streamed(model, accumulate=accumulate, checkpoint=False), microbatches=4, dtype=dtype)


class Tied(Chain):
    """Embedding and head share a weight across the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self._modules["blocks"] = self._modules.pop("blocks")  # registered in the order of use
        self._modules["head"] = self._modules.pop("head")

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x + self.embedding(y)), y)


def test_weights_shared_between_stages_stay_on_their_devices(streamed: Make) -> None:
    model = Tied()
    runner = streamed(model, chunks=["blocks.*", "embedding", "head"])
    assert {name for name, _ in runner.streamed.chunks} == {f"blocks.{i}" for i in range(4)}
    assert_exact(model, runner)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", [True, False])
def test_shared_weights_train_the_same_under_every_schedule(streamed: Make, schedule: str, checkpoint: bool) -> None:
    model = Sharing()
    runner = streamed(model, schedule, checkpoint=checkpoint, chunks=["blocks.*", "head"])
    assert {name for name, _ in runner.streamed.chunks} == {*(f"blocks.{i}" for i in (3, 4, 5, 8)), "head"}
    assert_exact(model, runner)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_chunk_that_several_stages_call_streams_no_more_after_the_first_step(streamed: Make, schedule: str) -> None:
    """The threads of two devices would use the window of one, and terms be added in another order."""
    model = Sharing()
    runner = streamed(model, schedule, chunks=["blocks.*", "head", "late"])
    first = copy.deepcopy(model)
    train(runner, model, inputs := batches(3), 0, None)
    accumulate(first, first.training_step, inputs)
    for (name, mine), other in zip(model.named_parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)
    assert {name for name, _ in runner.streamed.chunks} == {*(f"blocks.{i}" for i in (3, 4, 5, 8)), "head"}
    model.zero_grad()
    assert_exact(model, runner)


class Shuffled(Chain):
    """A small chunk that is registered last and runs first."""

    def __init__(self) -> None:
        super().__init__(8)
        self.small = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.small(x))


def test_a_chunk_that_runs_in_another_stage_streams_there_after_the_first_step(streamed: Make) -> None:
    """However small its share is: its device's thread would use another one's window."""
    model = Shuffled()
    runner = streamed(model, chunks=["blocks.*", "small"])
    assert [len(streamer.groups) for streamer in runner.streamed.streamers] == [4, 5]
    assert_exact(model, runner)
    assert [len(streamer.groups) for streamer in runner.streamed.streamers] == [5, 4]


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("how", ["method", "function"])
def test_compiled_chunks_recompute_with_the_graph_of_their_forward(streamed: Make, how: str, schedule: str) -> None:
    """Otherwise a recompute saves other tensors: this backend changes what is saved."""
    torch._dynamo.reset()
    model = Chain(4)
    reference = copy.deepcopy(model)
    for i, block in enumerate(model.blocks):
        if how == "method":
            block.compile(backend="aot_eager")
        else:
            model.blocks[i] = torch.compile(block, backend="aot_eager")
    runner = streamed(model, schedule)
    for step in range(2):
        inputs = batches(3, seed=step)
        found = train(runner, model, inputs, step, None)
        torch.testing.assert_close(found, accumulate(reference, reference.training_step, inputs))
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
            mine.grad = other.grad = None
    torch._dynamo.reset()


def test_an_error_in_a_stage_leaves_a_pipeline_that_works(streamed: Make) -> None:
    model = Chain(4)
    runner = streamed(model)
    inputs = batches(3)

    def fail(*_: Any) -> None:
        raise KeyError("from a hook")

    hook = model.blocks[3].register_forward_hook(fail)
    with pytest.raises(KeyError, match="from a hook"):
        train(runner, model, inputs, 0, None)
    hook.remove()
    assert_exact(model, runner)


def test_closing_leaves_a_plain_module_on_the_host(streamed: Make) -> None:
    model = Chain(4)
    before = [p.detach().clone() for p in model.parameters()]
    runner = streamed(model)
    runner.close()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    loss_of(model.training_step(batches(1)[0])).backward()


def test_copies_that_stay_on_a_stages_device_are_no_tensors_of_another_stage(
    streamed: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were lent before the step, but their gradients must not go to the device of the first stage."""
    handed: list[Tensor] = []
    begin = Cut.__init__

    def recorded(self: Cut, source: Tensor, origin: int) -> None:
        handed.append(source)
        begin(self, source, origin)

    monkeypatch.setattr(Cut, "__init__", recorded)
    model = Chain(4)
    runner = streamed(model, resident_below=100)
    train(runner, model, batches(3), 0, None)
    assert handed
    assert not any(map(is_lent, handed))


def test_an_error_after_the_chunks_were_attached_leaves_a_plain_model(
    streamed: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a device has no room for what does not stream, or when Ctrl-C comes."""
    model = Chain()

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(runner_module, "place", full)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            streamed(model)
    assert all("forward" not in vars(module) for module in model.modules())
    assert_exact(model, streamed(model))

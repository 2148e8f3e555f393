"""On two GPUs: bits, streams and events, and the placement of everything."""

import copy
import os
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Chain, Shared, accumulate, batches, loss_of
from torch import Tensor, nn

from ramtorch_core import PipelineModel
from ramtorch_core.engine.pipeline.runner import PipelineRunner
from ramtorch_core.engine.pipeline.streamed import StreamOptions
from ramtorch_core.schedules import CANDIDATES

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(120)]
SCHEDULES = ["sequential", "gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1", "interleaved", "zbv"]


class Scattered(Chain):
    """Skips, deep supervision, a tied weight, a mask on the labels' device and glue parameters."""

    def __init__(self) -> None:
        super().__init__(8)
        self.temperature = nn.Parameter(torch.ones(()))
        self.head.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.register_buffer("cache", torch.rand(WIDTH))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        kept = []
        for block in self.blocks:
            x = block(x + self.cache, mask=(torch.arange(WIDTH, device=y.device) > 2).float())
            kept.append(x)
        x = torch.cat([x, kept[0]]).view(2, -1, WIDTH).mean(0) + kept[1]
        loss = F.cross_entropy(self.head(x) * self.temperature, y) + F.linear(x, self.blocks[0].up.weight).mean()
        return loss + kept[0].pow(2).mean() + sum(p.pow(2).sum() for p in self.parameters())


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def compare(
    model: Chain,
    schedule: str,
    dtype: torch.dtype | None,
    slow: bool = False,
    stream: StreamOptions | None = None,
    steps: int = 3,
    **options: Any,
) -> None:
    reference = copy.deepcopy(model).to("cuda:0")
    runner = PipelineRunner(model, [0, 1], schedule=schedule, stream=stream, **options)
    try:
        for step in range(steps):
            items = [tuple(t.to("cuda:0") for t in item) for item in batches(5, 3, seed=step)]
            for p in reference.parameters():
                p.grad = None
            with torch.autocast("cuda", dtype, enabled=dtype is not None, cache_enabled=False):
                expected = accumulate(reference, reference.training_step, items)
                if slow:
                    for device in (0, 1):
                        with torch.cuda.device(device):
                            torch.cuda._sleep(int(2e7))
                ours = [tuple(t.to(runner.root_device) for t in item) for item in items]
                result = runner.train(
                    model.training_step, ours, lambda output, m: (loss_of(output) / 5, None), step=step
                )
            for a, b in zip(result.outputs, expected, strict=True):
                assert torch.equal(a.cpu(), b.cpu())
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert result.gradients[p].device == p.device
                assert torch.equal(result.gradients[p].cpu(), q.grad.cpu()), name
            with torch.no_grad():
                for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                    p -= 0.1 * result.gradients[p]
                    q.copy_(p) if stream is not None else q.sub_(0.1 * q.grad)  # GPUs may fuse what hosts do not
    finally:
        runner.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_two_gpus_equal_one(schedule: str, dtype: torch.dtype | None) -> None:
    compare(Scattered(), schedule, dtype)


@pytest.mark.parametrize("schedule", ["staggered_1b1f", "zb_h1"])
def test_copies_wait_for_slow_kernels_and_on_the_callers_own_streams(schedule: str) -> None:
    """A kernel that sleeps on either device shows every missing event; the caller computes on side streams."""
    streams = [torch.cuda.Stream(device) for device in (0, 1)]
    with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
        compare(Scattered(), schedule, None, slow=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize(("resident_below", "place"), [(0, "host"), (100, "gpu")])
def test_streamed_stages_equal_one_gpu(
    schedule: str, dtype: torch.dtype | None, checkpoint: bool, resident_below: int, place: Any
) -> None:
    stream = StreamOptions(
        1, chunks="blocks.*", checkpoint=checkpoint, accumulate=place, resident_below=resident_below, poison=True
    )
    compare(Chain(8), schedule, dtype, slow=True, stream=stream)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("users", [{0: 1, 3: 1}, {0: 2, 1: 3, 2: 1, 3: 3}])
@pytest.mark.parametrize("home", [0, 2, 3])
def test_a_weight_that_both_gpus_use(home: int, users: dict[int, int], schedule: str) -> None:
    compare(Shared(home, users), schedule, None, slow=True)


class Late(Chain):
    """A table that is registered last, and is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_that_is_registered_late_and_used_early(schedule: str) -> None:
    compare(Late(), schedule, torch.bfloat16, slow=True)


class Uneven(Chain):
    """Its last blocks work more often than the others; how long that takes decides where stages begin."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            for _ in range(20 * (index > 5)):
                x = torch.tanh(x @ x.T @ x)
        return self.head(x)


@pytest.mark.parametrize("schedule", ["staggered_1b1f", "zb_h1", "zbv"])
@pytest.mark.parametrize("stream", [None, StreamOptions(1, chunks="blocks.*", resident_below=0, poison=True)])
def test_stages_that_are_cut_anew_by_time(schedule: str, stream: StreamOptions | None) -> None:
    said: list[str] = []
    compare(Uneven(8), schedule, None, stream=stream, steps=6, balance="time", say=said.append)
    assert sum("cut by time" in text for text in said) == 1


def test_the_automatic_schedule_is_chosen_and_changes_no_bit() -> None:
    losses, chosen = {}, ""
    for schedule in ("gpipe", "auto"):
        torch.manual_seed(0)
        model = PipelineModel(Chain(8), devices=[0, 1], split_spec=["blocks.4"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = losses[schedule] = []
        for index in range(8):
            x, y = (torch.cat(parts) for parts in zip(*batches(6, 4, seed=index), strict=True))
            result = model.step(x, y, schedule=schedule, n_microbatches=6, loss_fn=F.cross_entropy)
            result.flush_grads()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(result.loss.cpu())
        chosen = model._auto.name
        model.close()
    assert chosen in CANDIDATES
    assert torch.equal(torch.stack(losses["auto"]), torch.stack(losses["gpipe"]))


def test_dropout_is_exact_against_the_sequential_schedule() -> None:
    found = []
    for schedule in ("sequential", "eager_1f1b"):
        torch.manual_seed(0)
        model = Chain(8, dropout=0.5)
        runner = PipelineRunner(model, [0, 1], schedule=schedule)
        try:
            items = [tuple(t.to("cuda:1") for t in item) for item in batches(6)]
            result = runner.train(model.training_step, items, lambda loss, m: (loss / 6, None))
            found.append([g.cpu() for g in result.gradients.values()])
        finally:
            runner.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_whole_model_can_be_called_outside_a_step() -> None:
    model = Scattered()
    reference = copy.deepcopy(model).to("cuda:0")
    runner = PipelineRunner(model, [0, 1])
    try:
        item = batches(1)[0]
        with runner.transparent():
            loss = model.training_step(tuple(t.to("cuda:1") for t in item))
            loss.backward()
        reference.training_step(tuple(t.to("cuda:0") for t in item)).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad.cpu())
    finally:
        runner.close()


def test_memory_does_not_grow_from_step_to_step() -> None:
    model = Chain(8)
    runner = PipelineRunner(model, [0, 1])
    try:
        items = [tuple(t.to("cuda:1") for t in item) for item in batches(6, 64)]
        seen = []
        for _ in range(6):
            runner.train(model.training_step, items, lambda loss, m: (loss / 6, None))
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            seen.append([torch.cuda.memory_allocated(d) for d in (0, 1)])
        assert seen[2:] == [seen[2]] * 4
    finally:
        runner.close()

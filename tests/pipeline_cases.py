"""Small models, and the comparison that most pipeline tests make: one step against sequential accumulation."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ramtorch_core.engine.pipeline.executor import Executor, StepResult
from ramtorch_core.engine.pipeline.stages import resolve_entries
from ramtorch_core.memory.device import Device
from ramtorch_core.plan.schedule import build

WIDTH = 8
Training = Callable[[Any], Any]


class Block(nn.Module):
    """Pre-norm residual block with a mask that arrives as a keyword."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        h = self.down(self.drop(F.gelu(self.up(self.norm(x)))))
        return x + (h if mask is None else h * mask)


class Chain(nn.Module):
    """`depth` blocks and a head; `training_step` takes (x, y)."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)


class Shared(Chain):
    """One weight, at home in stage `home`, that the stages `users` use `times` times each, some in two ways."""

    def __init__(self, home: int, users: dict[int, int]) -> None:
        super().__init__()
        self.blocks[home].shared = nn.Linear(WIDTH, WIDTH)
        self.home, self.users = home, users

    def users_of(self, x: Tensor) -> dict[int, int]:
        return self.users

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        shared, users = self.blocks[self.home].shared, self.users_of(x)
        for stage, block in enumerate(self.blocks):
            x = block(x)
            for use in range(users.get(stage, 0)):
                x = x + (shared(x) if use % 2 == 0 else x * shared.weight.sum(0))
        return F.cross_entropy(self.head(x), y)


def batch(size: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def batches(count: int, size: int = 2, seed: int = 0) -> list[Any]:
    return [batch(size, 100 * seed + i) for i in range(count)]


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


@contextmanager
def pipeline(model: nn.Module, cuts: Sequence[str]) -> Iterator[Executor]:
    stages = resolve_entries(model, cuts, len(cuts) + 1)
    executor = Executor(stages, [Device("cpu")] * stages.count)
    try:
        yield executor
    finally:
        executor.close()


def run(
    executor: Executor, training: Training, inputs: Sequence[Any], schedule: str = "staggered_1b1f", **options: Any
) -> StepResult:
    """One step with the mean of the microbatches' losses."""
    count = len(inputs)
    devices = executor.stages.count // build(schedule, 1, 1).stages
    plan = build(schedule, devices, count)
    return executor.run(training, inputs, plan, lambda output, m: (loss_of(output) / count, None), **options)


def accumulate(model: nn.Module, training: Training, inputs: Sequence[Any]) -> list[Any]:
    """The reference: one microbatch after the other, in the calling thread; backward outside of autocast."""
    outputs = []
    for item in inputs:
        output = training(item)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            (loss_of(output) / len(inputs)).backward()
        outputs.append(output)
    return outputs


def assert_same_gradients(model: nn.Module, reference: nn.Module, result: StepResult) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        got = result.gradients.get(p)
        assert (got is None) == (q.grad is None), f"{name}: gradient is {got}, reference {q.grad}"
        if got is not None:
            assert torch.equal(got, q.grad), f"{name} differs by {(got - q.grad).abs().max()}"


def assert_exact(
    model: Any, cuts: Sequence[str], inputs: Sequence[Sequence[Any]], schedule: str = "staggered_1b1f"
) -> None:
    """A few steps of SGD: losses, gradients, weights and buffers equal sequential accumulation, bit for bit."""
    reference = copy.deepcopy(model)
    with pipeline(model, cuts) as executor:
        for step, items in enumerate(inputs):
            for p in (*model.parameters(), *reference.parameters()):
                p.grad = None
            expected = accumulate(reference, reference.training_step, items)
            result = run(executor, model.training_step, items, schedule, step=step)
            assert_same_gradients(model, reference, result)
            for got, want in zip(result.outputs, expected, strict=True):
                assert torch.equal(loss_of(got), loss_of(want))
            with torch.no_grad():
                for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                    if q.grad is not None:
                        p -= 0.1 * result.gradients[p]
                        q -= 0.1 * q.grad
    for (name, a), b in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


class At:
    """A moment of virtual time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def query(self) -> bool:
        return True

    def seconds_since(self, earlier: "At") -> float:
        return self.seconds - earlier.seconds

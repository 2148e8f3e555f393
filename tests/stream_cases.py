"""Small models, and the comparison that most streaming tests make: a few steps, streamed against resident, exactly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ramtorch_core import Streamer, attach

WIDTH = 8

Step = Callable[[Any, torch.optim.Optimizer, int], Any]
Record = dict[str, Any]

MODES = [
    pytest.param({"window": w, "activations": a}, id=f"{w}-{a}") for w in (1, 2, 3) for a in ("keep", "checkpoint")
]
"""Every window with every activation policy; for `@pytest.mark.parametrize("mode", MODES)`."""
POLICIES = [pytest.param({"activations": a}, id=a) for a in ("keep", "checkpoint")]
every_mode = pytest.mark.parametrize("mode", MODES)
every_policy = pytest.mark.parametrize("mode", POLICIES)


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks in a row; each is a chunk."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def stack(depth: int = 4, dropout: float = 0.0) -> Stack:
    return Stack(*(Block(dropout=dropout) for _ in range(depth)))


def data(index: int = 0, *size: int) -> Tensor:
    """Normally distributed numbers, other ones for each index."""
    return torch.randn(size or (3, WIDTH), generator=torch.Generator().manual_seed(1000 + index))


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
    """One ordinary training step."""
    loss = model(data(index)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def state_of(model: nn.Module) -> Record:
    """Copies of all parameters, gradients and buffers, persistent or not."""
    record: Record = {}
    for name, parameter in model.named_parameters():
        record[name] = parameter.detach().clone()
        record[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.detach().clone()
    record |= {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return record


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def run(
    build: Callable[[], nn.Module],
    step: Step,
    *,
    steps: int = 3,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    streamed: dict[str, Any] | None = None,
) -> list[Record]:
    """Build, train and record a model: resident, or streamed with these options."""
    torch.manual_seed(0)
    model = build()
    streamer = stream(model, **streamed) if streamed is not None else None
    records = []
    try:
        if any(p.requires_grad for p in model.parameters()):
            chosen = optimizer(p for p in model.parameters() if p.requires_grad)
        else:
            chosen = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        for index in range(steps):
            torch.manual_seed(100 + index)
            returned = step(model, chosen, index)
            records.append({"returned": returned, **state_of(model), "random state": torch.get_rng_state()})
    finally:
        if streamer is not None:
            streamer.close()
    if streamer is not None:
        assert_same([state_of(model)], [{name: records[-1][name] for name in state_of(model)}])
    return records


def stream(model: nn.Module, **options: Any) -> Streamer:
    """`attach` on the CPU, so that even tiny tensors stream and a use of a stale slot shows as NaN."""
    return attach(model, **{"device": "cpu", "resident_below": 0, "poison": True, "chunks": "blocks.*", **options})


@contextmanager
def streaming(model: nn.Module, **options: Any) -> Iterator[Streamer]:
    streamer = stream(model, **options)
    try:
        yield streamer
    finally:
        streamer.close()


def assert_equals_resident(
    build: Callable[[], nn.Module],
    step: Step = descend,
    *,
    steps: int = 3,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    tolerance: float = 0.0,
    **options: Any,
) -> None:
    """What `step` returns, weights, gradients and buffers of the streamed run equal the plain run's after each step."""
    expected = run(build, step, steps=steps, optimizer=optimizer)
    assert_same(run(build, step, steps=steps, optimizer=optimizer, streamed=options), expected, tolerance=tolerance)


def assert_same(found: Any, expected: Any, where: str = "", *, tolerance: float = 0.0) -> None:
    """Equal structure and dtypes, and equal bits unless a `tolerance` is given; NaN equals NaN nowhere."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), f"{where}: {found!r} instead of a tensor"
        assert found.dtype == expected.dtype, f"{where}: {found.dtype} instead of {expected.dtype}"
        assert found.is_sparse == expected.is_sparse, f"{where}: sparse on one side only"
        if expected.is_sparse:
            found, expected = found.coalesce().to_dense(), expected.coalesce().to_dense()
        difference = (found.to(torch.complex128) - expected.to(torch.complex128)).abs().max() if expected.numel() else 0
        same = bool(difference <= tolerance) if tolerance else torch.equal(found, expected)
        assert same, f"{where}: differs by up to {difference}"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}/{key}", tolerance=tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}/{index}", tolerance=tolerance)
    else:
        assert found == expected, f"{where}: {found!r} instead of {expected!r}"

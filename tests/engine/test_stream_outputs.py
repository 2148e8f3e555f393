"""What chunks return outlives their visits, be it their own weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_cases import WIDTH, Block, Stack, assert_equals_resident, data, every_mode, every_policy, streaming
from torch import Tensor, nn


class Positions(nn.Module):
    """Returns its weight, or a part of it, as tables of learned positions do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.how = nn.Parameter(torch.randn(16, WIDTH)), how

    def forward(self, x: Tensor) -> Any:
        part = self.table[: x.size(0)]
        found = {"tensor": part, "dict": {"first": part, "all": self.table}, "object": SimpleNamespace(part=part)}
        return found[self.how]


class Positioned(Stack):
    def __init__(self, how: str) -> None:
        super().__init__(Positions(how), Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        found = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](x))
        return x + (found["first"] * found["all"][:3] if isinstance(found, dict) else found.exp())


def infer(model: nn.Module, _optimizer: torch.optim.Optimizer, index: int) -> Tensor:
    with torch.no_grad():
        return model(data(index))


@every_mode
@pytest.mark.parametrize("how", ["tensor", "dict"])
def test_a_chunk_may_return_its_own_weights(mode, how):
    assert_equals_resident(lambda: Positioned(how), **mode)
    assert_equals_resident(lambda: Positioned(how), infer, **mode)


class Returns(nn.Linear):
    def forward(self, _x: Tensor) -> Tensor:
        return self.weight


class Uses(Stack):
    def __init__(self) -> None:
        super().__init__(Returns(WIDTH, WIDTH, bias=False), Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x)) * weight[:3]


def descend_in_half(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(data(index)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@every_policy
def test_weights_that_are_returned_cross_in_their_own_dtype_under_autocast(mode):
    assert_equals_resident(Uses, descend_in_half, **mode)


@every_policy
def test_own_weights_inside_an_unknown_object_are_refused_by_name(mode):
    with streaming(Positioned("object"), **mode) as streamer, pytest.raises(RuntimeError, match=r"blocks\.0.*returns"):
        streamer.root(data())

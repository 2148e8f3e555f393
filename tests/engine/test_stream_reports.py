"""Public reports about other offloading tools, each as a test that says what went wrong there."""

from typing import Any

import pytest
import torch
from stream_cases import WIDTH, Stack, assert_equals_resident, every_mode, streaming
from torch import Tensor, nn

LENGTH = 361


class MaskedAttention(nn.Module):
    """Attention written out, whose saved tensors are transposed views and whose mask has an odd length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        scores = (query @ key.transpose(-2, -1)).masked_fill(~mask, float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).contiguous().transpose(0, 1)
        return x + mixed @ self.out.weight.t() + self.out.bias


@every_mode
def test_saved_views_keep_their_strides_under_a_mask_of_odd_length(mode: dict[str, Any]) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
        x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(index))
        loss = model(x.transpose(0, 1).contiguous().transpose(0, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(lambda: Stack(*(MaskedAttention() for _ in range(3))), step, steps=2, **mode)


class Tensors(nn.Module):
    """One parameter of every size, so that arenas hold tensors at all sorts of addresses."""

    def __init__(self, sizes: list[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(size).to(dtype)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(((tensor * (i % 7 + 1)).sum() for i, tensor in enumerate(self.tensors)), torch.zeros(()))


SIZES = [*range(1, 66), 127, 128, 129, 255, 257, 1023, 1025, 4095, 4096, 4097]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fused_optimizer_reaches_every_element_of_masters_in_arenas(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """As it does in tensors of their own, bit for bit."""
    torch.manual_seed(0)
    model = Stack(Tensors(SIZES, dtype))
    with streaming(model):
        model(torch.zeros(()).to(dtype)).backward()
        parameters = list(model.parameters())
        alone = [nn.Parameter(p.detach().clone()) for p in parameters]
        for one, p in zip(alone, parameters, strict=True):
            one.grad = p.grad.clone()
        before = [p.detach().clone() for p in parameters]
        for tensors in (parameters, alone):
            kind(tensors, lr=0.5, fused=True).step()  # type: ignore[call-arg]
        for p, one, old in zip(parameters, alone, before, strict=True):
            assert torch.equal(p, one)
            assert (p != old).all(), f"elements of a tensor of {p.numel()} were skipped"


def test_every_trainable_parameter_changes_after_one_step() -> None:
    model = Stack(*(MaskedAttention() for _ in range(3)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with streaming(model):
        model(torch.randn(2, LENGTH, WIDTH)).square().mean().backward()
        optimizer.step()
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []

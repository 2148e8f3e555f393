"""Masters of every dtype, streamed, against the plain resident run."""

import pytest
import torch
import torch.nn.functional as F
from stream_cases import WIDTH, Stack, assert_equals_resident, data, every_policy, stack, streaming
from torch import Tensor, nn


@every_policy
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_train_exactly(mode, dtype):
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.conj() + x @ self.weight

    def step(model, optimizer, index):
        loss = model(data(index).to(dtype)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(lambda: Stack(Product(), Product(), Product()), step, **mode)


@every_policy
def test_mixed_dtypes_in_one_chunk_train_exactly(mode):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.lin = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH)
            self.narrow = nn.Linear(WIDTH, WIDTH).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow(torch.tanh(self.lin(self.wide(x.double()).float())).bfloat16()).float()

    assert_equals_resident(lambda: Stack(Mixed(), Mixed()), **mode)


@every_policy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_masters_train_exactly_with_one_backward_per_step(mode, dtype):
    def step(model, optimizer, index):
        loss = model(data(index).to(dtype)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(lambda: stack().to(dtype), step, **mode)


@every_policy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_masters_accumulate_in_float32_and_round_once(mode, dtype):
    def build():
        torch.manual_seed(0)
        return stack(3).to(dtype)

    def backward(model, index):
        model(data(index).to(dtype)).float().square().mean().backward()

    reference, totals = build(), {}
    for index in range(4):
        backward(reference, index)
        for name, parameter in reference.named_parameters():
            totals[name] = totals.get(name, 0) + parameter.grad.float()
            parameter.grad = None
    model = build()
    with streaming(model, **mode):
        for index in range(4):
            backward(model, index)
            assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, totals[name].to(dtype)), name


@every_policy
def test_frozen_integer_parameters_are_carried(mode):
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
            self.keep = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)
            self.scale = nn.Parameter(torch.rand(WIDTH) / 9)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.codes * self.scale) * self.keep

    assert_equals_resident(lambda: Stack(Quantised(), Quantised()), **mode)

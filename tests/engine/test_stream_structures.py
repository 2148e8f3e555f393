"""Module trees of every shape, streamed, against the plain resident run."""

import pytest
import torch
from stream_cases import WIDTH, Block, Stack, assert_equals_resident, data, every_mode, every_policy
from torch import Tensor, nn


@every_policy
def test_one_module_under_two_parents_trains_exactly(mode):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = Block()
            self.blocks = nn.ModuleList([shared, Block(), shared])
            self.other = nn.ModuleDict({"again": shared})

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.other["again"](x)

    assert_equals_resident(Twice, chunks=Block, **mode)


@every_policy
def test_one_linear_inside_two_chunks_trains_exactly(mode):
    class Sharing(nn.Module):
        def __init__(self, shared: nn.Linear) -> None:
            super().__init__()
            self.shared, self.own = shared, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(torch.tanh(self.shared(x)))

    def build():
        shared = nn.Linear(WIDTH, WIDTH)
        return Stack(Sharing(shared), Sharing(shared), Block())

    assert_equals_resident(build, **mode)


@every_mode
def test_nested_chunks_train_exactly(mode):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.inner, self.beside = Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.beside(self.inner(torch.tanh(x @ self.weight))) @ self.weight

    assert_equals_resident(lambda: Stack(Outer(), Outer()), chunks=["blocks.*", "blocks.*.inner"], **mode)


@every_policy
def test_parameters_of_the_root_train_exactly(mode):
    class Root(Stack):
        def __init__(self) -> None:
            super().__init__(Block(), Block())
            self.scale = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale) * self.scale

    assert_equals_resident(Root, **mode)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@every_policy
def test_recurrent_modules_train_exactly(mode, kind):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
            self.out = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0])

    def step(model, optimizer, index):
        loss = model(data(index, 2, 3, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(lambda: Stack(Recurrent(), Recurrent()), step, **mode)
    assert_equals_resident(lambda: Stack(Recurrent(), Recurrent()), step, chunks="leaves", **mode)


@every_policy
@pytest.mark.parametrize("chunks", ["blocks.*", "leaves"])
def test_attention_and_transformer_layers_train_and_evaluate_exactly(mode, chunks):
    def build():
        return Stack(*(nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True) for _ in range(2)))

    def step(model, optimizer, index):
        loss = model(data(index, 2, 3, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            fast = model(data(index, 2, 3, WIDTH))
        model.train()
        return [loss.detach(), fast]

    assert_equals_resident(build, step, chunks=chunks, **mode)

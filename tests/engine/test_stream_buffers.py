"""Buffers and random numbers, streamed, against plain training without checkpointing."""

import pytest
import torch
from stream_cases import WIDTH, Block, Stack, assert_equals_resident, data, every_mode, every_policy, stack
from torch import Tensor, nn


class Normed(nn.Module):
    """A block with BatchNorm."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.relu(self.lin(x)))


class Counting(nn.Module):
    """Buffers that are not persistent: one written in place, one replaced, one read before it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("replaced", torch.ones(WIDTH), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) - self.mean / (1 + self.calls)
        self.calls += 1
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        self.replaced = self.replaced * 0.9
        return y * self.replaced


def train_and_evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> list[Tensor]:
    loss = model(data(index)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = model(data(index))
    model.train()
    return [loss.detach(), evaluated]


@every_mode
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}])
def test_batch_norm_counts_each_batch_once(mode, options):
    assert_equals_resident(lambda: Stack(*(Normed(**options) for _ in range(3))), train_and_evaluate, **mode)


@every_policy
@pytest.mark.parametrize("chunks", ["leaves", nn.Linear])
def test_batch_norm_outside_of_or_alone_in_a_chunk_counts_each_batch_once(mode, chunks):
    assert_equals_resident(lambda: Stack(Normed(), Normed()), train_and_evaluate, chunks=chunks, **mode)


@every_mode
def test_buffers_that_are_not_persistent_move_as_in_plain_training(mode):
    assert_equals_resident(lambda: Stack(Counting(), Counting()), train_and_evaluate, **mode)


@every_mode
def test_batch_norm_in_a_chunk_called_twice_sees_both_calls(mode):
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    assert_equals_resident(lambda: Twice(Normed(), Counting()), train_and_evaluate, **mode)


@every_mode
def test_batch_norm_sees_forwards_without_grad_between_forward_and_backward(mode):
    def step(model, optimizer, index):
        loss = model(data(index)).square().mean()
        with torch.no_grad():
            model(data(index + 50))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(lambda: Stack(Normed(), Counting(), Normed()), step, **mode)


@every_policy
@pytest.mark.parametrize(
    "normalise",
    [
        nn.utils.spectral_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.orthogonal,
        pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
    ],
)
@pytest.mark.parametrize("chunks", ["blocks.*", "leaves"])
def test_normalised_weights_train_exactly(mode, normalise, chunks):
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = normalise(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(torch.tanh(self.lin(x)))

    build = lambda: Stack(*(Normalised() for _ in range(3)))
    assert_equals_resident(build, train_and_evaluate, chunks=chunks, **mode)


@every_policy
def test_spectral_norm_that_is_the_chunk_itself_trains_exactly(mode):
    def build():
        return Stack(*(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))

    assert_equals_resident(build, train_and_evaluate, **mode)


def test_parametrizations_that_are_cached_for_a_step_train_exactly():
    def step(model, optimizer, index):
        with nn.utils.parametrize.cached():
            return train_and_evaluate(model, optimizer, index)

    def build():
        return Stack(*(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))

    assert_equals_resident(build, step, activations="keep")


@every_mode
def test_dropout_draws_the_same_numbers_as_plain_training(mode):
    assert_equals_resident(lambda: stack(dropout=0.4), train_and_evaluate, **mode)


@every_mode
def test_dropout_outside_of_chunks_and_in_chunks_without_weights_draws_the_same_numbers(mode):
    def build():
        return Stack(nn.Dropout(0.3), Block(dropout=0.3), nn.AlphaDropout(0.2), Block(), nn.RReLU(inplace=True))

    assert_equals_resident(build, train_and_evaluate, chunks=Block, **mode)


@every_mode
def test_attention_dropout_and_noise_drawn_by_the_chunk_are_exact(mode):
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.1 * torch.randn_like(x)
            return x + self.attention(x, x, x, need_weights=False)[0]

    def step(model, optimizer, index):
        loss = model(data(index, 2, 3, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(lambda: Stack(Noisy(), Noisy(), Noisy()), step, **mode)

"""Every kind of parameter, streamed, against the plain resident run."""

import pytest
import torch
import torch.nn.functional as F
from stream_cases import (
    WIDTH,
    Block,
    Stack,
    assert_equals_resident,
    assert_same,
    data,
    descend,
    every_mode,
    every_policy,
    run,
    sgd,
    stack,
    streaming,
)
from torch import Tensor, nn


class TiedInside(nn.Module):
    """One weight under two names, in two modules and in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight
        self.again = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) @ self.again


class LanguageModel(nn.Module):
    """Embedding and head share their weight across chunks."""

    def __init__(self, sparse: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def predict_next(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> Tensor:
    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(index))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Raw(nn.Module):
    """A bare parameter, and a weight that is read through its module but used functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.matrix) * self.scale
        return F.linear(x, self.lin.weight, self.lin.bias) + self.lin(x) * self.lin.weight.sum()


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


@every_mode
def test_ordinary_blocks_train_exactly(mode):
    assert_equals_resident(stack, **mode)


@every_mode
@pytest.mark.parametrize("pin", [1, 2, 9])
@pytest.mark.filterwarnings("ignore:pin=9")
def test_resident_chunks_among_streamed_ones_train_exactly(mode, pin):
    assert_equals_resident(stack, pin=pin, **mode)


@every_policy
def test_small_tensors_whose_copies_stay_train_exactly(mode):
    assert_equals_resident(stack, resident_below=256, **mode)


@every_mode
def test_leaves_as_chunks_train_exactly(mode):
    assert_equals_resident(stack, chunks="leaves", **mode)


@every_mode
def test_a_weight_tied_inside_a_chunk_gets_the_sum_of_its_gradients(mode):
    assert_equals_resident(lambda: Stack(TiedInside(), TiedInside()), **mode)


@every_mode
def test_a_weight_tied_across_chunks_gets_the_sum_of_its_gradients(mode):
    chunks = ["embedding", "blocks.*", "head"]
    assert_equals_resident(LanguageModel, predict_next, chunks=chunks, **mode)


@every_mode
def test_frozen_parameters_in_a_trained_chunk_stay_and_get_no_gradient(mode):
    def build():
        model = stack()
        for block in model.blocks:
            block.up.weight.requires_grad_(False)
            block.norm.requires_grad_(False)
        return model

    assert_equals_resident(build, **mode)


@every_mode
@pytest.mark.parametrize("frozen", [(0,), (1, 2), (3,), (0, 1, 2, 3)])
def test_frozen_chunks_stay_and_pass_gradients_on(mode, frozen):
    def build():
        model = stack()
        for index in frozen:
            model.blocks[index].requires_grad_(False)
        return model

    def step(model, optimizer, index):
        x = data(index).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), x.grad]

    assert_equals_resident(build, step, **mode)


@every_mode
def test_freezing_and_thawing_between_steps_is_followed(mode):
    def step(model, optimizer, index):
        for i, block in enumerate(model.blocks):
            block.requires_grad_(i % 2 == index % 2)
        return descend(model, optimizer, index)

    assert_equals_resident(stack, step, steps=4, **mode)


@every_mode
def test_adapters_train_over_a_frozen_base(mode):
    assert_equals_resident(lambda: Stack(*(Adapted() for _ in range(3))), **mode)


def test_a_frozen_base_takes_no_gradient_memory_and_keeps_its_bits():
    model = Stack(*(Adapted() for _ in range(3)))
    base = {name: value.clone() for name, value in model.state_dict().items() if "base" in name}
    with streaming(model) as streamer:
        optimizer = sgd(p for p in model.parameters() if p.requires_grad)
        for index in range(3):
            descend(model, optimizer, index)
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        assert streamer.gradients.host_bytes() == trained
    for name, value in base.items():
        assert torch.equal(model.get_parameter(name), value)
        assert model.get_parameter(name).grad is None


@every_mode
def test_an_unused_parameter_has_no_gradient_and_is_not_decayed(mode):
    class Unused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(WIDTH, WIDTH)

    def step(model, optimizer, index):
        loss = descend(model, optimizer, index)
        assert model.blocks[1].never.weight.grad is None
        return loss

    assert_equals_resident(lambda: Stack(Unused(), Unused()), step, **mode)


@every_mode
def test_raw_parameters_and_functional_uses_train_exactly(mode):
    assert_equals_resident(lambda: Stack(Raw(), Raw(), Raw()), **mode)


@every_policy
@pytest.mark.parametrize("resident_below", [0, 64])
def test_parameters_without_elements_and_without_dimensions_train_exactly(mode, resident_below):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, WIDTH))
            self.scalar = nn.Parameter(torch.tensor(0.5))
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(torch.cat([x, self.empty])) * self.scalar

    assert_equals_resident(lambda: Stack(Odd(), Odd()), resident_below=resident_below, **mode)


@every_policy
def test_transposed_and_permuted_parameters_train_exactly(mode):
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
            self.permuted = nn.Parameter(torch.randn(2, 4, WIDTH).permute(2, 0, 1))
            self.tail = nn.Parameter(torch.randn(2 * WIDTH)[WIDTH:])

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.transposed) @ self.permuted.flatten(1) * self.tail

    assert_equals_resident(lambda: Stack(Strided(), Strided()), **mode)


@every_policy
def test_a_parameter_with_gaps_in_memory_trains_like_its_contiguous_copy(mode):
    class Gaps(nn.Module):
        def __init__(self, dense: bool) -> None:
            super().__init__()
            weight = torch.randn(WIDTH, 2 * WIDTH)[:, ::2]
            self.weight = nn.Parameter(weight.contiguous() if dense else weight)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight)

    expected = run(lambda: Stack(Gaps(True), Gaps(True)), descend)
    assert_same(run(lambda: Stack(Gaps(False), Gaps(False)), descend, streamed=mode), expected)


@every_policy
def test_channels_last_convolutions_train_exactly_and_keep_their_strides(mode):
    def build():
        return Stack(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))).to(memory_format=torch.channels_last)

    def step(model, optimizer, index):
        x = data(index, 2, 4, 5, 5).to(memory_format=torch.channels_last)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weight = model.blocks[1].weight
        return [loss.detach(), weight.stride(), weight.grad.stride()]

    assert_equals_resident(build, step, **mode)


@every_policy
@pytest.mark.parametrize("tied", [False, True])
def test_sparse_gradients_of_an_embedding_are_exact(mode, tied):
    def build():
        return LanguageModel(sparse=True, tied=tied)

    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    chunks = ["embedding", "blocks.*", "head"]
    assert_equals_resident(build, predict_next, optimizer=optimizer, chunks=chunks, **mode)


def test_the_comparison_notices_a_weight_that_differs_in_one_bit():
    expected = run(stack, descend)
    found = run(stack, descend, streamed={})
    weight = found[-1]["blocks.2.up.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"blocks\.2\.up\.weight: differs"):
        assert_same(found, expected)

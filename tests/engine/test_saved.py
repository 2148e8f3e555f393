"""Weights saved for backward are references into whatever slot holds them then."""

import copy
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from stream_cases import (
    WIDTH,
    Block,
    Stack,
    assert_equals_resident,
    assert_same,
    data,
    every_mode,
    every_policy,
    stack,
    streaming,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def test_no_slot_memory_is_saved_between_forward_and_backward():
    model = Stack(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    with streaming(model, window=1, activations="keep") as streamer:
        y = model(data(0, 3, 64))
        expected = [p.detach().clone() for p in model.parameters()]
        streamer.window.slots[0].buffer.fill_(255)
        streamer.window.forget()
        y.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True))


@every_mode
def test_an_error_that_leaves_a_checkpoint_leaves_no_hooks_even_if_it_is_kept(mode):
    class Failing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.fail, x, use_reentrant=False)

        def fail(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    model = Stack(Block(), Failing(), Block())
    with streaming(model, **mode), pytest.raises(ArithmeticError) as kept:
        model(data())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert kept.tb is not None


def saved(fn: Tensor) -> list[Tensor]:
    """Every tensor that the graph behind `fn` keeps."""
    found, stack_, seen = [], [fn], set()
    while stack_:
        node = stack_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [
            getattr(node, name)
            for name in dir(node)
            if name.startswith("_saved_") and isinstance(getattr(node, name), Tensor)
        ]
        stack_ += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[2:6], lambda w: w.view(2, 4, WIDTH)[1], lambda w: w])
def test_views_of_weights_are_unpacked_with_their_size_strides_and_offset(view):
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Parameter(torch.randn(3))
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return (x.sum() * view(self.weight)).exp()

    model = Stack(Views(), Block())
    with streaming(model, window=1, activations="keep", chunks=["blocks.0"]):
        y = model.blocks[0](data().requires_grad_())
        expected = view(model.blocks[0].weight)
        found = [t for t in saved(y.grad_fn) if t.dim() == expected.dim() and torch.equal(t, expected)]
        assert found
        assert all(t.stride() == expected.stride() for t in found)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_reading_saved_tensors_outside_of_a_backward_leaves_slots_and_the_plan_alone(window):
    model = stack()
    plain = copy.deepcopy(model)
    with streaming(model, window=window, activations="keep") as streamer:
        streamer.conservative, on_demand = False, 0
        for index in range(3):
            y, expected = model(data(index)), plain(data(index))
            found = [saved(one.grad_fn) for one in (y, expected)]
            assert len(found[0]) == len(found[1]) > 0
            assert all(map(torch.equal, *found))
            assert not any(slot.in_use for slot in streamer.window.slots)
            y.sum().backward()
            on_demand = on_demand or streamer.follower.on_demand
        assert streamer.follower.on_demand == on_demand > 0


def test_a_graph_from_before_the_tree_was_divided_anew_is_exact():
    def train(model: Stack) -> list[Tensor | None]:
        parameters = list(model.parameters())
        y = model(data())
        y.sum().backward(retain_graph=True)
        for block in model.blocks:
            block.norm.bias = block.up.bias = None  # other weights, and the rest of them elsewhere in the slots
        model(data(1)).sum().backward()
        y.sum().backward()
        return [parameter.grad for parameter in parameters]

    plain, model = stack(), stack()
    model.load_state_dict(plain.state_dict())
    with streaming(model, activations="keep"):
        assert_same(train(model), train(plain))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Traced(torch.autograd.Function):
    """The identity, whose node can be watched."""

    @staticmethod
    def forward(_ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx, grad: Tensor) -> Tensor:
        return grad


@every_policy
@pytest.mark.usefixtures("no_collector")
def test_a_graph_without_a_backward_dies_with_its_output_though_nodes_save_their_outputs(mode):
    class SavesOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x).exp().sigmoid().softmax(-1)

    model = Stack(SavesOutputs(), SavesOutputs())
    with streaming(model, **mode):
        model(data())  # the first visits are watched
        traced = Traced.apply(data().requires_grad_())
        node = weakref.ref(traced.grad_fn)
        y = model(traced)
        del traced
        assert node() is not None
        del y
        assert node() is None


def test_what_a_node_saves_of_its_output_still_raises_when_it_is_written():
    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x).exp()
            z = y * 2
            y.add_(1)
            return z

    model = Stack(Exp())
    with streaming(model, activations="keep"), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(data()).sum().backward()


class Scale(nn.Module):
    """Its backward reads the weight before the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Scale(), Scale(), Scale())

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class CheckpointedScales(Scales):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.parts, x, use_reentrant=False)


@every_mode
@pytest.mark.parametrize(("kind", "chunks"), [(Scales, [Scales, Scale]), (CheckpointedScales, [Scale])])
def test_a_weight_read_before_a_recompute_of_several_chunks_is_exact(mode, kind, chunks):
    assert_equals_resident(lambda: Stack(kind(), kind(), kind()), chunks=chunks, **mode)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x @ (self.weight * other)


class Caller(nn.Module):
    """Calls a chunk that is no part of it, with its own weight as an argument."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.__dict__["product"] = product

    def forward(self, x: Tensor) -> Tensor:
        return self.__dict__["product"](x, self.weight)


class ProductStack(Stack):
    def __init__(self) -> None:
        product = Product()
        super().__init__(nn.Linear(WIDTH, WIDTH), Caller(product), nn.Linear(WIDTH, WIDTH))
        self.product = product


@pytest.mark.parametrize("window", [2, 3])
@every_policy
def test_one_node_that_saves_the_weights_of_two_chunks_is_exact(mode, window):
    assert_equals_resident(ProductStack, chunks=["product", "blocks.*"], window=window, **mode)

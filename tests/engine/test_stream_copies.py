"""Copies and pickles of a streamed module, detaching, and what the garbage collector frees."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from stream_cases import (
    Block,
    assert_same,
    data,
    descend,
    every_policy,
    sgd,
    stack,
    state_of,
    stream,
    streaming,
)
from torch import nn

from ramtorch_core import attach

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module: torch.load(saved(module), weights_only=False),
}


def saved(module: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


copies = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)


@every_policy
@copies
def test_a_copy_computes_and_trains_with_its_own_weights(mode, duplicate):
    model = stack()
    with streaming(model, **mode):
        descend(model, sgd(model.parameters()), 0)
        before = state_of(model)
        other = duplicate(model)
        assert torch.equal(other(data(5)), model(data(5)))
        descend(other, sgd(other.parameters()), 1)
        assert_same(state_of(model), before)
        assert not torch.equal(other(data(5)), model(data(5)))
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in other.parameters())
        with streaming(other, **mode):
            descend(other, sgd(other.parameters()), 2)
    assert_same(state_of(model), before)


@copies
def test_a_copy_of_a_chunk_computes_with_its_own_weights(duplicate):
    model = stack()
    with streaming(model):
        model(data()).sum().backward()
        other = duplicate(model.blocks[1])
        assert torch.equal(other(data()), model.blocks[1](data()))
        with torch.no_grad():
            other.up.weight.zero_()
        assert model.blocks[1].up.weight.abs().sum() > 0


@copies
def test_a_copy_made_after_close_is_plain(duplicate):
    model = stack()
    stream(model).close()
    other = duplicate(model)
    assert torch.equal(other(data()), model(data()))
    assert not any("forward" in module.__dict__ for module in (*model.modules(), *other.modules()))


@copies
def test_a_copy_keeps_a_forward_that_the_user_had_replaced(duplicate):
    model = stack(2)
    model.blocks[0].forward = torch.tanh
    with streaming(model, chunks=["blocks.1"]):
        other = duplicate(model)
        assert torch.equal(other(data()), model(data()))


def test_a_checkpoint_of_one_parameter_does_not_drag_its_chunk_along():
    model = stack(2)
    with streaming(model):
        model(data()).sum().backward()
        weight = model.blocks[0].up.weight
        assert weight.untyped_storage().nbytes() == weight.nbytes
        assert weight.grad.untyped_storage().nbytes() == weight.nbytes
        file = io.BytesIO()
        torch.save(weight, file)
        assert file.tell() < 3000


def test_names_identities_and_kinds_of_parameters_stay_the_same():
    model = stack()
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    with streaming(model):
        for _ in range(2):
            model(data()).sum().backward()
            now = dict(model.named_parameters())
            assert list(now) == list(before)
            assert all(now[name] is before[name] for name in before)
            assert list(model.state_dict()) == keys
            assert all(p.is_leaf and p.device.type == "cpu" for p in model.parameters())
            assert all(isinstance(block.up.weight, nn.Parameter) for block in model.blocks)
    assert all(dict(model.named_parameters())[name] is before[name] for name in before)


def test_parameters_are_the_masters_even_inside_of_a_visit():
    seen = []

    class Looks(Block):
        def forward(self, x):
            seen.append([id(p) for p in self.parameters()])
            seen.append(list(self.state_dict()))
            return super().forward(x)

    model = Looks()
    root = nn.Sequential(model)
    with streaming(root, chunks=["0"]):
        root(data()).sum().backward()
    assert seen[0] == [id(p) for p in model.parameters()]
    assert seen[1] == list(model.state_dict())


def test_close_is_idempotent_and_leaves_a_plain_module_that_trains_on():
    plain, model = stack(), stack()
    model.load_state_dict(plain.state_dict())
    optimizers = [sgd(each.parameters()) for each in (plain, model)]
    streamer = stream(model, pin=1)
    for index in range(4):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            descend(each, optimizer, index)
        if index == 1:
            streamer.close()
            streamer.close()
            assert not any("forward" in module.__dict__ for module in model.modules())
    assert_same(state_of(model), state_of(plain))


@every_policy
def test_a_graph_that_outlives_close_raises_a_clear_error(mode):
    plain, model = stack(), stack()
    model.load_state_dict(plain.state_dict())
    streamer = stream(model, **mode)
    loss = model(data()).square().mean()
    streamer.close()
    plain(data()).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"closed before this backward.*close\(\) afterwards"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    model(data()).square().mean().backward()
    assert_same(state_of(model), state_of(plain))


def test_close_inside_of_a_backward_leaves_a_plain_module():
    model = stack()
    streamer = stream(model)
    y = model(data())
    y.register_hook(lambda _: streamer.close())
    with pytest.raises(RuntimeError, match="closed"):
        y.sum().backward()
    expected = copy.deepcopy(model)
    assert torch.equal(model(data()), expected(data()))
    model(data()).sum().backward()


def test_a_module_may_be_attached_again_after_close():
    model = stack()
    expected = model(data())
    for window in (1, 2, 3):
        with streaming(model, window=window):
            assert torch.equal(model(data()), expected)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_a_model_and_its_engine_are_collected(closed, trained):
    model = stack()
    streamer = stream(model, pin=1)
    if trained:
        optimizer = sgd(model.parameters())
        descend(model, optimizer, 0)
        del optimizer
    if closed:
        streamer.close()
    references = [weakref.ref(each) for each in (model, model.blocks[0], streamer, streamer.gradients)]
    del model, streamer
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_a_closed_engine_is_collected_while_the_model_lives():
    model = stack()
    streamer = stream(model)
    model(data()).sum().backward()
    streamer.close()
    reference = weakref.ref(streamer)
    del streamer
    gc.collect()
    assert reference() is None
    assert all(p.grad is not None for p in model.parameters())


def test_the_graph_of_a_step_is_freed_without_the_garbage_collector():
    model = stack()
    with streaming(model):
        gc.collect()
        gc.disable()
        try:
            y = model(data())
            reference = weakref.ref(y)
            y.sum().backward()
            del y
            assert reference() is None
        finally:
            gc.enable()


def test_the_signature_of_a_streamed_forward_is_the_users():
    import inspect

    model = stack()
    before = inspect.signature(model.blocks[0].forward)
    with streaming(model):
        assert inspect.signature(model.blocks[0].forward) == before


def test_attach_is_public_and_streams_by_default_in_a_window_of_two():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    streamer = attach(model, device="cpu")
    model(torch.ones(1, 512)).sum().backward()
    assert len(streamer.window.slots) == 2
    streamer.close()

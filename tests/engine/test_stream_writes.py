"""Masters that user code writes, in ways that autograd sees or does not, against the plain resident run."""

import copy

import pytest
import torch
from stream_cases import (
    WIDTH,
    Stack,
    assert_equals_resident,
    assert_same,
    data,
    descend,
    every_mode,
    stack,
    state_of,
    streaming,
)
from torch import nn


def clamp_data(model, index):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def fill_from_vector(model, index):
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def repoint(model, index):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def repoint_to_another_parameter(model, index):
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data


def repoint_to_other_strides(model, index):
    model.blocks[0].up.weight.data = model.blocks[0].up.weight.data.t().contiguous().t()


def write_in_place(model, index):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def write_through_detach(model, index):
    for parameter in model.parameters():
        parameter.detach().add_(0.01)


def write_through_numpy(model, index):
    for parameter in model.parameters():
        parameter.data.numpy()[...] *= 0.9


def load(model, index):
    state = {name: value * 0.9 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def load_and_assign(model, index):
    state = {name: (value * 0.9).clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def initialise(model, index):
    model.apply(lambda m: nn.init.orthogonal_(m.weight) if isinstance(m, nn.Linear) else None)


def reset(model, index):
    model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)


def swap(model, index):
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    first.data, second.data = second.data, first.data


WRITES = [
    clamp_data,
    fill_from_vector,
    repoint,
    repoint_to_other_strides,
    write_in_place,
    write_through_detach,
    write_through_numpy,
    load,
    initialise,
    reset,
    swap,
]


@every_mode
@pytest.mark.parametrize("write", WRITES, ids=[write.__name__ for write in WRITES])
@pytest.mark.parametrize("resident_below", [0, 256])
def test_weights_written_between_steps_are_used_in_the_next_one(mode, write, resident_below):
    def step(model, optimizer, index):
        loss = descend(model, optimizer, index)
        write(model, index)
        with torch.no_grad():
            evaluated = model(data(8))
        write(model, index)
        return [loss, evaluated]

    # A slot keeps its own layout, and some processors' matrix products round differently for another one.
    tolerance = 1e-5 if write is repoint_to_other_strides else 0.0
    assert_equals_resident(stack, step, steps=2, resident_below=resident_below, tolerance=tolerance, **mode)


@pytest.mark.parametrize("write", WRITES, ids=[write.__name__ for write in WRITES])
def test_weights_written_between_steps_reach_their_half_precision_shadows(write):
    def step(model, optimizer, index):
        with torch.autocast("cpu", torch.bfloat16):  # which remembers its casts until it ends
            loss = descend(model, optimizer, index)
        write(model, index)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            evaluated = model(data(8))
        write(model, index)
        return [loss, evaluated]

    assert_equals_resident(stack, step, steps=3)


def test_weights_that_are_assigned_while_streaming_are_used():
    plain, model = stack(), stack()
    model.load_state_dict(plain.state_dict())
    with streaming(model):
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            descend(each, optimizer, 0)
            load_and_assign(each, 0)
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            descend(each, optimizer, 1)
        assert_same(state_of(model), state_of(plain))
    assert_same(state_of(model), state_of(plain))


def test_one_storage_for_two_parameters_stays_correct_or_is_separated():
    model = stack()
    with streaming(model):
        repoint_to_another_parameter(model, 0)
        expected = copy.deepcopy(model)
        assert torch.equal(model(data()), expected(data()))


def test_a_master_that_changes_dtype_or_size_is_refused_by_name():
    model = stack()
    with streaming(model):
        model(data())
        model.blocks[1].up.weight.data = model.blocks[1].up.weight.data.double()
        with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight.*float64.*Change the model before"):
            model(data())


def decay(weight):
    with torch.no_grad():
        weight.mul_(0.9)


def decay_data(weight):
    weight.data.mul_(0.9)


def assign_data(weight):
    weight.data = weight.data * 0.9


@every_mode
@pytest.mark.parametrize("write", [decay, decay_data, assign_data])
def test_a_chunk_that_writes_its_own_weights_is_refused_by_name(mode, write):
    class Decaying(nn.Linear):
        def forward(self, x):
            write(self.weight)
            return super().forward(x)

    model = Stack(nn.Linear(WIDTH, WIDTH), Decaying(WIDTH, WIDTH))
    with streaming(model, **mode):
        with pytest.raises(RuntimeError, match=r"blocks\.1.*writes its own weights"):
            model(data())
        model.blocks[1].forward = model.blocks[0].forward


def test_weights_written_inside_a_scope_are_used_after_invalidate():
    plain, model = stack(), stack()
    model.load_state_dict(plain.state_dict())
    with streaming(model) as streamer, streamer.scope():
        model(data())
        for each in (plain, model):
            clamp_data(each, 0)
        streamer.invalidate()
        assert torch.equal(model(data()), plain(data()))


def test_an_optimizer_step_inside_a_scope_is_used_by_the_next_forward():
    plain, model = stack(), stack()
    model.load_state_dict(plain.state_dict())
    with streaming(model, resident_below=256) as streamer:
        results = []
        for each in (plain, model):
            optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, fused=True)
            with streamer.scope():
                results.append([descend(each, optimizer, index) for index in range(3)])
        assert_same(results[1], results[0])


def test_a_small_weight_written_inside_a_scope_raises_in_an_older_graph_as_in_plain_torch():
    model = stack(2)
    with streaming(model, resident_below=1 << 20, activations="keep") as streamer, streamer.scope():
        loss = model(data()).sum()
        with torch.no_grad():
            model.blocks[0].norm._parameters["weight"].mul_(3)
        model(data())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

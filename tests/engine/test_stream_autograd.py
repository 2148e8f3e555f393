"""What users do with autograd around a streamed model, against the plain resident run."""

import pytest
import torch
from stream_cases import assert_equals_resident, data, every_mode, every_policy, stack, streaming
from torch import Tensor, nn


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@every_mode
def test_autograd_grad_returns_gradients_and_publishes_none(mode):
    def step(model, optimizer, index):
        loss = model(data(index)).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.sub_(grad, alpha=0.1)
        return [loss.detach(), grads]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_autograd_grad_of_some_parameters_and_the_input_is_exact(mode):
    def step(model, optimizer, index):
        x = data(index).requires_grad_()
        loss = model(x).square().mean()
        wanted = [x, model.blocks[2].up.weight, model.blocks[0].norm.bias]
        return [loss.detach(), torch.autograd.grad(loss, wanted)]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_autograd_grad_with_respect_to_activations_is_exact(mode):
    def step(model, optimizer, index):
        first = model.blocks[0](data(index))
        second = model.blocks[1](first)
        return torch.autograd.grad(model.blocks[3](model.blocks[2](second)).sum(), [second, first])

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_autograd_grad_of_an_unused_parameter_is_none_or_zero_as_asked(mode):
    def step(model, optimizer, index):
        unused = model.blocks[3].up.weight
        x = data(index)
        for block in list(model.blocks)[:3]:
            x = block(x)
        wanted = [unused, model.blocks[0].up.weight]
        none = torch.autograd.grad(x.sum(), wanted, allow_unused=True, retain_graph=True)
        return [none, torch.autograd.grad(x.sum(), wanted, materialize_grads=True)]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_backward_inputs_limits_what_gets_a_gradient(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        loss = model(data(index)).square().mean()
        loss.backward(inputs=[model.blocks[1].down.weight, model.blocks[3].up.bias])
        optimizer.step()
        return [loss.detach(), [p.grad is None for p in model.parameters()]]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_several_losses_with_their_own_graphs_accumulate(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        first, second = model(data(index)).square().mean(), model(data(index + 20)).abs().mean()
        if index % 2:
            first, second = second, first
        first.backward()
        between = grads_of(model)
        second.backward()
        optimizer.step()
        return [first.detach(), second.detach(), between]

    assert_equals_resident(stack, step, steps=4, **mode)


@every_mode
def test_several_backwards_through_one_graph_accumulate(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        y = model(data(index))
        y.square().mean().backward(retain_graph=True)
        y.abs().mean().backward(retain_graph=True)
        y.sum().backward()
        optimizer.step()
        return y.detach()

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_losses_on_different_depths_of_one_graph_accumulate(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        x, losses = data(index), []
        for block in model.blocks:
            x = block(x)
            losses.append(x.square().mean())
        losses[1].backward(retain_graph=True)
        losses[3].backward(retain_graph=True)
        losses[2].backward()
        optimizer.step()
        return [loss.detach() for loss in losses]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_backward_without_retain_graph_a_second_time_raises_what_torch_raises(mode):
    model = stack()
    with streaming(model, **mode):
        loss = model(data()).square().mean()
        loss.backward()
        before = grads_of(model)
        with pytest.raises(RuntimeError, match=r"backward through the graph a second time|already been freed"):
            loss.backward()
        model.zero_grad()
        model(data()).square().mean().backward()
        assert all(torch.equal(a, b) for a, b in zip(before, grads_of(model), strict=True))


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_a_gradient_penalty_is_exact(window, activations):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        x = data(index).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.square().mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return [loss.detach(), slope.detach()]

    assert_equals_resident(stack, step, window=window, activations=activations)


@every_policy
def test_gradients_of_gradients_with_respect_to_parameters_are_exact(mode):
    def step(model, optimizer, index):
        loss = model(data(index)).square().mean()
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        inner = sum((g * p.detach()).sum() for g, p in zip(first, parameters, strict=True))
        return [loss.detach(), torch.autograd.grad(inner, parameters, allow_unused=True)]

    assert_equals_resident(stack, step, **mode)


@every_policy
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_training_step_unrolled_by_create_graph_is_exact(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        loss = model(data(index)).square().mean()
        loss.backward(create_graph=True)
        sum(p.grad.square().sum() for p in model.parameters()).backward()
        result = grads_of(model)
        optimizer.zero_grad(set_to_none=True)
        return [loss.detach(), result]

    assert_equals_resident(lambda: stack(2), step, **mode)

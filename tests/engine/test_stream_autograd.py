"""What users do with autograd around a streamed model, against the plain resident run."""

import pytest
import torch
from stream_cases import WIDTH, Block, Stack, assert_equals_resident, data, every_mode, every_policy, stack, streaming
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


@every_mode
def test_hooks_on_parameters_see_and_change_gradients(mode):
    def step(model, optimizer, index):
        seen = []
        weight, bias = model.blocks[1].up.weight, model.blocks[2].down.bias
        handles = [
            weight.register_hook(lambda grad: seen.append(grad.clone())),
            weight.register_hook(lambda grad: grad * 2),
            bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
        ]
        optimizer.zero_grad()
        loss = model(data(index)).square().mean()
        loss.backward()
        optimizer.step()
        for handle in handles:
            handle.remove()
        return [loss.detach(), seen]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_hooks_that_step_and_free_each_gradient_work_as_in_plain_training(mode):
    def step(model, optimizer, index):
        def update(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
        loss = model(data(index)).square().mean()
        loss.backward()
        for handle in handles:
            handle.remove()
        return [loss.detach(), [p.grad for p in model.parameters()]]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_hooks_on_tensors_see_and_change_gradients(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        seen, x = [], data(index)
        for block in model.blocks:
            x = block(x)
            x.register_hook(lambda grad: seen.append(grad.clone()))
            x.register_hook(lambda grad: grad * 1.5)
        x.retain_grad()
        x.square().mean().backward()
        optimizer.step()
        return [seen, x.grad]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_a_hook_that_reads_grad_and_weights_during_backward_sees_plain_tensors(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        seen, x = [], data(index)
        for block in model.blocks:
            x = block(x)
            x.register_hook(lambda _, block=block: seen.append(block.up.weight.sum().detach().clone()))
        x.square().mean().backward()
        optimizer.step()
        return seen

    assert_equals_resident(stack, step, **mode)


@every_policy
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_changes_nothing(mode):
    def step(model, optimizer, index):
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            loss = model(data(index)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    assert_equals_resident(stack, step, **mode)


@every_policy
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_detection_finds_a_nan(mode):
    class Sqrt(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * 0).sqrt()

    model = Stack(Block(), Sqrt(WIDTH, WIDTH), Block())
    with streaming(model, **mode), torch.autograd.set_detect_anomaly(True):
        loss = model(data()).mean()
        with pytest.raises(RuntimeError, match="returned nan values"):
            loss.backward()


@every_mode
def test_a_backward_inside_of_a_backward_is_exact(mode):
    class Inner(torch.autograd.Function):
        """Runs a streamed block and its backward when its own backward comes."""

        @staticmethod
        def forward(ctx, x, block):
            ctx.block = block
            ctx.save_for_backward(x)
            with torch.no_grad():
                return block(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                ctx.block(x).backward(grad)
            return x.grad, None

    def step(model, optimizer, index):
        optimizer.zero_grad()
        x = data(index).requires_grad_()
        y = model.blocks[0](x)
        y = Inner.apply(y, model.blocks[1])
        y = model.blocks[3](Inner.apply(model.blocks[2](y), model.blocks[1]))
        y.square().mean().backward()
        optimizer.step()
        return [y.detach(), x.grad]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_a_whole_training_step_of_the_model_inside_of_a_foreign_backward_is_exact(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        x = data(index).requires_grad_()

        def train(grad):
            with torch.enable_grad():
                model(grad.detach()).square().mean().backward()
            return grad

        y = x * 2
        y.register_hook(train)
        y.sum().backward()
        optimizer.step()
        return x.grad

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_saved_tensor_hooks_of_the_user_see_activations_and_results_stay_exact(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = model(data(index)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_backward_in_another_thread_is_exact(mode):
    import threading

    def step(model, optimizer, index):
        optimizer.zero_grad()
        loss = model(data(index)).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(stack, step, **mode)


@every_policy
def test_a_weight_changed_between_forward_and_backward_raises_what_torch_raises(mode):
    model = stack()
    with streaming(model, **mode):
        loss = model(data()).square().mean()
        with torch.no_grad():
            model.blocks[2].down.weight.mul_(2)
        if mode["activations"] == "keep":
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*blocks\.2\.down\.weight"):
                loss.backward()
        model.zero_grad()
        model(data()).square().mean().backward()


def test_an_activation_changed_between_forward_and_backward_raises_what_torch_raises():
    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.kept = nn.Linear(WIDTH, WIDTH), []

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x).exp()
            self.kept.append(y)
            return y * 2

    model = Stack(Leaks(), Block())
    with streaming(model, activations="keep"):
        loss = model(data()).square().mean()
        model.blocks[0].kept[0].detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

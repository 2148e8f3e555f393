"""Hooks, anomaly detection and backward passes inside others, against the plain resident run."""

import threading
from functools import partial

import pytest
import torch
from stream_cases import WIDTH, Block, Stack, assert_equals_resident, data, every_mode, every_policy, stack, streaming
from torch import Tensor, nn


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
@pytest.mark.parametrize("resident_below", [0, 1 << 20])
def test_hooks_on_parameters_without_a_gradient_are_not_called(mode, resident_below):
    """Neither for a weight that its chunk does not use, nor for those of a chunk that is not called."""

    class Spare(Block):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(WIDTH, WIDTH))

    class Skips(Stack):
        def forward(self, x):
            return self.blocks[2](self.blocks[0](x))

    def step(model, optimizer, index):
        called = []
        handles = [p.register_hook(partial(seen, called, name)) for name, p in model.named_parameters()]
        loss = model(data(index)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for handle in handles:
            handle.remove()
        return [loss.detach(), sorted(called)]

    def seen(called, name, grad):
        called.append(name)
        return grad * 2

    assert_equals_resident(lambda: Skips(Spare(), Spare(), Spare()), step, resident_below=resident_below, **mode)


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

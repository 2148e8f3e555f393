"""The life of a gradient across microbatches, optimizers and the user's hands, against the plain resident run."""

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


def backward(model: nn.Module, index: int) -> Tensor:
    loss = model(data(index)).square().mean()
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@every_mode
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_over_microbatches_is_exact(mode, set_to_none):
    def step(model, optimizer, index):
        losses = [backward(model, 10 * index + microbatch) for microbatch in range(3)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return losses

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_evaluation_in_the_middle_of_accumulation_changes_nothing(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        results = []
        for microbatch in range(3):
            results.append(backward(model, 10 * index + microbatch))
            model.eval()
            with torch.no_grad() if microbatch % 2 else torch.inference_mode():
                results.append(model(data(77)).clone())
            model.train()
        optimizer.step()
        return [torch.as_tensor(r.tolist()) for r in results]

    assert_equals_resident(lambda: stack(dropout=0.2), step, **mode)


@every_mode
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_forwards_without_grad_between_forward_and_backward_change_nothing(mode, guard):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        loss = model(data(index)).square().mean()
        with guard():
            other = model(data(33)).sum().item()
            model.blocks[2](data(34))
        loss.backward()
        optimizer.step()
        return [loss.detach(), other]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_gradients_that_the_user_keeps_are_never_overwritten(mode):
    model = stack()
    with streaming(model, **mode):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, 0)
        kept = [p.grad for p in model.parameters()]
        views = [p.grad.view(-1)[1:] for p in model.parameters()]
        detached = [p.grad.detach().t() for p in model.parameters() if p.dim() == 2]
        before = [t.clone() for t in (*kept, *views, *detached)]
        for index in range(1, 4):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            backward(model, index)
            backward(model, index + 20)
        del kept
        assert_same([*views, *detached], before[-len(views) - len(detached) :])


@every_mode
def test_one_kept_view_of_a_gradient_is_never_overwritten(mode):
    model = stack()
    with streaming(model, **mode):
        backward(model, 0)
        view = model.blocks[1].up.weight.grad[2:5, 1]
        before = view.clone()
        for index in range(1, 5):
            model.zero_grad(set_to_none=True)
            backward(model, index)
        assert torch.equal(view, before)


@every_mode
def test_gradients_that_the_user_replaces_or_scales_are_added_to(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        backward(model, index)
        for number, parameter in enumerate(model.parameters()):
            if number % 4 == 0:
                parameter.grad = parameter.grad * 0.5
            elif number % 4 == 1:
                parameter.grad.mul_(0.25)
            elif number % 4 == 2:
                parameter.grad = None
            else:
                parameter.grad = torch.ones_like(parameter)
        backward(model, index + 20)
        optimizer.step()
        return gradients(model)

    assert_equals_resident(stack, step, **mode)


@every_policy
def test_gradients_that_exist_before_the_model_streams_are_added_to(mode):
    plain, model = stack(), stack()
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        backward(each, 0)
    backward(plain, 1)
    with streaming(model, **mode):
        backward(model, 1)
        assert_same(gradients(model), gradients(plain))


@every_mode
def test_a_regulariser_over_all_parameters_is_exact(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        loss = model(data(index)).square().mean()
        loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_a_regulariser_with_its_own_backward_is_exact(mode):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        backward(model, index)
        penalty = sum(p.abs().sum() for name, p in model.named_parameters() if "up" in name)
        penalty.backward()
        backward(model, index + 20)
        optimizer.step()
        return penalty.detach()

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_a_regulariser_under_accumulation_differs_by_rounding_only(mode):
    def accumulate(model):
        for index in range(3):
            loss = model(data(index)).square().mean()
            (loss + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()
        return gradients(model)

    plain, model = stack(), stack()
    model.load_state_dict(plain.state_dict())
    with streaming(model, **mode):
        for found, expected in zip(accumulate(model), accumulate(plain), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: torch.optim.AdamW(ps, lr=0.01),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
        lambda ps: torch.optim.Adagrad(ps, lr=0.01),
        lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, nesterov=True, momentum=0.9),
    ],
    ids=["adamw", "foreach", "fused", "adagrad", "rmsprop", "nesterov"],
)
def test_optimizers_train_exactly(optimizer):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        loss = backward(model, index)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    assert_equals_resident(stack, step, steps=5, optimizer=optimizer)


@every_mode
def test_lbfgs_trains_exactly(mode):
    def step(model, optimizer, index):
        def closure():
            optimizer.zero_grad()
            loss = model(data(0)).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    def optimizer(parameters):
        return torch.optim.LBFGS(list(parameters), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    assert_equals_resident(stack, step, optimizer=optimizer, **mode)


@every_mode
def test_two_optimizers_that_take_turns_train_exactly(mode):
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = stack(2), stack(2)

    def step(model, optimizer, index):
        results = []
        for turn, (trained, other) in enumerate([(model.critic, model.generator), (model.generator, model.critic)]):
            trained.requires_grad_(True)
            other.requires_grad_(False)
            fake = model.generator(data(index))
            score = model.critic(fake.detach() if turn == 0 else fake).square().mean()
            score.backward()
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1 if turn else -0.1)
                    parameter.grad = None
            results.append(score.detach())
        return [results, [p.grad for p in model.parameters()]]

    assert_equals_resident(Gan, step, chunks=["generator.blocks.*", "critic.blocks.*"], **mode)


@every_mode
def test_a_loss_without_a_backward_leaves_no_gradient_and_no_trace(mode):
    def step(model, optimizer, index):
        lost = model(data(index + 40)).square().mean()
        optimizer.zero_grad()
        loss = backward(model, index)
        assert lost is not None
        optimizer.step()
        return [lost.detach(), loss]

    assert_equals_resident(stack, step, **mode)


def test_inference_takes_no_gradient_memory():
    model = stack()
    with streaming(model, training=False) as streamer:
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                model(data())
        model(data())
        assert streamer.gradients.host_bytes() == 0


def test_gradient_memory_does_not_grow_over_many_steps():
    model = Stack(Block(), nn.Linear(WIDTH, WIDTH), Block())
    with streaming(model) as streamer:
        held = []
        for index in range(20):
            model.zero_grad(set_to_none=index % 3 > 0)
            backward(model, index)
            held.append(streamer.gradients.host_bytes())
        assert held == [sum(p.nbytes for p in model.parameters())] * 20


@every_policy
@pytest.mark.parametrize("other", ["unused", "retained"])
def test_gradients_leave_the_device_during_backward_though_another_graph_of_the_model_lives(mode, other, monkeypatch):
    model = stack()
    with streaming(model, **mode) as streamer:
        kept = model(data(1)).sum()
        if other == "retained":
            kept.backward(retain_graph=True)
        loss = model(data(0)).sum()
        sent: list[object] = []
        receive, over = streamer.gradients.receive, streamer._backwards.visit_over
        monkeypatch.setattr(streamer.gradients, "receive", lambda *given: (sent.append("sent"), receive(*given)))
        monkeypatch.setattr(streamer._backwards, "visit_over", lambda group: (sent.append("over"), over(group)))
        loss.backward()
    assert sent[:8] == ["sent", "over"] * 4

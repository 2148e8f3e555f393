"""Lending: what modules show during a visit, and what its node does with gradients."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stream_cases import WIDTH
from torch import Tensor, nn

from ramtorch_core.engine.lend import Placement, lend
from ramtorch_core.memory.weights import Weight, WeightGroup


class Collector:
    def __init__(self) -> None:
        self.seen: list[list[Tensor | None]] = []

    def collect(self, loan: Any, grads: Sequence[Tensor | None]) -> None:
        self.seen.append(list(grads))


def group_of(module: nn.Module) -> WeightGroup:
    return WeightGroup(0, "chunk", [Weight(name, p, ((module, name),)) for name, p in module.named_parameters()])


def copies(group: WeightGroup) -> list[Tensor]:
    return [weight.parameter.detach().clone() for weight in group.weights]


def test_the_node_hands_gradients_to_the_collector_and_none_to_the_masters():
    module, collector = nn.Linear(WIDTH, WIDTH), Collector()
    group = group_of(module)
    weight, bias = lend(group, copies(group), collector)
    (weight.sum() * 2 + bias.sum()).backward()
    assert [grad.unique().item() for grad in collector.seen[0]] == [2.0, 1.0]
    assert module.weight.grad is None


def test_a_gradient_that_somebody_looks_at_goes_to_autograd():
    module, collector = nn.Linear(WIDTH, WIDTH), Collector()
    group = group_of(module)
    module.weight.register_hook(lambda grad: grad * 3)
    weight, bias = lend(group, copies(group), collector)
    (weight.sum() + bias.sum()).backward()
    handed = [grad for grads in collector.seen for grad in grads if grad is not None]
    assert [grad.size() for grad in handed] == [bias.size()]
    assert (module.weight.grad == 3).all()


def test_frozen_weights_and_visits_without_gradients_are_lent_without_history():
    module, collector = nn.Linear(WIDTH, WIDTH), Collector()
    module.weight.requires_grad_(False)
    group = group_of(module)
    weight, bias = lend(group, copies(group), collector)
    assert not weight.requires_grad
    assert bias.requires_grad
    with torch.no_grad():
        assert not any(tensor.requires_grad for tensor in lend(group, copies(group), collector))


def test_what_is_shown_shadows_the_parameter_and_is_taken_away_again():
    module = nn.Linear(WIDTH, WIDTH)
    master, group = module.weight, group_of(module)
    placement, lent = Placement(group.weights), copies(group_of(module))
    placement.show(lent)
    assert module.weight is lent[0]
    assert dict(module.named_parameters())["weight"] is master
    placement.hide()
    assert module.weight is master
    placement.hide()
    assert "weight" not in module.__dict__


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
def test_what_was_shown_before_is_shown_again(kind):
    module = kind(WIDTH, WIDTH)
    group = group_of(module)
    placement, first, second = Placement(group.weights), copies(group), copies(group)
    name = group.weights[0].name
    placement.show(first)
    placement.show(second)
    assert getattr(module, name) is second[0]
    placement.hide()
    assert getattr(module, name) is first[0]
    third = copies(group)
    placement.replace(third)
    assert getattr(module, name) is third[0]
    placement.hide()
    assert getattr(module, name) is group.weights[0].parameter
    if kind is nn.LSTM:
        assert module._flat_weights[0] is group.weights[0].parameter

"""Code in a step that writes, copies or replaces weights: as in the plain Trainer, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import WIDTH, Classifier, Net, Watched, compare_fits, fit
from stream_cases import assert_same
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune


class Scaled(Classifier):
    """Has a parameter of its own, outside of every chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.sum()


def in_place(module: Scaled) -> None:
    with torch.no_grad():
        module.scale.clamp_(max=0.98)


def through_data(module: Scaled) -> None:
    module.scale.data.clamp_(max=0.98)


def assigned(module: Scaled) -> None:
    module.scale.data = module.scale.data.clamp(max=0.98)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("write", [in_place, through_data, assigned])
def test_small_weights_that_a_step_writes_by_attribute_keep_the_value(
    write: Callable[[Scaled], None], early: bool, accumulate: int
) -> None:
    class Writing(Scaled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if early:
                write(self)
            loss = super().training_step(batch, batch_idx)
            if not early:
                write(self)
            return loss

    found = compare_fits(Writing, accumulate_grad_batches=accumulate)
    assert found.record["weights"]["scale"].max() < 1


@pytest.mark.parametrize("write", [in_place, through_data, assigned])
def test_small_weights_that_a_manual_step_writes_by_attribute_keep_the_value(write: Callable[[Scaled], None]) -> None:
    class Writing(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            write(self)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    compare_fits(Writing)


def test_embeddings_that_renormalise_their_rows_in_the_forward_train_the_same() -> None:
    class Renormalised(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3, max_norm=0.5)

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + self.embedding(batch[1]).square().mean()

    compare_fits(Renormalised, strategy={"resident_below": 64})


def test_hooks_around_the_backward_see_parameters_and_not_what_stands_for_them() -> None:
    class Looking(Scaled):
        def on_before_backward(self, loss: Tensor) -> None:
            self.seen.append(self.scale.is_leaf)

        def on_after_backward(self) -> None:
            assert self.scale.grad is not None
            self.seen.append(self.scale.grad.clone())
            if self.global_step % 2:
                self.scale.grad = None
            self.scale.data.clamp_(max=0.98)

    compare_fits(Looking, gradient_clip_val=0.5)


def test_copies_of_a_module_made_in_a_step_have_weights_of_their_own() -> None:
    class Copying(Scaled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append({name: p.clone() for name, p in copy.deepcopy(self.net).named_parameters()})
            return super().training_step(batch, batch_idx)

    compare_fits(Copying, strategy={"resident_below": 256})


def normed() -> nn.GRU:
    return parametrizations.weight_norm(nn.GRU(WIDTH, WIDTH, batch_first=True), "weight_hh_l0")


def pruned() -> nn.GRU:
    return prune.l1_unstructured(nn.GRU(WIDTH, WIDTH, batch_first=True), "weight_hh_l0", amount=0.3)


@pytest.mark.parametrize("make", [normed, pruned])
@pytest.mark.parametrize("resident_below", [0, 1 << 20])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_recurrent_modules_with_computed_weights_train_the_same(
    make: Callable[[], nn.GRU], resident_below: int, activations: str
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.net = make(), Net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(self.recurrent(x.unsqueeze(1))[0].squeeze(1))
            return out

    found = fit(lambda: Classifier(Recurrent()), Watched(resident_below=resident_below, activations=activations))
    expected = fit(lambda: Classifier(Recurrent()))
    assert_same(found.record, expected.record)


@pytest.mark.parametrize("resident_below", [0, 1 << 20])
def test_parameters_that_are_replaced_for_one_call_are_refused_by_name(resident_below: int) -> None:
    class Noisy(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            noisy = {name: p * 1.1 for name, p in self.net.named_parameters()}
            out: Tensor = torch.func.functional_call(self.net, noisy, (x,))
            return out

    with pytest.raises(Exception, match=r"parameter 'net\..*' was replaced in a step"):
        fit(Noisy, Watched(resident_below=resident_below))

"""Ctrl-C and termination, inside a forward, a backward and an update: the run ends, and every weight is whole."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from offload_cases import Classifier, loader, make_trainer
from robustness_cases import STRATEGIES
from stream_cases import assert_same
from torch import Tensor, nn

BATCH = 5
"""The batch in which the signal comes, of eight in two epochs."""

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Descent(torch.optim.SGD):
    """Plain descent, and a signal between two parameters."""

    update_granularity = "parameter"
    between: Callable[[], None] = staticmethod(lambda: None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])
                    self.between()
        return loss


class Middle(nn.Module):
    """A layer whose forward and backward tell when they run."""

    def __init__(self, owner: "Signalled") -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        (owner,) = self._owner
        owner.at("forward")
        out: Tensor = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda _gradient: owner.at("backward"))
        return out


class Signalled(Classifier):
    """Sends itself a signal, once."""

    def __init__(self, place: str, signum: int) -> None:
        super().__init__()
        self.net.blocks[1][2] = nn.Tanh()
        self.net.blocks.append(Middle(self))
        self.place, self.signum, self.updates = place, signum, 0

    def at(self, place: str, batch: int | None = None) -> None:
        if place == self.place and (self.trainer.fit_loop.total_batch_idx if batch is None else batch) == BATCH:
            self.place = ""
            os.kill(os.getpid(), self.signum)

    def updated(self) -> None:
        """One more parameter; updates may run on while the next batch has begun, so parameters tell the batch."""
        self.updates += 1
        self.at("update", (self.updates - 1) // len(list(self.parameters())))

    def configure_optimizers(self) -> Any:
        optimizer = Descent(self.parameters(), lr=0.1)
        optimizer.between = self.updated  # type: ignore[method-assign]
        return optimizer


class Recorder(pl.Callback):
    """Keeps the weights as they are before each batch and after the last."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, _trainer: Any, module: nn.Module, *_: Any) -> None:
        self.weights.append({name: tensor.clone() for name, tensor in module.state_dict().items()})

    on_train_end = on_train_batch_start


def trained(strategy: Any, model: Signalled, **options: Any) -> None:
    torch.manual_seed(2)
    make_trainer(strategy, **options).fit(model, loader(), loader(8))


def made(place: str, signum: int = 0) -> Signalled:
    torch.manual_seed(1)
    return Signalled(place, signum)


def same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def check_that_it_trains_on(strategy: str, model: Signalled) -> None:
    """The model is plain, no thread is left, and a new run of the same model is exact."""
    assert all("forward" not in vars(module) for module in model.modules())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained(STRATEGIES[strategy](), model)
    other = made("")
    other.load_state_dict(before)
    trained(STRATEGIES[strategy](), other)
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("place", ["forward", "backward", "update"])
@every_strategy
def test_termination_ends_the_run_after_the_batch(strategy: str, place: str) -> None:
    recorder, threads = Recorder(), set(threading.enumerate())
    trained(STRATEGIES[strategy](), made(""), callbacks=[recorder])
    model = made(place, signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        trained(STRATEGIES[strategy](), model)
    assert type(caught.value).__name__ == "SIGTERMException"
    assert model.place == ""
    after = 1 + (not same(model.state_dict(), recorder.weights[BATCH + 1]) and place == "update")  # it had begun
    assert_same(model.state_dict(), recorder.weights[BATCH + after])
    assert set(threading.enumerate()) <= threads
    check_that_it_trains_on(strategy, model)


@pytest.mark.parametrize("place", ["forward", "backward", "update"])
@every_strategy
def test_ctrl_c_ends_the_run_at_once_and_leaves_every_weight_whole(strategy: str, place: str) -> None:
    """Each weight is that from before the step, or that from after it."""
    recorder, threads = Recorder(), set(threading.enumerate())
    trained(STRATEGIES[strategy](), made(""), callbacks=[recorder])
    model = made(place, signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        trained(STRATEGIES[strategy](), model)
    assert caught.value.code == 1
    for name, tensor in model.state_dict().items():
        assert any(torch.equal(tensor, recorder.weights[index][name]) for index in (BATCH, BATCH + 1)), name
    if place == "forward":
        assert_same(model.state_dict(), recorder.weights[BATCH])
    assert set(threading.enumerate()) <= threads
    check_that_it_trains_on(strategy, model)
